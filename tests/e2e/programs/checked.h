/* Memory that shows whether it still holds what was written there, and pressure that swaps it out. */
#ifndef CHECKED_H
#define CHECKED_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define PAGE 4096UL
#define WORDS (PAGE / 8)
#define MIB (1UL << 20)

struct checked {
    uint64_t *at, salt;
    size_t pages;
};

static struct checked data, pressure;

static inline uint64_t word(const struct checked *memory, size_t page, unsigned index) {
    return ((page + 1) * 0x9E3779B97F4A7C15ull ^ memory->salt * 0xD1B54A32D192ED03ull) + (index & 15);
}

static inline void fill(const struct checked *memory) {
    for (size_t page = 0; page < memory->pages; page++)
        for (unsigned index = 0; index < WORDS; index++) memory->at[page * WORDS + index] = word(memory, page, index);
}

static inline size_t wrong_pages(const struct checked *memory) {
    size_t wrong = 0;
    for (size_t page = 0; page < memory->pages; page++) {
        int is_wrong = 0;
        for (unsigned index = 0; index < WORDS; index++)
            is_wrong |= ((volatile uint64_t *)memory->at)[page * WORDS + index] != word(memory, page, index);
        wrong += is_wrong;
    }
    return wrong;
}

static inline struct checked reserve(size_t mib, uint64_t salt) {
    void *at = mmap(NULL, mib * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (at == MAP_FAILED) { perror("mmap"); exit(2); }
    return (struct checked){ at, salt, mib * MIB / PAGE };
}

/* Fills `data`, and then three times as much memory, which swaps `data` out. */
static inline void prepare(size_t mib) {
    if (!data.at) data = reserve(mib, 1);
    if (!pressure.at) pressure = reserve(3 * mib, 2);
    fill(&data);
    fill(&pressure);
}

/* Whether all of it is as filled. */
static inline int is_right(void) { return !wrong_pages(&data) && !wrong_pages(&pressure) && !wrong_pages(&data); }

static inline void nap(double seconds) {
    struct timespec time = { (time_t)seconds, (long)((seconds - (time_t)seconds) * 1e9) };
    while (nanosleep(&time, &time)) {}
}

static inline double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

/* Prints the verdict; `fault` is NULL if all is well. Returns the exit code. */
static inline int verdict(const char *fault) {
    if (fault) printf("WRONG: %s\n", fault); else printf("OK\n");
    fflush(stdout);
    return fault != NULL;
}
#endif
