// Uses memory as a language runtime's heap does: reserves address space, commits and decommits parts (with and without
// MADV_DONTNEED), puts code there, and moves the reserved rest. Checks all content, and that code is not managed.
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { PAGE = 4096, MIB = 1 << 20, PAGES = 96 * MIB / PAGE, STEPS = 20000 };
static uint32_t held[PAGES], seed = 1;
static char accessible[PAGES], *base;
static int wrong;

static uint32_t chance(uint32_t below) {
    seed = seed * 1664525 + 1013904223;
    return (uint32_t)(((uint64_t)seed * below) >> 32);
}

static void look(size_t page) {
    if (*(volatile uint32_t *)(base + page * PAGE + 8) != held[page] && wrong++ < 5) printf("page %zu\n", page);
}

static void expect(int is_right, const char *what) {
    if (!is_right) printf("%s\n", what), wrong++;
}

// Commits pages in ascending order, as heaps do, and at random. Decommits pages, and discards half of those.
static void commit_and_take_back(void) {
    size_t top = 0;
    for (int step = 0; step < STEPS; step++) {
        size_t page = step % 2 && top < PAGES ? top++ : chance(PAGES);
        char *start = base + page * PAGE;
        if (!accessible[page]) {
            expect(mprotect(start, PAGE, PROT_READ | PROT_WRITE) == 0, "commit");
            accessible[page] = 1;
            look(page);
            memset(start, (int)page | 1, PAGE);
            *(uint32_t *)(start + 8) = held[page] = seed | 1;
        } else if (chance(3) == 0) {
            look(page);
            if (chance(2)) {
                expect(madvise(start, PAGE, MADV_DONTNEED) == 0, "discard");
                held[page] = 0;
            }
            expect(mprotect(start, PAGE, PROT_NONE) == 0, "decommit");
            accessible[page] = 0;
        } else {
            look(page);
        }
    }
    for (size_t page = 0; page < PAGES; page++) {
        if (accessible[page]) look(page);
    }
}

int main(void) {
    char *all = mmap(NULL, PAGES * (size_t)PAGE + 4 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    size_t need = 48 * MIB;
    char *other = malloc(need);
    mprotect(all, 4 * MIB, PROT_READ | PROT_WRITE);
    memset(all, 3, 4 * MIB);
    base = all + 4 * MIB;
    for (size_t i = 0; i < need; i++) other[i] = (char)(i >> 9);
    commit_and_take_back();

    // Code in a reserve right above memory that is used.
    char *code = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(code, 4 * MIB, PROT_READ | PROT_WRITE);
    memset(code, 5, 4 * MIB);
    for (size_t i = 0; i < need; i++) wrong += other[i] != (char)(i >> 9);
    char *function = code + 32 * MIB;
    mprotect(function, MIB, PROT_READ | PROT_WRITE | PROT_EXEC);
    memcpy(function, "\xb8\x2a\x00\x00\x00\xc3", 6);
    expect(((int (*)(void))function)() == 42, "code");
    mprotect(code + 48 * MIB, MIB, PROT_READ);
    for (size_t i = 0; i < MIB; i += PAGE) wrong += code[48 * MIB + i] != 0;

    // The program may move the reserved rest by one mremap, so the rest must have stayed one mapping.
    char *rest = mmap(NULL, 64 * MIB, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    mprotect(rest, 4 * MIB, PROT_READ | PROT_WRITE);
    memset(rest, 7, 4 * MIB);
    for (size_t i = 0; i < need; i++) wrong += other[i] != (char)(i >> 9);
    char *moved = mremap(rest + 4 * MIB, 60 * MIB, 96 * MIB, MREMAP_MAYMOVE);
    expect(moved != MAP_FAILED, "mremap");
    if (moved != MAP_FAILED) {
        mprotect(moved, 8 * MIB, PROT_READ | PROT_WRITE);
        for (size_t i = 0; i < 8 * MIB; i += PAGE) wrong += moved[i] != 0;
    }
    for (size_t i = 0; i < 4 * MIB; i++) wrong += rest[i] != 7 || code[i] != 5;

    // The agent must not register executable mappings with userfaultfd (the flag `um`).
    FILE *maps = fopen("/proc/self/smaps", "r");
    char line[512];
    int is_code = 0;
    while (fgets(line, sizeof line, maps)) {
        size_t start, end;
        if (sscanf(line, "%zx-%zx ", &start, &end) == 2) is_code = start <= (size_t)function && (size_t)function < end;
        if (is_code && !strncmp(line, "VmFlags:", 8)) expect(!strstr(line, " um"), "code is managed");
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
