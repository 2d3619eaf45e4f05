/* A program whose memory has several users, or that ends unlike most.   ends HOW MIB
 * It prepares its memory (unless `early`), prints "ready", reads a byte, and ends. */
#include "checked.h"
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static size_t mib;
static char stack[256 << 10] __attribute__((aligned(16)));
static int done[2];

static void raw_exit(int code) {
    for (;;) syscall(SYS_exit, code);
}

/* Runs in a second process that shares the memory: waits until the first process has ended, and checks the memory. */
static int outlive(void *parent) {
    while (getppid() == *(pid_t *)parent) nap(0.001);
    nap(0.1);
    char answer = is_right() ? 'y' : 'n';
    if (write(done[1], &answer, 1) != 1) _exit(2);
    nap(0.1);
    _exit(answer != 'y');
}

static void *last(void *is_prepared) {
    nap(0.1);
    prepare(mib);
    int wrong = !is_right();
    nap(0.1);
    if (is_prepared) {
        verdict(wrong ? "memory" : NULL);
        exit(wrong);
    }
    raw_exit(wrong);
    return NULL;
}

/* Starts a process that shares its memory with a child (`clone` or `vfork`), and checks that the child outlives it. */
static const char *be_outlived(const char *how) {
    int status;
    if (pipe(done)) return "pipe";
    pid_t watched = fork();
    if (watched == 0) {
        static pid_t self;
        self = getpid();
        prepare(mib);
        if (!strcmp(how, "clone-outlives")) {
            if (clone(outlive, stack + sizeof stack, CLONE_VM | SIGCHLD, &self) < 0) _exit(2);
            nap(0.1);
            _exit(0);
        }
        pid_t killer = fork();
        if (killer == 0) {
            nap(0.3);
            kill(self, SIGKILL);
            _exit(0);
        }
        // The parent sleeps in vfork, and dies there.
        if (vfork() == 0) outlive(&self);
        _exit(3);
    }
    close(done[1]);
    waitpid(watched, &status, 0);
    char answer = 0;
    if (read(done[0], &answer, 1) != 1) return "the user that outlives it died";
    return answer == 'y' ? NULL : "the user that outlives it finds other memory";
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const char *how = argv[1];
    mib = atoi(argv[2]);
    if (!strcmp(how, "clone-outlives") || !strcmp(how, "vfork-outlives")) return verdict(be_outlived(how));
    if (!strstr(how, "early")) prepare(mib);
    printf("ready\n");
    fflush(stdout);
    char byte;
    if (read(0, &byte, 1) < 0) return 2;
    if (data.at && !is_right()) return verdict("memory");
    pthread_t thread;
    static pid_t self;
    self = getpid();
    if (!strcmp(how, "main")) return 0;
    if (!strcmp(how, "exit")) _exit(0);
    if (!strcmp(how, "raw")) raw_exit(0);
    if (!strcmp(how, "killed")) kill(getpid(), SIGKILL);
    if (!strcmp(how, "aborted")) abort();
    if (!strcmp(how, "executes")) execl("/bin/sleep", "sleep", "1", NULL);
    if (!strncmp(how, "main-gone", 9)) {
        if (pthread_create(&thread, NULL, last, &mib)) return 2;
        pthread_exit(NULL);
    }
    if (!strncmp(how, "raw-main-gone", 13)) {
        if (pthread_create(&thread, NULL, last, NULL)) return 2;
        raw_exit(0);
    }
    if (!strcmp(how, "vfork")) {
        // The child writes its verdict to done[1], which is stdout here.
        done[1] = 1;
        if (vfork() == 0) outlive(&self);
    }
    return 3;
}
