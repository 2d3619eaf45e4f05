// Many threads on stacks that may be managed end at once. None has touched its control block lately (see thread_ends.c).
// `thread_crowd guard|default|filter THREADS`: guard: stacks have no guard; default: the process's default guard is 128K;
// filter: as guard, and a seccomp filter is installed.
#define _GNU_SOURCE
#include "quiet_thread.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>

enum { HELD = 80 << 20 };

static const struct timespec long_enough = {0, 500000000};

static void *body(void *argument) {
    (void)argument;
    return end_quietly(&long_enough);
}

static int prepare(const char *mode, pthread_attr_t *attributes) {
    if (!strcmp(mode, "guard")) return pthread_attr_setguardsize(attributes, 0);
    if (!strcmp(mode, "default")) {
        if (pthread_attr_setguardsize(attributes, 128 << 10)) return 1;
        return pthread_setattr_default_np(attributes);
    }
    // The filter kills the process at gettid(2), which the C library does not call when it starts a thread.
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_gettid, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = {sizeof rules / sizeof *rules, rules};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return 1;
    return pthread_attr_setguardsize(attributes, 0);
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    int threads = atoi(arguments[2]);
    pthread_t *all = calloc(threads, sizeof *all);
    char *held = mmap(NULL, HELD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    if (!all || held == MAP_FAILED) return 2;
    memset(held, 1, HELD);
    if (prepare(arguments[1], &attributes)) return 2;
    for (int i = 0; i < threads; i++) {
        if (pthread_create(&all[i], strcmp(arguments[1], "default") ? &attributes : NULL, body, NULL)) return 2;
    }
    for (int turn = 2; turn < 4; turn++) memset(held, turn, HELD);
    for (int i = 0; i < threads; i++) {
        if (!has_ended(all[i])) {
            printf("thread %d never ended\n", i);
            fflush(stdout);
            _Exit(1);
        }
    }
    puts("all have ended");
    return 0;
}
