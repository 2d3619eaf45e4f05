/* Forks by every function of the C library while most memory is swapped out. Parent and child check their memory.
 * fork_paths MIB linked | handle | deepbind LIBRARY | namespace LIBRARY */
#define _GNU_SOURCE
#include "fork_library.c"
#include "fork_paths.h"

static int report[2];

static int check(void) { return !is_right(); }

/* The child makes a child and a thread's worth of memory of its own. */
static int check_and_fork(void) {
    if (!is_right()) return 1;
    data[5] = 7;
    return !ended_well(make_child("fork", NULL, check)) ? 2 : data[5] != 7;
}

static int check_as_daemon(void) {
    char right = is_right();
    return write(report[1], &right, 1) != 1;
}

int main(int count, char **arguments) {
    pid_t (*make)(const char *, void *, int (*)(void)) = make_child;
    void (*daemonise)(void *, int (*)(void)) = make_daemon;
    static const char *paths[] = { "fork", "_Fork", "clone", "forkpty", "SYS_fork", "SYS_clone", "SYS_clone3" };
    const char *how = arguments[2];
    void *handle = NULL, *library = NULL;
    int wrong = 0;
    if (!strcmp(how, "handle")) handle = dlopen("libc.so.6", RTLD_NOW);
    if (!strcmp(how, "deepbind")) library = dlopen(arguments[3], RTLD_NOW | RTLD_DEEPBIND);
    if (!strcmp(how, "namespace")) library = dlmopen(LM_ID_NEWLM, arguments[3], RTLD_NOW);
    if (count > 3) {
        if (!library) { fprintf(stderr, "%s\n", dlerror()); return 2; }
        make = (pid_t (*)(const char *, void *, int (*)(void)))dlsym(library, "make_child");
        daemonise = (void (*)(void *, int (*)(void)))dlsym(library, "make_daemon");
    }
    fill(atoi(arguments[1]));
    for (unsigned path = 0; path < sizeof paths / sizeof *paths; path++) {
        int is_whole = !strcmp(paths[path], "fork") && strcmp(how, "namespace");
        int right = ended_well(make(paths[path], handle, is_whole ? check_and_fork : check)) && is_right();
        if (!right) { printf("wrong: %s of %s\n", paths[path], how); wrong++; }
    }
    if (pipe(report)) return 2;
    pid_t child = fork();
    if (child == 0) daemonise(handle, check_as_daemon);
    char right = 0;
    close(report[1]);
    wrong += !ended_well(child) || read(report[0], &right, 1) != 1 || !right || !is_right();
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
