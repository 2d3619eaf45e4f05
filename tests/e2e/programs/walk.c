// Touches memory again and again. `walk MIB MS random|forward THREADS`: fills MIB MiB with content that compresses, says so,
// and reads a word of each page, in this order, for MS ms; without an end if that is 0. Each thread has a part.
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define PAGE_BYTES 4096

static size_t pages, threads;
static int is_random;
static double end_ms;
static uint64_t *words;

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1e3 + now.tv_nsec / 1e6;
}

static void *walk(void *part) {
    size_t count = pages / threads;
    uint64_t *own = words + (size_t)part * count * (PAGE_BYTES / 8), sum = 0, state = 88172645463325252u + (size_t)part;
    for (size_t step = 0; end_ms == 0 || step % 64 || now_ms() < end_ms; step++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        sum += own[(is_random ? state : step) % count * (PAGE_BYTES / 8)];
    }
    return (void *)sum;
}

int main(int count, char **arguments) {
    if (count < 5) return 2;
    pages = (strtoul(arguments[1], NULL, 10) << 20) / PAGE_BYTES;
    double ms = strtod(arguments[2], NULL);
    is_random = !strcmp(arguments[3], "random");
    threads = strtoul(arguments[4], NULL, 10);
    words = malloc(pages * PAGE_BYTES);
    for (size_t word = 0; word < pages * PAGE_BYTES / 8; word++) words[word] = word / 16 % 1009;
    printf("filled\n");
    fflush(stdout);
    end_ms = ms == 0 ? 0 : now_ms() + ms;
    pthread_t started[64];
    for (size_t i = 0; i < threads; i++) pthread_create(&started[i], NULL, walk, (void *)i);
    uint64_t sum = 0;
    for (size_t i = 0; i < threads; i++) {
        void *part;
        pthread_join(started[i], &part);
        sum += (uint64_t)part;
    }
    printf("%lu\n", sum);
    return 0;
}
