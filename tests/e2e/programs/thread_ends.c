// Threads end that have not touched their control blocks for a while. Their stacks may be managed: some belong to the
// program, some are larger than usual, some are ordinary. A joining thread must still be woken, although the kernel clears
// a word in the control block of a thread that exits. Run this program with
// GLIBC_TUNABLES=glibc.pthread.rseq=0, or the kernel touches these blocks whenever a thread gets a CPU.
#define _GNU_SOURCE
#include "quiet_thread.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

enum { THREADS = 8, STACK = 32 << 20, TURNS = 3 };

static const struct timespec long_enough = {0, 100000000};

static void *body(void *argument) {
    *(volatile long *)argument += 1;
    return end_quietly(&long_enough);
}

int main(void) {
    long ran[THREADS] = {0};
    char *stacks[THREADS] = {NULL};
    for (int turn = 0; turn < TURNS; turn++) {
        pthread_t threads[THREADS];
        for (int i = 0; i < THREADS; i++) {
            pthread_attr_t attributes;
            pthread_attr_init(&attributes);
            if (i % 3 == 1) {
                pthread_attr_setstacksize(&attributes, STACK);
            } else if (i % 3 == 0) {
                if (!stacks[i]) stacks[i] = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
                if (stacks[i] == MAP_FAILED) return 2;
                memset(stacks[i], turn, STACK / 8);
                pthread_attr_setstack(&attributes, stacks[i], STACK);
            }
            if (pthread_create(&threads[i], &attributes, body, &ran[i])) return 2;
            pthread_attr_destroy(&attributes);
        }
        for (int i = 0; i < THREADS; i++) {
            if (!has_ended(threads[i])) {
                printf("thread %d of turn %d never ended\n", i, turn);
                fflush(stdout);
                _Exit(1);
            }
            for (long byte = 0; stacks[i] && byte < STACK / 8; byte += 512) {
                if (stacks[i][byte] != turn) return 3;
            }
        }
    }
    for (int i = 0; i < THREADS; i++) {
        if (ran[i] != TURNS) return 4;
    }
    puts("all have ended");
    return 0;
}
