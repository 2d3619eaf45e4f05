// Maps memory that the kernel is to fill at once (MAP_POPULATE), writes and verifies it, and unmaps it; three times.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int count, char **arguments) {
    size_t bytes = (size_t)(count > 1 ? atol(arguments[1]) : 200) << 20;
    for (int turn = 0; turn < 3; turn++) {
        char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
        if (memory == MAP_FAILED) return 2;
        for (size_t byte = 0; byte < bytes; byte += 64) {
            if (memory[byte] != 0) return 3;
        }
        for (size_t byte = 0; byte < bytes; byte += 64) memory[byte] = turn + byte / 4096;
        for (size_t byte = 0; byte < bytes; byte += 64) {
            if (memory[byte] != (char)(turn + byte / 4096)) return 4;
        }
        munmap(memory, bytes);
    }
    puts("right");
    return 0;
}
