// Maps memory directly above memory in use. The kernel merges both into one mapping, which one mremap then grows.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define USED (8 * MIB)
#define ADDED (1 * MIB)

static char *map(char *at, size_t bytes, int protection, int fixed) {
    char *start = mmap(at, bytes, protection, MAP_PRIVATE | MAP_ANONYMOUS | fixed, -1, 0);
    if (start == MAP_FAILED) exit(3);
    return start;
}

int main(int count, char **arguments) {
    // With this much memory the agent activates under the test's limit.
    size_t most = (size_t)(count > 1 ? atol(arguments[1]) : 96) * MIB;
    memset(map(NULL, most, PROT_READ | PROT_WRITE, 0), 1, most);
    for (int round = 0; round < 40; round++) {
        char *used = map(NULL, USED + 2 * ADDED, PROT_NONE, 0);
        map(used, USED, PROT_READ | PROT_WRITE, MAP_FIXED);
        memset(used, round + 1, USED);
        usleep(20000);
        map(used + USED, ADDED, PROT_READ | PROT_WRITE, MAP_FIXED);
        char *moved = mremap(used, USED + ADDED, USED + 4 * ADDED, MREMAP_MAYMOVE);
        if (moved == MAP_FAILED) {
            printf("round %d: cannot grow\n", round);
            return 1;
        }
        for (size_t byte = 0; byte < USED + 4 * ADDED; byte += 512) {
            if (moved[byte] != (byte < USED ? round + 1 : 0)) return 2;
        }
        munmap(moved, USED + 4 * ADDED);
    }
    puts("right");
    return 0;
}
