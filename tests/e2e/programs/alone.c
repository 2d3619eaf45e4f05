/* A program must not see the agent's threads and processes. Each question is asked three times: in a forked child before
 * memory is swapped out, in a forked child afterwards, and in the program itself.   alone QUESTION MIB */
#include "checked.h"
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

enum { MAX_TASKS = 64, NOBODY = 65534 };

static const char *say(const char *what) {
    static char text[200];
    snprintf(text, sizeof text, "%s: %s", what, strerror(errno));
    return text;
}

/* Waits for a child and returns its wait status; -1 if the wait fails. */
static int status_of(pid_t child) {
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR) {}
    return status;
}

// ---- namespaces ----

static const char *user_namespace(void) { return unshare(CLONE_NEWUSER) ? say("unshare(CLONE_NEWUSER)") : NULL; }

/* setns(2) refuses a mount namespace to a process that shares its root and working directory (CLONE_FS). */
static const char *mount_namespace(void) {
    int ready[2];
    if (pipe(ready)) return say("pipe");
    pid_t other = fork();
    if (other == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        char answer = unshare(CLONE_NEWNS) ? 'n' : 'y';
        if (write(ready[1], &answer, 1) == 1) pause();
        _exit(1);
    }
    char answer = 'n', path[64];
    if (read(ready[0], &answer, 1) != 1 || answer != 'y') return say("unshare(CLONE_NEWNS)");
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", other);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    const char *fault = fd < 0 || setns(fd, CLONE_NEWNS) ? say("setns(CLONE_NEWNS)") : NULL;
    kill(other, SIGKILL);
    status_of(other);
    return fault;
}

// ---- threads ----

static atomic_int started;

static void *idle(void *unused) {
    atomic_fetch_add(&started, 1);
    for (;;) pause();
    return unused;
}

static void start_threads(int count) {
    int before = atomic_load(&started);
    for (int index = 0; index < count; index++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, idle, NULL)) exit(2);
    }
    while (atomic_load(&started) < before + count) nap(0.001);
}

static int all_tasks(pid_t *tasks) {
    DIR *directory = opendir("/proc/self/task");
    int count = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory));)
        if (atoi(entry->d_name) && count < MAX_TASKS) tasks[count++] = atoi(entry->d_name);
    if (directory) closedir(directory);
    return count;
}

/* Returns the number that follows `name` in /proc/self/task/TASK/status; -1 if there is none. */
static long status_number(pid_t task, const char *name) {
    char path[64], line[256];
    long number = -1;
    snprintf(path, sizeof path, "/proc/self/task/%d/status", task);
    FILE *file = fopen(path, "r");
    while (file && fgets(line, sizeof line, file))
        if (!strncmp(line, name, strlen(name))) number = atol(line + strlen(name));
    if (file) fclose(file);
    return number;
}

/* Returns the number of threads from /proc/self/stat. Python warns about a fork if it is more than 1. */
static long stat_threads(void) {
    char text[1024] = "";
    int fd = open("/proc/self/stat", O_RDONLY);
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    char *field = length > 0 ? strrchr(text, ')') : NULL;
    for (int skipped = 0; field && skipped < 18; skipped++) field = strchr(field + 1, ' ');
    return field ? atol(field) : -1;
}

static const char *tasks(void) {
    pid_t ids[MAX_TASKS];
    for (int threads = 1; threads <= 3; threads += 2) {
        if (all_tasks(ids) != threads) return "tasks in /proc/self/task that are not the program's";
        if (status_number(getpid(), "Threads:") != threads) return "Threads: counts others";
        if (stat_threads() != threads) return "/proc/self/stat counts others";
        if (threads == 1) start_threads(2);
    }
    return NULL;
}

static atomic_int answers;

static void answer(int signal) {
    (void)signal;
    atomic_fetch_add(&answers, 1);
}

static void become_nobody(int signal) {
    (void)signal;
    int before = errno;
    syscall(SYS_setuid, NOBODY);
    errno = before;
    atomic_fetch_add(&answers, 1);
}

/* Signals every task and waits for all answers, as libpsx and stack dumpers do. */
static const char *signal_all(void (*handler)(int)) {
    pid_t ids[MAX_TASKS];
    start_threads(2);
    struct sigaction action = { .sa_handler = handler, .sa_flags = SA_RESTART };
    sigaction(SIGRTMIN + 3, &action, NULL);
    atomic_store(&answers, 0);
    int sent = 0, count = all_tasks(ids);
    for (int index = 0; index < count; index++) sent += !syscall(SYS_tgkill, getpid(), ids[index], SIGRTMIN + 3);
    for (double end = now() + 10; atomic_load(&answers) < sent && now() < end;) nap(0.001);
    return atomic_load(&answers) == sent ? NULL : "a task does not answer a signal";
}

