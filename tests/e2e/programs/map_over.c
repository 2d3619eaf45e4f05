/* Maps over its own mapping all the time, by inline system calls, while it has `argv[1]` MiB of content: the size of
 * its memory is smaller for a moment each time. Verifies the content. */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include "inline_call.h"

#define PIECE (1ul << 20)

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec / 1e9;
}

int main(int argc, char **argv) {
    size_t words = (argc > 1 ? atoi(argv[1]) : 64) * (1ul << 20) / sizeof(uint64_t);
    uint64_t *content = malloc(words * sizeof *content);
    char *piece = mmap(NULL, PIECE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (!content || piece == MAP_FAILED) return 2;
    for (size_t at = 0; at < words; at++) content[at] = at;
    for (double end = now() + 1.5; now() < end;)
        for (int round = 0; round < 1000; round++)
            inline_call(SYS_mmap, (long)piece, PIECE, round % 2 ? PROT_NONE : PROT_READ,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    for (size_t at = 0; at < words; at++)
        if (content[at] != at) {
            printf("word %zu is %#lx\n", at, content[at]);
            return 1;
        }
    puts("OK");
}
