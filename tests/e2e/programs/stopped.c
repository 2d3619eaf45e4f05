/* Reads the memory of a child that is stopped, most of which is swapped out.   stopped HOW MIB */
#include "checked.h"
#include <dirent.h>
#include <fcntl.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <errno.h>

enum { MAX_TASKS = 64 };

static pid_t traced[MAX_TASKS];
static int traced_count;

/* As debuggers and profilers do: every thread in /proc/PID/task. */
static int trace_all(pid_t child, int seize) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/task", child);
    DIR *directory = opendir(path);
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        pid_t task = atoi(entry->d_name);
        if (task <= 0 || traced_count == MAX_TASKS) continue;
        int status;
        if (ptrace(seize ? PTRACE_SEIZE : PTRACE_ATTACH, task, 0, 0) || (seize && ptrace(PTRACE_INTERRUPT, task, 0, 0))) return 0;
        if (waitpid(task, &status, __WALL) != task || !WIFSTOPPED(status)) return 0;
        traced[traced_count++] = task;
    }
    if (directory) closedir(directory);
    return traced_count > 0;
}

static int stop(pid_t child, const char *how) {
    int status;
    if (!strncmp(how, "trace", 5)) return trace_all(child, 0);
    if (!strncmp(how, "seize", 5)) return trace_all(child, 1);
    kill(!strncmp(how, "group", 5) ? -child : child, SIGSTOP);
    return waitpid(child, &status, WUNTRACED) == child && WIFSTOPPED(status);
}

static int read_all(pid_t child, int by_file, void *to, uintptr_t from, size_t bytes) {
    if (by_file) {
        char path[64];
        snprintf(path, sizeof path, "/proc/%d/mem", child);
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        size_t have = 0;
        for (ssize_t got; have < bytes && (got = pread(fd, (char *)to + have, bytes - have, from + have)) > 0; have += got) {}
        close(fd);
        return have == bytes;
    }
    struct iovec mine = { to, bytes }, theirs = { (void *)from, bytes };
    return process_vm_readv(child, &mine, 1, &theirs, 1, 0) == (ssize_t)bytes;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    const char *how = argv[1];
    size_t mib = atoi(argv[2]);
    int ready[2], go[2];
    if (pipe(ready) || pipe(go)) return 2;
    pid_t child = fork();
    if (child == 0) {
        char byte;
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        setpgid(0, 0);
        close(go[1]);
        prepare(mib);
        uintptr_t at = (uintptr_t)data.at;
        if (write(ready[1], &at, sizeof at) != sizeof at) _exit(2);
        while (read(go[0], &byte, 1) < 0) {}
        _exit(!is_right());
    }
    uintptr_t at;
    if (read(ready[0], &at, sizeof at) != sizeof at) return verdict("the child has ended");
    struct checked copy = reserve(mib, 1);
    alarm(30); // a reader that hangs is killed, and its child with it
    if (!stop(child, how)) return verdict("the child cannot be stopped");
    int was_read = read_all(child, strstr(how, "file") != NULL, copy.at, at, mib * MIB);
    for (int index = 0; index < traced_count; index++) ptrace(PTRACE_DETACH, traced[index], 0, 0);
    kill(-child, SIGCONT);
    close(go[1]);
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    if (!was_read) return verdict("not all was read");
    if (wrong_pages(&copy)) return verdict("other content was read");
    return verdict(status ? "the child goes on with other content" : NULL);
}
