/* Makes a child in one of many ways, each by a function of the C library that this object is bound to, or of one that is looked up in
 * a handle. Linked to a program, opened with RTLD_DEEPBIND, or in a namespace with a C library of its own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <linux/sched.h>
#include <pty.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

extern pid_t _Fork(void);

static int (*in_child)(void);
static int run(void *argument) { (void)argument; _exit(in_child()); }

/* The child of a path exits with what `body` returns; the parent gets its id. */
pid_t make_child(const char *path, void *handle, int (*body)(void)) {
    pid_t (*do_fork)(void) = fork, (*do__fork)(void) = _Fork;
    int (*do_clone)(int (*)(void *), void *, int, void *, ...) = clone;
    int (*do_forkpty)(int *, char *, const struct termios *, const struct winsize *) = forkpty;
    long (*do_syscall)(long, ...) = syscall;
    pid_t child = -1;
    if (handle) {
        do_fork = dlsym(handle, "fork"); do__fork = dlsym(handle, "_Fork"); do_clone = dlsym(handle, "clone");
        do_forkpty = dlsym(handle, "forkpty"); do_syscall = dlsym(handle, "syscall");
    }
    in_child = body;
    if (!strcmp(path, "fork")) child = do_fork();
    else if (!strcmp(path, "_Fork")) child = do__fork();
    else if (!strcmp(path, "forkpty")) { int master; child = do_forkpty(&master, NULL, NULL, NULL); }
    else if (!strcmp(path, "SYS_fork")) child = do_syscall(SYS_fork);
    else if (!strcmp(path, "SYS_clone")) child = do_syscall(SYS_clone, (long)SIGCHLD, 0L, 0L, 0L, 0L);
    else if (!strcmp(path, "SYS_clone3")) {
        struct clone_args arguments = { .exit_signal = SIGCHLD };
        child = do_syscall(SYS_clone3, &arguments, sizeof arguments);
    } else if (!strcmp(path, "clone")) {
        char *stack = mmap(NULL, 65536, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        child = do_clone(run, stack + 65536, SIGCHLD, NULL);
        munmap(stack, 65536);
    }
    if (child == 0) _exit(body());
    return child;
}

/* Runs `body` as a daemon by daemon(3): the caller exits, and its child runs `body`. */
void make_daemon(void *handle, int (*body)(void)) {
    int (*do_daemon)(int, int) = daemon;
    if (handle) do_daemon = dlsym(handle, "daemon");
    if (do_daemon(1, 1)) _exit(1);
    _exit(body());
}
