/* Allocates COUNT pieces of MIB MiB, fills each one at once, and prints whether all hold the written content. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
int main(int argc, char **argv) {
    size_t count = strtoul(argv[1], 0, 0), bytes = strtoul(argv[2], 0, 0) << 20;
    unsigned char **pieces = calloc(count, sizeof *pieces);
    for (size_t i = 0; i < count; i++) {
        pieces[i] = i % 2 ? malloc(bytes) : aligned_alloc(4096, bytes);
        memset(pieces[i], (int)i + 1, bytes);
    }
    for (size_t i = 0; i < count; i++)
        for (size_t at = 0; at < bytes; at++)
            if (pieces[i][at] != (unsigned char)(i + 1)) return 1;
    puts("intact");
    return 0;
}
