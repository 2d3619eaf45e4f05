/* Memory that can be checked, most of it swapped out, for programs that fork. */
#ifndef FORK_PATHS_H
#define FORK_PATHS_H
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#define PAGE 4096UL
#define MIB (1UL << 20)

static uint64_t *data;
static size_t pages;

static inline uint64_t word(size_t page, unsigned index) { return (page + 1) * 0x9E3779B97F4A7C15ull + (index & 15); }

/* Fills so many MiB, which are more than the limit. */
static inline void fill(size_t mib) {
    pages = mib * MIB / PAGE;
    data = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) { perror("mmap"); exit(2); }
    for (size_t page = 0; page < pages; page++)
        for (unsigned index = 0; index < PAGE / 8; index++) data[page * PAGE / 8 + index] = word(page, index);
}

/* Whether every page of the first and of the last part is as filled; uses little stack and no library. */
static inline int is_right(void) {
    size_t part = pages / 8;
    for (size_t page = 0; page < pages; page += page + 1 == part ? pages - 2 * part + 1 : 1)
        for (unsigned index = 0; index < PAGE / 8; index += 37)
            if (((volatile uint64_t *)data)[page * PAGE / 8 + index] != word(page, index)) return 0;
    return 1;
}

/* Whether a child has ended with 0. */
static inline int ended_well(pid_t child) {
    int status = -1;
    if (child <= 0 || waitpid(child, &status, 0) != child || status) {
        fprintf(stderr, "child %d: status %x\n", (int)child, status);
        return 0;
    }
    return 1;
}
#endif
