// Sets a resource limit (RLIMIT_AS or RLIMIT_DATA) for itself, as sandboxes do, fills memory, and verifies it:
// `limits as|data LIMIT_MIB FILL_MIB`.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

int main(int count, char **arguments) {
    if (count != 4) return 2;
    struct rlimit most = {(rlim_t)atol(arguments[2]) << 20, (rlim_t)atol(arguments[2]) << 20};
    if (setrlimit(strcmp(arguments[1], "as") ? RLIMIT_DATA : RLIMIT_AS, &most)) return 2;
    size_t pieces = (size_t)atol(arguments[3]), words = (1 << 20) / sizeof(unsigned);
    unsigned **all = calloc(pieces, sizeof *all);
    for (size_t i = 0; i < pieces; i++) {
        if (!(all[i] = malloc(1 << 20))) return perror("malloc"), 3;
        for (size_t at = 0; at < words; at++) all[i][at] = (unsigned)(i + at / 3);
    }
    unsigned wrong = 0;
    for (size_t i = 0; i < pieces; i++) {
        for (size_t at = 0; at < words; at++) wrong += all[i][at] != (unsigned)(i + at / 3);
        free(all[i]);
    }
    printf("wrong %u\n", wrong);
    return wrong != 0;
}
