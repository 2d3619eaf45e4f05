/* Forks whose system call writes ids to the program's memory (CLONE_PARENT_SETTID, CLONE_CHILD_SETTID, CLONE_PIDFD), under a
 * filter that kills the process for process_vm_readv and process_vm_writev.   filtered_clone MIB */
#include "checked.h"
#include <linux/filter.h>
#include <linux/sched.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define KILL(number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)

static int forbid(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        KILL(SYS_process_vm_readv), KILL(SYS_process_vm_writev), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = { sizeof filter / sizeof *filter, filter };
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program);
}

/* The memory that the kernel would write to. It may be swapped out. */
struct ids { int parent, child, pidfd; };

static long make_child(struct ids *ids, int by_clone3) {
    unsigned long flags = CLONE_PARENT_SETTID | CLONE_CHILD_SETTID;
    if (!by_clone3) return syscall(SYS_clone, flags | SIGCHLD, 0, &ids->parent, &ids->child, 0);
    struct clone_args arguments = {
        .flags = flags | CLONE_PIDFD, .pidfd = (uintptr_t)&ids->pidfd, .child_tid = (uintptr_t)&ids->child,
        .parent_tid = (uintptr_t)&ids->parent, .exit_signal = SIGCHLD,
    };
    return syscall(SYS_clone3, &arguments, sizeof arguments);
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    struct ids *ids = (void *)reserve(1, 3).at;
    prepare(atoi(argv[1]));
    if (forbid()) return 2;
    for (int round = 0; round < 6; round++) {
        memset(ids, 0, sizeof *ids);
        long child = make_child(ids, round & 1);
        if (child < 0) return 3;
        if (child == 0) _exit(ids->child != getpid() || !is_right());
        int status = -1;
        if (waitpid(child, &status, 0) != child || status) return verdict("the child");
        if (ids->parent != child || ids->child != 0) return verdict("the parent's ids");
        if (round & 1 && (ids->pidfd <= 0 || close(ids->pidfd))) return verdict("the pidfd");
    }
    return verdict(is_right() ? NULL : "the parent's memory");
}
