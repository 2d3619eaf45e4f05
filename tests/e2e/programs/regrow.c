// A mapping grows by mremap, a page at a time, and is verified.
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int main(int count, char **arguments) {
    size_t most = (size_t)(count > 1 ? atol(arguments[1]) : 200) << 20, bytes = 0;
    char *at = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (; at != MAP_FAILED && bytes < most; bytes += 4096) {
        if (bytes > 0) at = mremap(at, bytes, bytes + 4096, MREMAP_MAYMOVE);
        if (at == MAP_FAILED) break;
        memset(at + bytes, bytes >> 12, 4096);
    }
    if (at == MAP_FAILED) {
        printf("cannot grow beyond %zu\n", bytes);
        return 1;
    }
    for (size_t byte = 0; byte < bytes; byte++) {
        if (at[byte] != (char)(byte >> 12)) return 2;
    }
    puts("right");
    return 0;
}
