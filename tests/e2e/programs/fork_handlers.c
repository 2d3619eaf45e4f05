/* Forks while pthread_atfork handlers are registered that start a thread, start a program, or fork.
 * fork_handlers MIB thread | program | fork | all */
#define _GNU_SOURCE
#include "fork_paths.h"
#include <pthread.h>
#include <spawn.h>
#include <string.h>

static const char *what;
static int wrong, inner;
extern char **environ;

static void *in_thread(void *argument) { (void)argument; return is_right() ? NULL : &wrong; }

static void act(void) {
    int is_all = !strcmp(what, "all");
    if (inner) return;
    inner = 1;
    if (is_all || !strcmp(what, "thread")) {
        pthread_t thread; void *result = &wrong;
        wrong += pthread_create(&thread, NULL, in_thread, NULL) || pthread_join(thread, &result) || result;
    }
    if (is_all || !strcmp(what, "program")) {
        pid_t child; char *arguments[] = { "true", NULL };
        wrong += posix_spawnp(&child, "true", NULL, NULL, arguments, environ) || !ended_well(child);
    }
    if (is_all || !strcmp(what, "fork")) {
        pid_t child = fork();
        if (child == 0) _exit(!is_right());
        wrong += !ended_well(child);
    }
    inner = 0;
}

int main(int count, char **arguments) {
    (void)count;
    what = arguments[2];
    pthread_atfork(act, act, act);
    fill(atoi(arguments[1]));
    for (int turn = 0; turn < 3; turn++) {
        pid_t child = fork();
        if (child == 0) _exit(!is_right() + 2 * (wrong != 0));
        wrong += !ended_well(child) || !is_right();
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
