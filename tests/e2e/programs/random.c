/* Random reads and writes of cells that lie across pages, each verified whole, while other memory is discarded.
 * random MEBIBYTES SECONDS SEED */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum { CELL_WORDS = 640, PAGE = 4096, DISCARDED_PAGES = 512 };

static uint64_t state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Word 1 of a cell is its version; half of the others compress well. */
static uint64_t expected(size_t cell, int word, uint32_t version) {
    return word == 1 ? version : word % 3 == 0 ? cell * 1315423911u + word : cell;
}

static char *map(size_t bytes) {
    char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return start == MAP_FAILED ? NULL : start;
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    size_t cells = ((size_t)atol(argv[1]) << 20) / (CELL_WORDS * 8);
    time_t seconds = atol(argv[2]);
    state = 88172645463325252ull + 7919 * (uint64_t)atol(argv[3]);
    uint64_t(*cell)[CELL_WORDS] = (void *)map(cells * sizeof *cell);
    uint32_t *version = calloc(cells, sizeof *version);
    char *discarded = map(DISCARDED_PAGES * PAGE);
    if (!cell || !version || !discarded) return 3;
    for (size_t i = 0; i < cells; i++)
        for (int word = 0; word < CELL_WORDS; word++) cell[i][word] = expected(i, word, 0);
    struct timespec began, now;
    clock_gettime(CLOCK_MONOTONIC, &began);
    do {
        for (int turn = 0; turn < 256; turn++) {
            size_t i = next_random() % cells;
            for (int word = 0; word < CELL_WORDS; word++)
                if (cell[i][word] != expected(i, word, version[i])) {
                    printf("WRONG: cell %zu of version %u: word %d at %p is %llx\n", i, version[i], word,
                           (void *)&cell[i][word], (unsigned long long)cell[i][word]);
                    return 9;
                }
            if (next_random() % 2) cell[i][1] = ++version[i];
            if (next_random() % 64 == 0) {
                char *start = discarded + next_random() % (DISCARDED_PAGES - 8) * PAGE;
                madvise(start, PAGE * (1 + next_random() % 8), MADV_DONTNEED);
                memset(start, 1, PAGE);
            }
        }
        clock_gettime(CLOCK_MONOTONIC, &now);
    } while (now.tv_sec - began.tv_sec < seconds);
    puts("right");
    return 0;
}
