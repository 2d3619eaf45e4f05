// Touches single pages, `step` KiB apart in a scattered order, three times, and verifies them. The other pages of a large
// folio are zeros.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

int main(int count, char **arguments) {
    size_t bytes = (size_t)atol(arguments[1]) << 20, step = (size_t)atol(arguments[2]) << 10, places = bytes / step, wrong = 0;
    if (count != 3) return 2;
    // This memory is filled first, so that memory is short afterwards.
    size_t others_bytes = 64 << 20;
    char *others = mmap(NULL, others_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char *memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (others == MAP_FAILED || memory == MAP_FAILED) return 2;
    for (size_t byte = 0; byte < others_bytes; byte += 64) others[byte] = byte * 7 + byte / 4096;
    for (size_t turn = 1; turn <= 3; turn++) {
        for (size_t index = 0; index < places; index++) {
            size_t place = index * 2654435761UL % places;
            memory[place * step] = place + turn;
        }
    }
    for (size_t place = 0; place < places; place++) wrong += memory[place * step] != (char)(place + 3);
    for (size_t byte = 0; byte < others_bytes; byte += 64) wrong += others[byte] != (char)(byte * 7 + byte / 4096);
    printf("wrong %zu\n", wrong);
    return wrong != 0;
}
