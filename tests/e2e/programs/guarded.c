// Maps pieces of memory, each directly above a guard as a thread's stack is, while threads start and end between them:
// `guarded MIB`.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

enum { PIECE = 1 << 20, PAGE = 4096, WORDS = PIECE / sizeof(unsigned) };

static unsigned *piece_new(unsigned seed) {
    char *mapped = mmap(NULL, PIECE + 2 * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED || mprotect(mapped + PAGE, PIECE, PROT_READ | PROT_WRITE)) exit(2);
    unsigned *words = (unsigned *)(mapped + PAGE);
    for (unsigned i = 0; i < WORDS; i++) words[i] = seed + i / 3;
    return words;
}

static int is_right(const unsigned *words, unsigned seed) {
    for (unsigned i = 0; i < WORDS; i++) {
        if (words[i] != seed + i / 3) return 0;
    }
    return 1;
}

static void *sum(void *argument) {
    volatile char used[32 << 10];
    for (unsigned i = 0; i < sizeof used; i += 64) used[i] = (char)i;
    long found = 0;
    for (unsigned i = 0; i < sizeof used; i += 64) found += used[i] == (char)i;
    *(long *)argument += found;
    return NULL;
}

int main(int count, char **arguments) {
    unsigned pieces = count > 1 ? (unsigned)atoi(arguments[1]) : 200;
    unsigned **all = calloc(pieces, sizeof *all);
    long sums[4] = {0};
    pthread_t threads[4];
    for (unsigned i = 0; i < pieces; i++) {
        for (int t = 0; t < 4; t++) {
            if (pthread_create(&threads[t], NULL, sum, &sums[t])) return 3;
        }
        all[i] = piece_new(i);
        for (int t = 0; t < 4; t++) pthread_join(threads[t], NULL);
    }
    unsigned wrong = 0;
    for (unsigned i = 0; i < pieces; i++) wrong += !is_right(all[i], i);
    for (int t = 0; t < 4; t++) wrong += sums[t] != pieces * 512L;
    printf("wrong %u\n", wrong);
    return wrong != 0;
}