static const char *signal_every_task(void) { return signal_all(answer); }

static const char *is_nobody_with_its_memory(void) {
    pid_t ids[MAX_TASKS];
    for (int index = all_tasks(ids); index-- > 0;)
        if (status_number(ids[index], "Uid:") != NOBODY) return "a task has kept its user";
    pid_t child = fork();
    if (child == 0) _exit(data.at && !is_right());
    return status_of(child) ? "the child of a fork after setuid has lost its memory" : NULL;
}

static const char *setuid_by_signals(void) {
    if (geteuid() == NOBODY) return NULL;
    const char *fault = signal_all(become_nobody);
    return fault ? fault : is_nobody_with_its_memory();
}

static const char *setuid_by_library(void) {
    start_threads(2);
    if (setuid(NOBODY)) return say("setuid");
    return is_nobody_with_its_memory();
}

// ---- children ----

/* Checks that no wait call finds a child. With `kinds`, also tries the flags that find children of a clone without a
 * signal (__WALL, __WCLONE). */
static const char *find_no_child(int kinds) {
    int status, flags[] = { 0, WNOHANG, WUNTRACED, WCONTINUED, WNOHANG | WUNTRACED | WCONTINUED, __WNOTHREAD | WNOHANG };
    int clone_flags[] = { __WALL, __WALL | WNOHANG, __WCLONE | WNOHANG, __WALL | WUNTRACED | WCONTINUED | WNOHANG };
    alarm(20); // a wait that finds a child waits for it
    for (unsigned index = 0; index < sizeof flags / sizeof *flags; index++) {
        pid_t ids[] = { -1, 0, -getpgrp() };
        for (int which = 0; which < 3; which++)
            if (wait4(ids[which], &status, flags[index], NULL) != -1 || errno != ECHILD) return say("wait4 finds a child");
    }
    for (unsigned index = 0; kinds && index < sizeof clone_flags / sizeof *clone_flags; index++)
        if (wait4(-1, &status, clone_flags[index], NULL) != -1 || errno != ECHILD) return say("wait4 with __WALL finds a child");
    siginfo_t info;
    int options[] = { WEXITED, WSTOPPED, WCONTINUED, WEXITED | WSTOPPED | WCONTINUED | WNOHANG, WEXITED | WNOWAIT };
    for (unsigned index = 0; index < sizeof options / sizeof *options; index++) {
        if (waitid(P_ALL, 0, &info, options[index]) != -1 || errno != ECHILD) return say("waitid(P_ALL) finds a child");
        if (waitid(P_PGID, 0, &info, options[index]) != -1 || errno != ECHILD) return say("waitid(P_PGID) finds a child");
    }
    alarm(0);
    return NULL;
}

static const char *waits(void) { return find_no_child(1); }

static atomic_int deaths;

static void on_death(int signal) {
    (void)signal;
    atomic_fetch_add(&deaths, 1);
}

/* Each child causes exactly one SIGCHLD, although processes of the agent may end meanwhile. */
static const char *sigchld(void) {
    struct sigaction action = { .sa_handler = on_death, .sa_flags = SA_RESTART };
    sigaction(SIGCHLD, &action, NULL);
    atomic_store(&deaths, 0);
    for (int round = 1; round <= 3; round++) {
        pid_t child = fork();
        if (child == 0) _exit(data.at && data.at[WORDS] != word(&data, 1, 0));
        if (status_of(child)) return "a child has not found its memory";
        nap(0.03);
        if (atomic_load(&deaths) != round) return "not one SIGCHLD for each child";
    }
    return NULL;
}

/* A subreaper adopts orphans. It must not find processes of the agent among its children. */
static const char *subreaper(void) {
    if (prctl(PR_SET_CHILD_SUBREAPER, 1)) return say("PR_SET_CHILD_SUBREAPER");
    const char *fault = find_no_child(0);
    prctl(PR_SET_CHILD_SUBREAPER, 0);
    return fault;
}

