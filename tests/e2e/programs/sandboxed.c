/* Isolates itself as the zygote of a browser does: `sandboxed MIB HOW`. Each process checks its memory. It also checks
 * that it sees one thread and no children but those that it forked. Prints "wrong N", the number of faults found.
 *
 * HOW: zygote     a child in new user, pid and network namespaces, which proves its credentials, checks that it is
 *                 single-threaded, enters an empty root directory, and forks a renderer with a pid namespace of its
 *                 own, a limit on data, and a filter for system calls
 *      unshare    user and pid namespaces are entered by unshare(2), and then by a fork
 *      root       the root directory is empty, and nothing else is changed
 *      subreaper  orphans are adopted
 *      refused    this program, with `check`, under a filter that refuses what userfaultfd needs
 *      alone      the child of a fork under such a filter forks again
 *      user       the program becomes an ordinary user, and the child of a fork forks again
 *      early-user      as `user`, but before the program fills its memory
 *      early-undumped  the program forbids core dumps of itself (PR_SET_DUMPABLE) before it fills its memory
 *      check      the memory and the waits of this process only
 *      again      this program, with `check`, in the namespaces of `zygote` */
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define WORDS (256 << 10 >> 3)

static uint64_t **blocks;
static size_t count;
static volatile sig_atomic_t children_ended;

static void on_child(int signal) { (void)signal; children_ended++; }

static uint64_t word(size_t block, size_t at, uint64_t key) {
    return at & 1 ? at : (block * 2654435761u + at * 40503u) ^ key;
}

static void fill(size_t from, size_t to, uint64_t key) {
    for (size_t b = from; b < to; b++)
        for (size_t i = 0; i < WORDS; i++) blocks[b][i] = word(b, i, key);
}

static long wrong(size_t from, size_t to, uint64_t key) {
    long found = 0;
    for (size_t b = from; b < to; b++)
        for (size_t i = 0; i < WORDS; i++) found += blocks[b][i] != word(b, i, key);
    return found;
}

/* The number of threads of this process; 1 if /proc is not mounted. */
static int threads(void) {
    DIR *tasks = opendir("/proc/self/task");
    if (!tasks) return 1;
    int found = 0;
    for (struct dirent *entry; (entry = readdir(tasks));) found += entry->d_name[0] != '.';
    closedir(tasks);
    return found;
}

/* Returns how many of two conditions fail: wait finds no child, and this process has one thread. */
static long strangers(void) {
    pid_t waited = waitpid(-1, NULL, WNOHANG);
    long error = errno;
    int running = threads();
    if (waited != -1 || error != ECHILD || running != 1)
        fprintf(stderr, "process %d: wait says %d, error %ld; %d threads\n", getpid(), waited, error, running);
    return (waited != -1 || error != ECHILD) + (running != 1);
}

static long finish(pid_t child) {
    int status = -1;
    if (child <= 0 || waitpid(child, &status, 0) != child) return 1000;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 100 + WTERMSIG(status);
}

static void *check_half(void *half) {
    size_t from = half ? count / 2 : 0;
    return (void *)(intptr_t)wrong(from, half ? count : count / 2, 2);
}

/* Installs the system call filter of a renderer. As in a browser, a refused call fails or kills the process by SIGSYS. */
static int set_filter(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
#define REFUSE(number, how) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, number, 0, 1), BPF_STMT(BPF_RET | BPF_K, how)
        REFUSE(SYS_open, SECCOMP_RET_ERRNO | EPERM), REFUSE(SYS_openat, SECCOMP_RET_ERRNO | EPERM),
        REFUSE(SYS_socket, SECCOMP_RET_ERRNO | EPERM), REFUSE(SYS_pidfd_open, SECCOMP_RET_TRAP),
        REFUSE(SYS_pidfd_getfd, SECCOMP_RET_TRAP), REFUSE(SYS_ioctl, SECCOMP_RET_TRAP),
        REFUSE(SYS_process_vm_readv, SECCOMP_RET_TRAP), REFUSE(SYS_userfaultfd, SECCOMP_RET_TRAP),
        REFUSE(SYS_setpriority, SECCOMP_RET_TRAP), REFUSE(SYS_ptrace, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, 0, &program);
}

