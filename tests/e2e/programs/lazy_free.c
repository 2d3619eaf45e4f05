// Frees memory lazily (MADV_FREE) and writes it again at once, repeatedly, as some allocators do. A write causes no fault
// while the kernel has not reclaimed the page. At the end everything is verified.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { CHUNK = 1 << 20, STEP = 64 };

static void fill(char *at, unsigned seed) {
    for (int byte = 0; byte < CHUNK; byte += STEP) *(unsigned *)(at + byte) = seed * 2654435761u + byte / 4096 * 31;
}

int main(int count, char **arguments) {
    long chunks = count > 1 ? atol(arguments[1]) : 200, turns = count > 2 ? atol(arguments[2]) : 3;
    char *memory = mmap(NULL, chunks * CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) return 2;
    for (long turn = 0; turn < turns; turn++) {
        for (long chunk = 0; chunk < chunks; chunk++) {
            fill(memory + chunk * CHUNK, turn + chunk);
            if (madvise(memory + chunk * CHUNK, CHUNK, MADV_FREE)) return 3;
            fill(memory + chunk * CHUNK, turn + chunk + 1000);
        }
        for (long chunk = 0; chunk < chunks; chunk++) {
            unsigned seed = turn + chunk + 1000;
            for (int byte = 0; byte < CHUNK; byte += STEP) {
                if (*(unsigned *)(memory + chunk * CHUNK + byte) == seed * 2654435761u + byte / 4096 * 31) continue;
                printf("wrong in chunk %ld\n", chunk);
                return 1;
            }
        }
    }
    puts("right");
    return 0;
}
