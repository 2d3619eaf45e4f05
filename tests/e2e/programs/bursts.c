// Threads that map, fill, verify and unmap small pieces all the time: `bursts plain|reserve|call|guard THREADS KEPT_MIB`.
// By mmap, with MAP_NORESERVE, by syscall(2), or below what becomes a guard.
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PIECE = 64 << 10, PAGE = 4096 };

static const char *mode;
static size_t kept;
static atomic_long wrong;

static char *piece(void) {
    int protection = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *start;
    if (!strcmp(mode, "call")) {
        start = (char *)syscall(SYS_mmap, NULL, PIECE, protection, flags, -1, 0L);
    } else if (!strcmp(mode, "guard")) {
        start = mmap(NULL, PIECE, protection, flags | MAP_STACK, -1, 0);
        if (start != MAP_FAILED && mprotect(start, PAGE, PROT_NONE)) exit(2);
    } else {
        start = mmap(NULL, PIECE, protection, flags | (strcmp(mode, "reserve") ? 0 : MAP_NORESERVE), -1, 0);
    }
    if (start == MAP_FAILED) exit(2);
    return start;
}

static void *burst(void *argument) {
    struct timespec now, end;
    clock_gettime(CLOCK_MONOTONIC, &end);
    end.tv_sec += 2;
    size_t pieces = kept / PIECE, first = strcmp(mode, "guard") ? 0 : PAGE;
    char **held = calloc(pieces, sizeof *held);
    for (size_t n = (size_t)argument;; n++) {
        char **slot = &held[n % pieces];
        if (*slot) {
            for (size_t at = first; at < PIECE; at += PAGE) wrong += (*slot)[at] != (char)(n - pieces);
            munmap(*slot, PIECE);
        }
        *slot = piece();
        memset(*slot + first, (char)n, PIECE - first);
        clock_gettime(CLOCK_MONOTONIC, &now);
        if (now.tv_sec > end.tv_sec || (now.tv_sec == end.tv_sec && now.tv_nsec >= end.tv_nsec)) return NULL;
    }
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    mode = arguments[1];
    long threads = atol(arguments[2]);
    kept = ((size_t)atol(arguments[3]) << 20) / threads;
    pthread_t all[64];
    for (long i = 0; i < threads; i++) {
        if (pthread_create(&all[i], NULL, burst, (void *)i)) return 2;
    }
    for (long i = 0; i < threads; i++) pthread_join(all[i], NULL);
    printf("wrong %ld\n", wrong);
    return wrong != 0;
}
