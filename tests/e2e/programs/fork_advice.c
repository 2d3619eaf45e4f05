// MADV_WIPEONFORK by inline system calls: a child finds zeros in the wiped ranges and the content of all others, whether
// the pages were resident or swapped out. Usage: fork_advice before|after (the memory is swapped out)
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define PAGES (12UL << 8)
#define PRESSURE_PAGES (80UL << 8)
#define KEEP 19

static long inline_advise(char *at, size_t bytes, long advice) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "0"((long)SYS_madvise), "D"(at), "S"(bytes), "d"(advice) : "rcx", "r11", "memory");
    return result;
}

static void fill(char *at, size_t pages, uint64_t salt) {
    for (size_t page = 0; page < pages; page++)
        for (size_t index = 0; index < 512; index++) ((uint64_t *)(at + page * PAGE))[index] = page * salt + (index & 15) + 1;
}

static int holds(const char *at, uint64_t page, uint64_t salt) {
    for (size_t index = 0; index < 512; index++)
        if (((volatile uint64_t *)(at + page * PAGE))[index] != (salt ? page * salt + (index & 15) + 1 : 0)) return 0;
    return 1;
}

// Every third stretch of 16 pages is wiped, except in the last quarter, where MADV_KEEPONFORK follows.
static int is_wiped(size_t page) { return page / 16 % 3 == 0 && page < PAGES * 3 / 4; }

static void advise(char *at) {
    for (size_t page = 0; page < PAGES; page += 16)
        if (page / 16 % 3 == 0 && inline_advise(at + page * PAGE, 16 * PAGE, MADV_WIPEONFORK)) _exit(3);
    if (inline_advise(at + PAGES * 3 / 4 * PAGE, PAGES / 4 * PAGE, KEEP)) _exit(3);
}

int main(int argc, char **argv) {
    int is_early = argc < 2 || !strcmp(argv[1], "before");
    char *at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *pressure = mmap(NULL, PRESSURE_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (is_early) advise(at);
    fill(at, PAGES, 5);
    fill(pressure, PRESSURE_PAGES, 9);
    if (!is_early) advise(at);
    size_t wrong = 0;
    for (int round = 0; round < 2; round++) {
        pid_t child = fork();
        if (child < 0) return 2;
        if (child == 0) {
            for (size_t page = 0; page < PAGES; page++) wrong += !holds(at, page, is_wiped(page) ? 0 : 5);
            _exit(wrong > 90 ? 90 : wrong);
        }
        int status;
        waitpid(child, &status, 0);
        wrong += WIFEXITED(status) ? WEXITSTATUS(status) : 95;
        for (size_t page = 0; page < PAGES; page++) wrong += !holds(at, page, 5);
        fill(pressure, PRESSURE_PAGES, 9);
    }
    printf("%zu wrong pages\n", wrong);
    return wrong != 0;
}