/* A subreaper adopts the orphan that its child leaves, and no process of the agent. */
static const char *orphans(void) {
    if (prctl(PR_SET_CHILD_SUBREAPER, 1)) return say("PR_SET_CHILD_SUBREAPER");
    int ends[2];
    pid_t orphan = 0;
    if (pipe(ends)) return say("pipe");
    pid_t child = fork();
    if (child == 0) {
        pid_t own = fork();
        if (own == 0) {
            nap(0.1);
            _exit(7);
        }
        _exit(write(ends[1], &own, sizeof own) != sizeof own);
    }
    if (status_of(child) || read(ends[0], &orphan, sizeof orphan) != sizeof orphan) return "the child has failed";
    alarm(20);
    int status = 0;
    if (wait(&status) != orphan || status != 7 << 8) return "wait does not find the orphan";
    nap(0.05);
    return find_no_child(0);
}

// ---- groups and sessions ----

/* Returns the number of other processes in the session or the process group of this process. */
static int companions_in_session(void) {
    DIR *directory = opendir("/proc");
    int count = 0;
    for (struct dirent *entry; directory && (entry = readdir(directory));) {
        pid_t pid = atoi(entry->d_name);
        count += pid > 0 && pid != getpid() && (getsid(pid) == getsid(0) || getpgid(pid) == getpgrp());
    }
    if (directory) closedir(directory);
    return count;
}

static const char *session(void) {
    // Become leader of a new session and process group. setsid fails if the process is a leader already.
    if (setsid() < 0 && getsid(0) != getpid()) return say("setsid");
    if (companions_in_session()) return "others are in the program's session or group";
    int ready[2], go[2];
    char byte = 0;
    if (pipe(ready) || pipe(go)) return say("pipe");
    pid_t child = fork();
    if (child == 0) {
        close(go[1]);
        if (write(ready[1], &byte, 1) != 1 || read(go[0], &byte, 1) < 0) _exit(2);
        _exit(companions_in_session() != 1);
    }
    // The agent may start processes during the fork. Once the child has written, the fork has returned.
    if (read(ready[0], &byte, 1) != 1) return "the child has ended";
    const char *fault = companions_in_session() == 1 ? NULL : "a fork brings others into the session";
    close(go[1]);
    return status_of(child) ? "the child's session or group has others" : fault;
}

/* A signal to the process group stops or kills the group, but not the processes that serve its memory. */
static const char *kill_group(void) {
    for (int signal = SIGSTOP; signal; signal = signal == SIGSTOP ? SIGKILL : 0) {
        pid_t child = fork();
        if (child == 0) {
            setpgid(0, 0);
            kill(0, signal);
            _exit(data.at && !is_right());
        }
        int status = 0;
        if (waitpid(child, &status, WUNTRACED) != child) return say("waitpid");
        if (signal == SIGKILL) return WIFSIGNALED(status) ? NULL : "kill(0, SIGKILL) did not kill";
        if (!WIFSTOPPED(status)) return "kill(0, SIGSTOP) did not stop";
        nap(0.03);
        kill(-child, SIGCONT);
        if (status_of(child)) return "wrong after kill(0, SIGSTOP)";
    }
    return NULL;
}

static const struct {
    const char *name;
    const char *(*ask)(void);
} questions[] = {
    { "user-namespace", user_namespace }, { "mount-namespace", mount_namespace },
    { "tasks", tasks }, { "signal-every-task", signal_every_task },
    { "setuid-by-signals", setuid_by_signals }, { "setuid-by-library", setuid_by_library },
    { "waits", waits }, { "sigchld", sigchld }, { "subreaper", subreaper }, { "orphans", orphans },
    { "session", session }, { "kill-group", kill_group },
};

static const char *in_child(const char *(*ask)(void), const char *when) {
    static char text[300];
    int ends[2];
    if (pipe(ends)) return say("pipe");
    pid_t child = fork();
    if (child == 0) {
        const char *fault = ask();
        if (fault && write(ends[1], fault, strlen(fault)) < 0) _exit(3);
        _exit(fault != NULL);
    }
    close(ends[1]);
    int length = snprintf(text, sizeof text, "in a child %s: ", when);
    ssize_t more = read(ends[0], text + length, sizeof text - length - 1);
    text[length + (more > 0 ? more : 0)] = 0;
    close(ends[0]);
    return status_of(child) ? text : NULL;
}

int main(int argc, char **argv) {
    const char *(*ask)(void) = NULL;
    for (unsigned index = 0; argc > 2 && index < sizeof questions / sizeof *questions; index++)
        if (!strcmp(argv[1], questions[index].name)) ask = questions[index].ask;
    if (!ask) return 2;
    const char *fault = in_child(ask, "before");
    prepare(atoi(argv[2]));
    if (!fault) fault = in_child(ask, "after");
    if (!fault) fault = ask();
    if (!fault && !is_right()) fault = "memory";
    return verdict(fault);
}
