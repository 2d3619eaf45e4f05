/* Forks after the program has installed a filter that kills for some system calls: parent, child and grandchild have all memory.
 * Usage: filtered_fork MIB NUMBER... */
#include "checked.h"
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define MOST_CALLS 16

static void forbid(char **numbers, int count) {
    struct sock_filter filter[2 * MOST_CALLS + 2];
    unsigned short len = 0;
    filter[len++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < count && i < MOST_CALLS; i++) {
        filter[len++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, strtoul(numbers[i], NULL, 0), 0, 1);
        filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS);
    }
    filter[len++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    struct sock_fprog program = { len, filter };
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program)) _exit(2);
}

/* Forks `generations` times, each child from the one before. Returns whether the memory of all of them is right. */
static int descend(int generations) {
    if (!generations) return is_right();
    pid_t child = fork();
    if (child == 0) _exit(!descend(generations - 1));
    int status;
    return child > 0 && waitpid(child, &status, 0) == child && !status && is_right();
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    prepare(strtoul(argv[1], NULL, 0));
    forbid(argv + 2, argc - 2);
    return verdict(descend(2) ? NULL : "a child was killed, or has wrong memory");
}
