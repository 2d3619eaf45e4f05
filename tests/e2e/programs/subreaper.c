/* A subreaper gets the end of its children and of the orphans that they leave, and of no other process:
 * `subreaper MIB ROUNDS fork|exec|spawn`. Prints "right".
 *
 * In each round a child leaves a grandchild, which ends after it. By `exec`, both execute programs; by `spawn`, the
 * grandchild is started by posix_spawn(3). */
#define _GNU_SOURCE
#include <signal.h>
#include <spawn.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#include "checked.h"

extern char **environ;

enum { SEEN = 1 << 16 };
static _Atomic int signals;
static pid_t senders[SEEN];

static void note(int signal, siginfo_t *info, void *context) {
    (void)signal, (void)context;
    int at = atomic_fetch_add(&signals, 1);
    if (at < SEEN) senders[at] = info->si_pid;
}

static void check(int holds, const char *what) {
    if (holds) return;
    puts(what);
    exit(1);
}

static pid_t start_true(int by_spawn) {
    char *arguments[] = { "/bin/true", NULL };
    pid_t pid = 0;
    if (by_spawn) {
        check(posix_spawn(&pid, arguments[0], NULL, NULL, arguments, environ) == 0, "posix_spawn");
        return pid;
    }
    pid = fork();
    if (pid == 0) {
        execv(arguments[0], arguments);
        _exit(9);
    }
    return pid;
}

static void leave_grandchild(int how, int to, int wait_for) {
    if (data.at[0] != word(&data, 0, 0)) _exit(4);
    pid_t grandchild = how == 's' || how == 'e' ? start_true(how == 's') : fork();
    if (grandchild == 0) {
        char end;
        if (read(wait_for, &end, 1) != 0) _exit(8);
        _exit(wrong_pages(&data) ? 10 : 7);
    }
    if (write(to, &grandchild, sizeof grandchild) != sizeof grandchild) _exit(6);
    if (how == 'e') {
        execl("/bin/sh", "sh", "-c", "exec /bin/sh -c 'exit 3'", NULL);
        _exit(5);
    }
    _exit(3);
}

int main(int count, char **arguments) {
    check(count == 4, "usage");
    int rounds = atoi(arguments[2]), how = arguments[3][0];
    data = reserve(strtoul(arguments[1], NULL, 10), 1);
    fill(&data);
    struct sigaction action = { .sa_sigaction = note, .sa_flags = SA_SIGINFO | SA_RESTART };
    check(sigaction(SIGCHLD, &action, NULL) == 0, "sigaction");
    check(prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0, "prctl");
    for (int round = 0; round < rounds; round++) {
        int told[2], end[2], status;
        check(pipe(told) == 0 && pipe(end) == 0, "pipe");
        int first = atomic_load(&signals);
        pid_t child = fork();
        if (child == 0) {
            close(end[1]);
            leave_grandchild(how, told[1], end[0]);
        }
        pid_t grandchild, ended;
        close(end[0]);
        check(read(told[0], &grandchild, sizeof grandchild) == sizeof grandchild, "read");
        check(waitpid(child, &status, 0) == child && status == 3 << 8, "the child's status");
        close(end[1]);
        int found = 0;
        while ((ended = wait(&status)) > 0) {
            check(ended == grandchild, "wait finds a stranger");
            check(status == (how == 'f' ? 7 << 8 : 0), "the grandchild's status");
            found++;
        }
        check(found == 1, "the grandchild is not found");
        for (int at = first; at < atomic_load(&signals) && at < SEEN; at++) {
            check(senders[at] == child || senders[at] == grandchild, "SIGCHLD from a stranger");
        }
        close(told[0]), close(told[1]);
    }
    puts("right");
    return 0;
}
