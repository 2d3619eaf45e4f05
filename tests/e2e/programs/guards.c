// Guard regions (MADV_GUARD_INSTALL): the pages read as zeros after removal, whether they were resident or swapped out.
// Usage: guards WAY swift|slow|threads
//   ways: inline, pidfd: without the C library (inline_call.h); function, syscall, pidfd-syscall, handle, namespace: with it
//   swift: installed and removed at once, between two touches of the page
//   slow: everything is swapped out once more while the guards are installed
//   threads: as swift, while another thread reads the pages between the guards
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>
#include "inline_call.h"

#define PAGE 4096UL
#define PAGES (12UL << 8)
#define PRESSURE_PAGES (64UL << 8)
#define INSTALL 102
#define REMOVE 103

static const char *way;
static char *memory;
static sigjmp_buf back;
static volatile int is_over;

static int own_pidfd(void) {
    static int self;
    if (!self) self = syscall(SYS_pidfd_open, getpid(), 0);
    return self;
}

static int (*madvise_of(void *library))(void *, size_t, int) {
    void *found = library ? dlsym(library, "madvise") : NULL;
    if (!found) {
        printf("%s\n", dlerror());
        exit(2);
    }
    return (int (*)(void *, size_t, int))found;
}

// Returns 0, or an error number.
static long advise_by(char *at, size_t bytes, int advice) {
    static int (*found)(void *, size_t, int);
    struct iovec vector = { at, bytes };
    long result;
    if (!strcmp(way, "inline")) return -inline_call(SYS_madvise, (long)at, bytes, advice, 0, 0, 0);
    if (!strcmp(way, "pidfd")) {
        result = inline_call(SYS_process_madvise, own_pidfd(), (long)&vector, 1, advice, 0, 0);
        return result == (long)bytes ? 0 : result < 0 ? -result : EIO;
    }
    if (!strcmp(way, "function")) return madvise(at, bytes, advice) ? errno : 0;
    if (!strcmp(way, "syscall")) return syscall(SYS_madvise, at, bytes, advice) ? errno : 0;
    if (!strcmp(way, "pidfd-syscall"))
        return syscall(SYS_process_madvise, own_pidfd(), &vector, 1, advice, 0) == (long)bytes ? 0 : errno;
    if (!strcmp(way, "handle") && !found) found = madvise_of(dlopen("libc.so.6", RTLD_NOW));
    if (!strcmp(way, "namespace") && !found) found = madvise_of(dlmopen(LM_ID_NEWLM, "libc.so.6", RTLD_NOW));
    // A C library in another namespace has an errno of its own, which this code cannot read.
    return found(at, bytes, advice) ? EINVAL : 0;
}

static void advise(char *at, size_t bytes, int advice) {
    long result = advise_by(at, bytes, advice);
    if (result) {
        printf("SKIP no guards: %s\n", strerror(result));
        exit(0);
    }
}

static uint64_t word(uint64_t page, uint64_t salt) {
    return (page + 1) * 0x9E3779B97F4A7C15ull ^ salt * 0xD1B54A32D192ED03ull;
}

static void fill(char *at, size_t pages, uint64_t salt) {
    for (size_t page = 0; page < pages; page++)
        for (size_t index = 0; index < 512; index++) ((uint64_t *)(at + page * PAGE))[index] = word(page, salt) + (index & 15);
}

static void press(void) {
    static char *at;
    if (!at) at = mmap(NULL, PRESSURE_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    fill(at, PRESSURE_PAGES, 99);
}

static int is_guarded(size_t page) { return page % 5 == 1 || page % 64 > 56; }

static int holds(size_t page, uint64_t salt) {
    volatile uint64_t *at = (uint64_t *)(memory + page * PAGE);
    for (size_t index = 0; index < 512; index++)
        if (at[index] != (salt ? word(page, salt) + (index & 15) : 0)) return 0;
    return 1;
}

static void caught(int signal) {
    (void)signal;
    siglongjmp(back, 1);
}

static void *read_between(void *wrong) {
    unsigned state = 7;
    while (!is_over) {
        state = state * 1664525 + 1013904223;
        size_t page = (state >> 8) % PAGES;
        if (!is_guarded(page) && !holds(page, 6)) ++*(size_t *)wrong;
    }
    return NULL;
}

int main(int argc, char **argv) {
    way = argc > 1 ? argv[1] : "inline";
    const char *how = argc > 2 ? argv[2] : "swift";
    volatile size_t passed = 0, stale = 0;
    size_t wrong = 0;
    memory = mmap(NULL, PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    struct sigaction action = { .sa_handler = caught, .sa_flags = SA_NODEFER };
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);
    for (int round = 0; round < 2; round++) {
        fill(memory, PAGES, 6);
        press();
        pthread_t reader;
        is_over = 0;
        if (!strcmp(how, "threads")) pthread_create(&reader, NULL, read_between, &wrong);
        for (size_t page = 0; page < PAGES; page++) {
            if (!is_guarded(page)) continue;
            advise(memory + page * PAGE, PAGE, INSTALL);
            if (strcmp(how, "slow")) advise(memory + page * PAGE, PAGE, REMOVE);
        }
        if (!strcmp(how, "slow")) {
            press();
            for (volatile size_t page = 0; page < PAGES; page++) {
                if (!is_guarded(page) || sigsetjmp(back, 1)) continue;
                *(volatile char *)(memory + page * PAGE);
                passed++;
            }
            advise(memory, PAGES * PAGE, REMOVE);
        }
        for (size_t page = 0; page < PAGES; page++) {
            if (holds(page, is_guarded(page) ? 0 : 6)) continue;
            if (is_guarded(page)) stale++; else wrong++;
        }
        is_over = 1;
        if (!strcmp(how, "threads")) pthread_join(reader, NULL);
    }
    printf("%zu guards could be read, %zu pages had content behind them, %zu others were wrong\n", passed, stale, wrong);
    return passed || stale || wrong;
}
