/* Kills children at all moments of their start: those of a process with memory, or those that execute a program.
 * Usage: killed_at_start fork|exec CHILDREN */
#include "checked.h"
#include <signal.h>
#include <sys/wait.h>

#define SIZE_MIB 8

static pid_t begin(int executes, char *self, int tells) {
    pid_t child = fork();
    if (child) return child;
    if (executes) execl("/proc/self/exe", self, tells ? "end" : "wait", NULL);
    if (tells) _exit(0);
    for (;;) pause();
}

/* Seconds from a fork to the end of a child that is let live. */
static double time_of_one(int executes, char *self) {
    double start = now();
    int status;
    waitpid(begin(executes, self, 1), &status, 0);
    if (status) exit(verdict("a child that was let live has failed"));
    return now() - start;
}

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "end")) return 0;
    while (argc == 2) pause();
    int executes = !strcmp(argv[1], "exec"), children = atoi(argv[2]);
    prepare(SIZE_MIB);
    double whole = time_of_one(executes, argv[0]);
    for (int i = 0; i < 3; i++) {
        double time = time_of_one(executes, argv[0]);
        if (time > whole) whole = time;
    }
    for (int i = 0; i < children; i++) {
        double until = now() + whole * i / children;
        pid_t child = begin(executes, argv[0], 0);
        while (now() < until) {}
        int status;
        if (child < 0 || kill(child, SIGKILL) || waitpid(child, &status, 0) != child)
            return verdict("a child cannot be started and killed");
        if (!WIFSIGNALED(status) || WTERMSIG(status) != SIGKILL) return verdict("a child has ended otherwise");
    }
    return verdict(is_right() ? NULL : "memory has changed");
}
