/* Forbids itself nearly all system calls, before or after most memory is swapped out.   filtered errno|kill|own|strict early|late MIB */
#include "checked.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

#define ALLOW(number) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void forbid(const char *how) {
    if (!strcmp(how, "strict")) {
        if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT)) _exit(2);
        return;
    }
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        ALLOW(SYS_read), ALLOW(SYS_write), ALLOW(SYS_futex), ALLOW(SYS_exit), ALLOW(SYS_exit_group), ALLOW(SYS_rt_sigreturn),
        ALLOW(SYS_madvise), ALLOW(SYS_munmap), ALLOW(SYS_rt_sigprocmask),
        BPF_STMT(BPF_RET | BPF_K, !strcmp(how, "kill") ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | EPERM),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, !strcmp(how, "own") ? 0 : SECCOMP_FILTER_FLAG_TSYNC, &program)) _exit(2);
}

static pthread_barrier_t started, filtered;
static int other_is_right;

static void *other(void *unused) {
    pthread_barrier_wait(&started);
    pthread_barrier_wait(&filtered);
    other_is_right = is_right();
    return unused;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    const char *how = argv[1];
    int is_late = !strcmp(argv[2], "late"), is_strict = !strcmp(how, "strict");
    size_t mib = atoi(argv[3]);
    data = reserve(mib, 1);
    pressure = reserve(3 * mib, 2);
    pthread_t thread;
    // Seccomp's strict mode applies to one thread only. It allows no futex call, so that thread cannot wait for another one.
    if (!is_strict) {
        pthread_barrier_init(&started, NULL, 2);
        pthread_barrier_init(&filtered, NULL, 2);
        if (pthread_create(&thread, NULL, other, NULL)) return 2;
        // The other thread starts before the filter, because a starting thread makes further system calls.
        pthread_barrier_wait(&started);
    }
    if (is_late) prepare(mib);
    forbid(how);
    // Filling the memory under the filter needs more of the limit.
    prepare(mib);
    int right = is_right();
    if (!is_strict) {
        pthread_barrier_wait(&filtered);
        pthread_join(thread, NULL);
        right &= other_is_right;
    }
    const char *said = right ? "OK\n" : "WRONG\n";
    if (write(1, said, strlen(said)) < 0) right = 0;
    syscall(is_strict ? SYS_exit : SYS_exit_group, !right);
    return 3;
}
