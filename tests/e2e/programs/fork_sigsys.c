/* Forks of a program that uses SIGSYS itself, while most memory is swapped out.
 * fork_sigsys MIB handler | blocked | ignored | threads: a filter traps a call
 * fork_sigsys MIB errno | trap NUMBER...: a filter fails or traps system calls that an agent might make
 * fork_sigsys MIB dispatch | dispatched: Syscall User Dispatch, off over the fork, or on for all but the C library */
#define _GNU_SOURCE
#include "fork_paths.h"
#include <errno.h>
#include <link.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <ucontext.h>

enum { ANSWER = 4711 };
static volatile int caught;
static volatile char selector;
static int is_blocked;

static void on_sigsys(int signal, siginfo_t *info, void *context) {
    (void)signal; (void)info;
    selector = 0;
    __atomic_add_fetch(&caught, 1, __ATOMIC_SEQ_CST);
    ((ucontext_t *)context)->uc_mcontext.gregs[REG_RAX] = ANSWER;
}

static void handle(void) {
    struct sigaction action = { .sa_sigaction = on_sigsys, .sa_flags = SA_SIGINFO };
    sigaction(SIGSYS, &action, NULL);
}

static int is_kept(void) {
    struct sigaction action;
    return !sigaction(SIGSYS, NULL, &action) && action.sa_sigaction == on_sigsys;
}

static void filter(unsigned answer, int count, const int *numbers) {
    struct sock_filter code[64] = { BPF_STMT(BPF_LD | BPF_W | BPF_ABS, 0) };
    int len = 1;
    for (int index = 0; index < count; index++) {
        code[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, numbers[index], 0, 1);
        code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, answer);
    }
    code[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { len, code };
    prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) { perror("seccomp"); exit(2); }
}

/* Forks several times and returns the number of wrong results. Only this test makes the trapped call, uname(2). */
static int forks(void) {
    int wrong = 0;
    for (int turn = 0; turn < 5; turn++) {
        sigset_t before, after;
        pthread_sigmask(SIG_SETMASK, NULL, &before);
        pid_t child = fork();
        if (child == 0) {
            pthread_sigmask(SIG_SETMASK, NULL, &after);
            int masks = memcmp(&before, &after, 8), asked = is_blocked || syscall(SYS_uname, 0) == ANSWER;
            _exit(!is_right() + 2 * (masks != 0) + 4 * !asked + 8 * !is_kept());
        }
        wrong += !ended_well(child);
        pthread_sigmask(SIG_SETMASK, NULL, &after);
        wrong += memcmp(&before, &after, 8) != 0 || !is_kept();
        wrong += !is_blocked && syscall(SYS_uname, 0) != ANSWER;
    }
    return wrong;
}

static void *in_thread(void *wrong) { *(int *)wrong = forks(); return NULL; }

static int use_filter(const char *how) {
    int number = SYS_uname, wrong = 0;
    sigset_t set;
    handle();
    filter(SECCOMP_RET_TRAP, 1, &number);
    if (!strcmp(how, "threads")) {
        pthread_t threads[4]; int each[4];
        for (int index = 0; index < 4; index++) pthread_create(&threads[index], NULL, in_thread, &each[index]);
        for (int index = 0; index < 4; index++) { pthread_join(threads[index], NULL); wrong += each[index]; }
        return wrong;
    }
    if (!strcmp(how, "blocked")) {
        is_blocked = 1;
        sigfillset(&set);
        pthread_sigmask(SIG_SETMASK, &set, NULL);
    }
    wrong = forks();
    if (!strcmp(how, "ignored")) {
        signal(SIGSYS, SIG_IGN);
        pid_t child = fork();
        if (child == 0) { struct sigaction now; sigaction(SIGSYS, NULL, &now); _exit(!is_right() + 2 * (now.sa_handler != SIG_IGN)); }
        wrong += !ended_well(child);
    }
    return wrong;
}

static uintptr_t code, code_bytes;

static int find_code(struct dl_phdr_info *object, size_t bytes, void *unused) {
    (void)bytes; (void)unused;
    if (!strstr(object->dlpi_name, "libc.so")) return 0;
    for (int index = 0; index < object->dlpi_phnum; index++) {
        const ElfW(Phdr) *part = &object->dlpi_phdr[index];
        if (part->p_type == PT_LOAD && part->p_flags & PF_X) { code = object->dlpi_addr + part->p_vaddr; code_bytes = part->p_memsz; }
    }
    return 1;
}

static long own_getppid(void) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"((long)SYS_getppid) : "rcx", "r11", "memory");
    return result;
}

/* The kernel keeps dispatch in the parent, with range and selector, and drops it in the child. */
static int use_dispatch(int is_on) {
    int wrong = 0;
    handle();
    dl_iterate_phdr(find_code, NULL);
    if (prctl(59, 1, is_on ? code : 0, is_on ? code_bytes : 0, &selector)) { puts("wrong 0"); exit(0); }
    for (int turn = 0; turn < 3; turn++) {
        selector = is_on;
        pid_t child = fork();
        if (child == 0) { selector = 1; long parent = own_getppid(); _exit(!is_right() + 2 * (parent == ANSWER)); }
        wrong += selector != is_on;
        wrong += !ended_well(child);
        int before = caught;
        selector = 1;
        long answer = own_getppid();
        selector = is_on;
        wrong += answer != ANSWER || caught != before + 1 || !is_right();
    }
    selector = 0;
    return wrong;
}

int main(int count, char **arguments) {
    const char *how = arguments[2];
    int wrong = 0, numbers[16], len = 0;
    fill(atoi(arguments[1]));
    if (!strcmp(how, "errno") || !strcmp(how, "trap")) {
        for (int index = 3; index < count; index++) numbers[len++] = atoi(arguments[index]);
        handle();
        filter(!strcmp(how, "trap") ? SECCOMP_RET_TRAP : SECCOMP_RET_ERRNO | EPERM, len, numbers);
        for (int turn = 0; turn < 3; turn++) {
            pid_t child = fork();
            if (child == 0) _exit(!is_right());
            wrong += !ended_well(child) || !is_right();
        }
    } else if (!strcmp(how, "dispatch")) wrong = use_dispatch(0);
    else if (!strcmp(how, "dispatched")) wrong = use_dispatch(1);
    else wrong = use_filter(how);
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