/* Refuses userfaultfd by an error. */
static int refuse_userfaultfd(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        REFUSE(SYS_ioctl, SECCOMP_RET_ERRNO | EPERM), REFUSE(SYS_userfaultfd, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    return prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}

static long render(void) {
    long found = wrong(0, count, 1) + strangers() + (getpid() != 1);
    struct rlimit data = {4ul << 30, 4ul << 30};
    found += setrlimit(RLIMIT_DATA, &data) + set_filter();
    fill(0, count, 2);
    pthread_t halves[2];
    for (intptr_t half = 0; half < 2; half++) found += pthread_create(&halves[half], NULL, check_half, (void *)half);
    for (int half = 0; half < 2; half++) {
        void *result;
        found += pthread_join(halves[half], &result) + (intptr_t)result;
    }
    for (size_t i = 0; i < 64; i++) {
        /* Each piece is allowed to be written when it is needed. */
        char *piece = mmap(NULL, 2 << 20, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        found += piece == MAP_FAILED || mprotect(piece, 1 << 20, PROT_READ | PROT_WRITE);
        if (found) return found;
        memset(piece, 1, 1 << 20);
        found += piece[12345] != 1;
        munmap(piece, 2 << 20);
    }
    return found + (waitpid(-1, NULL, WNOHANG) != -1);
}

/* Maps the user and the group that created this user namespace to themselves in it. */
static long map_user(uid_t uid, gid_t gid) {
    const char *files[] = {"/proc/self/setgroups", "/proc/self/uid_map", "/proc/self/gid_map"};
    char lines[3][64] = {"deny"};
    snprintf(lines[1], 64, "%d %d 1", uid, uid), snprintf(lines[2], 64, "%d %d 1", gid, gid);
    long failed = 0;
    for (int i = 0; i < 3; i++) {
        int file = open(files[i], O_WRONLY);
        failed += write(file, lines[i], strlen(lines[i])) != (ssize_t)strlen(lines[i]);
        close(file);
    }
    return failed;
}

/* Sends this process's credentials to the parent, which sees its pid in the parent's namespace. */
static long prove(int socket) {
    struct ucred own = {getpid(), getuid(), getgid()};
    char byte = 0, space[CMSG_SPACE(sizeof own)] = {0};
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    struct cmsghdr *header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET, header->cmsg_type = SCM_CREDENTIALS, header->cmsg_len = CMSG_LEN(sizeof own);
    memcpy(CMSG_DATA(header), &own, sizeof own);
    return sendmsg(socket, &message, 0) != 1;
}

static long prover(int socket, pid_t child) {
    struct ucred theirs = {0};
    char byte, space[CMSG_SPACE(sizeof theirs)];
    struct iovec part = {&byte, 1};
    struct msghdr message = {.msg_iov = &part, .msg_iovlen = 1, .msg_control = space, .msg_controllen = sizeof space};
    if (recvmsg(socket, &message, 0) != 1 || !CMSG_FIRSTHDR(&message)) return 1;
    memcpy(&theirs, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof theirs);
    return theirs.pid != child;
}

static long enter_empty_root(void) {
    char path[] = "/tmp/sandboxed-XXXXXX";
    if (!mkdtemp(path)) return 1;
    int open_root = open(path, O_PATH | O_DIRECTORY);
    long failed = chdir(path) || rmdir(path) || chroot(".") || chdir("/");
    (void)open_root;
    return failed + (access("/proc", F_OK) == 0);
}

/* Forks a child, which fills its memory anew, and a grandchild, which must find the child's content. */
static long fork_twice(uint64_t key) {
    pid_t child = fork();
    if (child == 0) {
        fill(0, count, key);
        pid_t grandchild = fork();
        if (grandchild == 0) _exit(wrong(0, count, key) + strangers() != 0);
        _exit(finish(grandchild) + wrong(0, count, key) + strangers() != 0);
    }
    return finish(child);
}

static long become_ordinary(void) { return setgid(65534) || setuid(65534); }

static long zygote(void) {
    long found = wrong(0, count, 1) + strangers() + enter_empty_root();
    for (int renderers = 0; renderers < 2; renderers++) {
        pid_t renderer = syscall(SYS_clone, SIGCHLD | CLONE_NEWPID, 0, 0, 0, 0);
        if (renderer == 0) _exit(render() != 0);
        found += finish(renderer);
    }
    return found + wrong(0, count, 1);
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    const char *how = argv[2];
    count = (size_t)atol(argv[1]) * 4;
    blocks = malloc(count * sizeof *blocks);
    for (size_t b = 0; b < count; b++) blocks[b] = malloc(WORDS * 8);
    long failed = 0;
    if (!strcmp(how, "early-user")) failed += become_ordinary();
    if (!strcmp(how, "early-undumped")) failed += prctl(PR_SET_DUMPABLE, 0, 0, 0, 0);
    fill(0, count, 1);
    signal(SIGCHLD, on_child);
    long found = failed + strangers();
    if (!strcmp(how, "zygote") || !strcmp(how, "again")) {
        int pair[2], on = 1;
        uid_t uid = getuid();
        gid_t gid = getgid();
        found += socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair) || setsockopt(pair[0], SOL_SOCKET, SO_PASSCRED, &on, sizeof on);
        pid_t child = syscall(SYS_clone, SIGCHLD | CLONE_NEWUSER | CLONE_NEWPID | CLONE_NEWNET, 0, 0, 0, 0);
        if (child == 0) {
            close(pair[0]);
            if (map_user(uid, gid)) _exit(4);
            if (!strcmp(how, "again")) {
                long lost = wrong(0, count, 1) + (getpid() != 1);
                if (lost || prove(pair[1])) _exit(1);
                execl("/proc/self/exe", argv[0], argv[1], "check", NULL);
                _exit(3);
            }
            _exit((zygote() + prove(pair[1]) + (getpid() != 1)) != 0);
        }
        close(pair[1]);
        found += prover(pair[0], child) + finish(child);
        found += children_ended != 1;
    } else if (!strcmp(how, "unshare")) {
        found += unshare(CLONE_NEWUSER | CLONE_NEWPID);
        pid_t child = fork();
        if (child == 0) {
            pid_t grandchild = fork();
            if (grandchild == 0) _exit(wrong(0, count, 1) + strangers() != 0);
            _exit(finish(grandchild) + wrong(0, count, 1) + (getpid() != 1) != 0);
        }
        found += finish(child);
        /* The child was the init process of its pid namespace. It has ended, so no process can be created there. */
        found += fork() != -1;
    } else if (!strcmp(how, "root")) {
        found += enter_empty_root();
        found += fork_twice(3);
    } else if (!strcmp(how, "subreaper")) {
        found += prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) + strangers();
        pid_t child = fork();
        if (child == 0) {
            fill(0, count / 2, 4);
            if (fork() == 0) _exit(7 + (wrong(0, count / 2, 4) != 0));
            _exit(wrong(0, count / 2, 4) + wrong(count / 2, count, 1) != 0);
        }
        found += finish(child);
        /* This process adopts the orphan, which must exit with 7. */
        int status = 0, orphans = 0;
        while (waitpid(-1, &status, 0) > 0) orphans += WIFEXITED(status) && WEXITSTATUS(status) == 7;
        found += orphans != 1;
    } else if (!strcmp(how, "refused")) {
        if (refuse_userfaultfd()) return 5;
        execl("/proc/self/exe", argv[0], argv[1], "check", NULL);
        return 3;
    } else if (!strcmp(how, "alone")) {
        found += refuse_userfaultfd();
        found += fork_twice(5);
    } else if (strstr(how, "user")) {
        if (!strcmp(how, "user")) found += become_ordinary();
        found += fork_twice(6);
    } else if (!strcmp(how, "early-undumped")) {
        /* A child may have no companion then. */
        found += fork_twice(7);
    } else if (strcmp(how, "check")) {
        return 2;
    }
    found += wrong(0, count, 1) + strangers();
    printf("wrong %ld\n", found);
    return found != 0;
}
