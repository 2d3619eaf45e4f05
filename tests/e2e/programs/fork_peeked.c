/* A debugger reads all memory of a child at its fork, before the child has run (PTRACE_O_TRACEFORK). The child still has its
 * own content there, and so has its parent. */
#include "checked.h"
#include <errno.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>

#define FORKS 8

/* The debugged program: forks, and each child checks what it has. Returns the exit code. */
static int debugged(void) {
    for (int round = 0; round < FORKS; round++) {
        if (wrong_pages(&pressure)) return 3;
        pid_t child = fork();
        if (child == 0) _exit(wrong_pages(&data) ? 1 : 0);
        int status;
        if (waitpid(child, &status, 0) != child || status) return 1;
    }
    return is_right() ? 0 : 4;
}

/* Reads every page of `data` in process `pid`, and returns how many of them are not as filled. */
static size_t peek(pid_t pid) {
    struct checked copy = data;
    copy.at = malloc(data.pages * PAGE);
    struct iovec from = { data.at, data.pages * PAGE }, to = { copy.at, data.pages * PAGE };
    if (process_vm_readv(pid, &to, 1, &from, 1, 0) != (ssize_t)from.iov_len) { perror("process_vm_readv"); exit(2); }
    size_t wrong = wrong_pages(&copy);
    free(copy.at);
    return wrong;
}

int main(void) {
    prepare(16);
    int ready[2];
    char byte = 1;
    if (pipe(ready)) return 2;
    pid_t program = fork();
    if (program == 0) {
        if (read(ready[0], &byte, 1) != 1) _exit(2);
        _exit(debugged());
    }
    if (ptrace(PTRACE_SEIZE, program, 0, PTRACE_O_TRACEFORK | PTRACE_O_TRACECLONE) || write(ready[1], &byte, 1) != 1) return 2;
    int status, peeked = 0, code = -1;
    pid_t stopped;
    while ((stopped = waitpid(-1, &status, __WALL)) > 0) {
        if (!WIFSTOPPED(status)) {
            if (stopped == program) code = status;
            continue;
        }
        // A child stops before its first instruction.
        if (stopped != program && status >> 16 == PTRACE_EVENT_STOP) {
            printf("%zu of %zu pages differ\n", peek(stopped), data.pages);
            peeked++;
        }
        int is_event = status >> 16 != 0;
        ptrace(PTRACE_CONT, stopped, 0, is_event ? 0 : WSTOPSIG(status));
    }
    if (peeked != FORKS) return verdict("the debugger did not see the children");
    if (code) fprintf(stderr, "status %#x\n", code);
    return verdict(code ? "the debugged program or its children" : is_right() ? NULL : "the debugger's memory");
}
