// MADV_DONTFORK: a child and a grandchild lack the ranges that the parent left out, and have all others. The parent keeps
// everything. Usage: fork_left_out before|after (the memory is swapped out)
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define PAGES (12UL << 8)
#define PRESSURE_PAGES (80UL << 8)
#define STRETCH 24UL

static void fill(char *at, size_t pages, uint64_t salt) {
    for (size_t page = 0; page < pages; page++)
        for (size_t index = 0; index < 512; index++) ((uint64_t *)(at + page * PAGE))[index] = page * salt + (index & 15) + 1;
}

static int holds(const char *at, uint64_t page, uint64_t salt) {
    for (size_t index = 0; index < 512; index++)
        if (((volatile uint64_t *)(at + page * PAGE))[index] != page * salt + (index & 15) + 1) return 0;
    return 1;
}

static int is_mapped(char *at) {
    unsigned char in_core;
    return mincore(at, PAGE, &in_core) == 0 || errno != ENOMEM;
}

// Every third stretch is left out. From the second round on, the last quarter is not (MADV_DOFORK).
static int is_left_out(size_t page, int round) { return page / STRETCH % 3 == 1 && (round == 0 || page < PAGES * 3 / 4); }

static void advise(char *at, int round) {
    for (size_t page = 0; page < PAGES; page += STRETCH)
        if (page / STRETCH % 3 == 1 && madvise(at + page * PAGE, STRETCH * PAGE, is_left_out(page, round) ? MADV_DONTFORK : MADV_DOFORK)) _exit(3);
}

static size_t wrong_pages(char *at, int round, int left_out) {
    size_t wrong = 0;
    for (size_t page = 0; page < PAGES; page++)
        wrong += left_out && is_left_out(page, round) ? is_mapped(at + page * PAGE) : !is_mapped(at + page * PAGE) || !holds(at, page, 5);
    return wrong;
}

// Forks a chain of `generation` + 1 descendants. Returns the number of wrong pages that they find.
static size_t in_child(char *at, int round, int generation) {
    pid_t child = fork();
    if (child < 0) return 99;
    if (child == 0) {
        size_t wrong = wrong_pages(at, round, 1) + (generation ? in_child(at, round, generation - 1) : 0);
        _exit(wrong > 90 ? 90 : wrong);
    }
    int status;
    waitpid(child, &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 95;
}

int main(int argc, char **argv) {
    int is_early = argc < 2 || !strcmp(argv[1], "before");
    char *at = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *pressure = mmap(NULL, PRESSURE_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (is_early) advise(at, 0);
    fill(at, PAGES, 5);
    fill(pressure, PRESSURE_PAGES, 9);
    size_t wrong = 0;
    for (int round = 0; round < 2; round++) {
        if (!is_early || round) advise(at, round);
        wrong += in_child(at, round, 1) + wrong_pages(at, round, 0);
        fill(pressure, PRESSURE_PAGES, 9);
    }
    printf("%zu wrong pages\n", wrong);
    return wrong != 0;
}
