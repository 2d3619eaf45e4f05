/* When a parent receives the exit of a process, the process keeps no file or segment in use.   leaves MIB CHILDREN
 *
 * A child swaps memory in and out, maps a System V segment and ends; then its executable file is written, and the segment
 * has one attachment. Every second child ends with another thread that reads swapped-out memory: it reads nothing else. */
#include "checked.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <sys/ipc.h>
#include <sys/shm.h>
#include <sys/stat.h>
#include <sys/wait.h>

static void *read_on(void *unused) {
    (void)unused;
    for (;;)
        if (wrong_pages(&data)) _exit(9);
}

static int child(size_t mib, int has_thread) {
    pthread_t reader;
    prepare(mib);
    if (wrong_pages(&data)) return 8;
    if (has_thread) {
        if (pthread_create(&reader, NULL, read_on, NULL)) return 7;
        nap(0.02);
    }
    return 0;
}

static int copy(const char *from, const char *to) {
    char buffer[1 << 16];
    int in = open(from, O_RDONLY), out = open(to, O_WRONLY | O_CREAT | O_TRUNC, 0755);
    if (in < 0 || out < 0) return -1;
    for (ssize_t got; (got = read(in, buffer, sizeof buffer)) > 0;)
        if (write(out, buffer, got) != got) return -1;
    return close(in) | close(out);
}

int main(int argc, char **argv) {
    size_t mib = strtoul(argv[1], NULL, 10);
    if (argc == 4) exit(child(mib, argv[3][0] == '1'));
    int segment = shmget(IPC_PRIVATE, PAGE, IPC_CREAT | 0600);
    char *shared = shmat(segment, NULL, 0);
    char path[] = "leaves-XXXXXX";
    const char *fault = NULL;
    int made = mkstemp(path);
    if (segment < 0 || shared == (char *)-1 || made < 0) return 2;
    if (fchmod(made, 0755) || close(made) || copy("/proc/self/exe", path)) fault = "copy";
    for (int number = 0; !fault && number < atoi(argv[2]); number++) {
        int status, has_thread = number % 2;
        pid_t forked = fork();
        if (forked == 0) _exit(child(mib, has_thread) | (shared[0] = 0));
        waitpid(forked, &status, 0);
        struct shmid_ds state;
        shmctl(segment, IPC_STAT, &state);
        if (status) fault = "a forked child's memory";
        else if (!has_thread && state.shm_nattch != 1) fault = "the segment is attached";
        pid_t executed = fork();
        if (executed == 0) {
            execl(path, path, argv[1], argv[2], has_thread ? "1" : "0", NULL);
            _exit(6);
        }
        waitpid(executed, &status, 0);
        int written = open(path, O_RDWR);
        if (status) fault = "an executed child's memory";
        else if (!has_thread && written < 0) fault = strerror(errno);
        close(written);
        /* A thread of the ended child may keep the executable and the segment in use for some milliseconds. */
        for (int tries = 0; has_thread && tries < 1000; tries++) {
            shmctl(segment, IPC_STAT, &state);
            written = open(path, O_RDWR);
            close(written);
            if (state.shm_nattch == 1 && written >= 0) break;
            nap(0.005);
        }
    }
    unlink(path);
    shmctl(segment, IPC_RMID, NULL);
    return verdict(fault);
}
