/* Fills some MiB of heap and checks them twice, for a build with a sanitizer. With `leak` the blocks are lost at the end. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Volatile: the compiler must not keep the only pointer in a register. */
static char **volatile all;

int main(int argc, char **argv) {
    size_t count = (argc > 1 ? atoi(argv[1]) : 64) * 1024;
    all = malloc(count * sizeof *all);
    int is_right = 1;
    for (size_t at = 0; at < count; at++) {
        all[at] = malloc(1024);
        memset(all[at], (int)at, 1024);
    }
    for (int round = 0; round < 2; round++)
        for (size_t at = 0; at < count; at++)
            for (int byte = 0; byte < 1024; byte += 64)
                is_right &= all[at][byte] == (char)at;
    printf("%s\n", is_right ? "OK" : "WRONG");
    fflush(stdout);
    if (argc > 2 && !strcmp(argv[2], "leak")) {
        // Every pointer is cleared, because a copy of `all` on the stack would keep the blocks reachable.
        for (size_t at = 0; at < count; at++)
            all[at] = NULL;
        all = NULL;
    }
    return !is_right;
}
