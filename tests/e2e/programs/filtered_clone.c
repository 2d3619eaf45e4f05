// Forks whose system call writes ids to the program's memory (CLONE_PARENT_SETTID, CLONE_CHILD_SETTID, CLONE_PIDFD), under a
// filter that kills the process for process_vm_readv and process_vm_writev.
#define _GNU_SOURCE
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef CLONE_PIDFD
#define CLONE_PIDFD 0x1000
#endif
#define KILL(number) \
    BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS)

struct clone3_args { unsigned long flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size, tls; };

int main(int argc, char **argv) {
    size_t bytes = (argc > 1 ? strtoul(argv[1], NULL, 10) : 96) << 20;
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (size_t at = 0; at < bytes; at += 4096) memset(memory + at, 1 + at / 4096 % 100, 4096);
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        KILL(SYS_process_vm_readv), KILL(SYS_process_vm_writev), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog filter = { sizeof code / sizeof *code, code };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter)) return 2;
    // The ids lie in memory that may be swapped out.
    int *ids = (int *)memory, wrong = 0;
    for (int round = 0; round < 6; round++) {
        memset(ids, 0, 3 * sizeof *ids);
        long child;
        if (round & 1) {
            struct clone3_args all = { CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | CLONE_PIDFD, (long)&ids[2], (long)&ids[1],
                                       (long)&ids[0], SIGCHLD, 0, 0, 0 };
            child = syscall(SYS_clone3, &all, sizeof all);
        } else {
            child = syscall(SYS_clone, CLONE_PARENT_SETTID | CLONE_CHILD_SETTID | SIGCHLD, 0, &ids[0], &ids[1], 0);
        }
        if (child < 0) return 3;
        if (child == 0) {
            size_t other = 0;
            for (size_t at = 4096; at < bytes; at += 4096) other += memory[at] != (char)(1 + at / 4096 % 100);
            _exit(ids[1] != getpid() || other > 0);
        }
        int status = -1;
        if (waitpid(child, &status, 0) != child || status) printf("round %d: wait status %x\n", round, status), wrong = 1;
        if (ids[0] != child || ids[1] != 0) printf("round %d: %d, %d instead of %ld, 0\n", round, ids[0], ids[1], child), wrong = 1;
        if (round & 1 && (ids[2] <= 0 || close(ids[2]))) printf("round %d: pidfd %d\n", round, ids[2]), wrong = 1;
    }
    puts(wrong ? "WRONG" : "OK");
    return wrong;
}
