// Another process gives advice about this one's memory by process_madvise(2), while it is written, swapped out and checked.
// Usage: remote_advice
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define PAGES (48UL << 8)

static void fill(uint64_t *at, uint64_t salt) {
    for (size_t index = 0; index < PAGES * 512; index++) at[index] = index / 7 * salt;
}

static size_t wrong_words(const uint64_t *at, uint64_t salt) {
    size_t wrong = 0;
    for (size_t index = 0; index < PAGES * 512; index++) wrong += at[index] != index / 7 * salt;
    return wrong;
}

// Advises 64 pages here and there until it is killed, or says at once that it may not.
static void advise_for_ever(int target, char *at) {
    const int advices[] = { MADV_COLD, MADV_PAGEOUT, MADV_WILLNEED };
    for (unsigned turn = 0;; turn++) {
        struct iovec vector = { at + turn * 7919UL % (PAGES - 64) * PAGE, 64 * PAGE };
        long done = syscall(SYS_process_madvise, target, &vector, 1, advices[turn % 3], 0);
        if (done < 0 && (errno == EPERM || errno == ENOSYS)) _exit(7);
        usleep(100);
    }
}

int main(void) {
    uint64_t *at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    int self = syscall(SYS_pidfd_open, getpid(), 0);
    pid_t child = fork();
    if (child < 0 || self < 0) return 2;
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        advise_for_ever(self, (char *)at);
    }
    size_t wrong = 0;
    for (uint64_t salt = 3; salt < 6; salt++) {
        fill(at, salt);
        wrong += wrong_words(at, salt);
    }
    int status;
    if (waitpid(child, &status, WNOHANG) == 0) {
        kill(child, SIGKILL);
        waitpid(child, &status, 0);
    }
    printf("%zu wrong words\n", wrong);
    return wrong != 0;
}
