// `hog MIB MS`: fills MIB MiB with incompressible data and keeps them for MS milliseconds.
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

int main(int count, char **arguments) {
    if (count != 3) return 2;
    size_t words = (size_t)atoi(arguments[1]) << 17;
    uint64_t *data = malloc(words * 8), state = 1;
    for (size_t i = 0; i < words; i++) data[i] = state = state * 6364136223846793005u + 1442695040888963407u;
    usleep(atoi(arguments[2]) * 1000);
    printf("held %d\n", (int)(data[words - 1] != 0));
    return 0;
}
