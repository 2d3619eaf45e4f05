// Grows at the speed of memory. `grow heap MIB BYTES THREADS`: by malloc, in blocks of BYTES, from so many threads.
// `grow above MIB FILE`: in a mapping right above a private one of FILE, as one is below which a library was loaded.
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static size_t mib, bytes, threads;

static uint64_t touched(uint64_t *words, size_t count) {
    uint64_t sum = 0;
    for (size_t i = 0; i < count; i++) sum += words[i];
    return sum;
}

static void fill(uint64_t *words, size_t count, uint64_t tag) {
    for (size_t i = 0; i < count; i++) words[i] = tag + i / 64;
}

static void *body(void *unused) {
    size_t count = (mib << 20) / threads / bytes;
    uint64_t **blocks = malloc(count * sizeof *blocks), sum = 0;
    for (size_t i = 0; i < count; i++) fill(blocks[i] = malloc(bytes), bytes / 8, i);
    for (size_t i = 0; i < count; i++) sum += touched(blocks[i], bytes / 8);
    return (void *)sum;
}

static uint64_t by_heap(void) {
    pthread_t started[64];
    uint64_t sum = 0;
    for (size_t i = 0; i < threads; i++) pthread_create(&started[i], NULL, body, NULL);
    for (size_t i = 0; i < threads; i++) {
        void *part;
        pthread_join(started[i], &part);
        sum += (uint64_t)part;
    }
    return sum;
}

static uint64_t above(const char *file) {
    size_t size = mib << 20;
    int descriptor = open(file, O_RDONLY);
    char *all = mmap(NULL, size + 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (descriptor < 0 || mmap(all, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_FIXED, descriptor, 0) != all) return 0;
    fill((uint64_t *)(all + 4096), size / 8, 1);
    return touched((uint64_t *)(all + 4096), size / 8);
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    mib = strtoul(arguments[2], NULL, 10);
    int is_heap = count > 4 && !strcmp(arguments[1], "heap");
    if (is_heap) {
        bytes = strtoul(arguments[3], NULL, 10);
        threads = strtoul(arguments[4], NULL, 10);
    }
    printf("%lu\n", is_heap ? by_heap() : above(arguments[3]));
    return 0;
}
