// Fills memory, makes it read-only for a while, as garbage collectors do, and writes it again.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>

static unsigned *words;
static size_t pages;

static int is_right(unsigned seed) {
    for (size_t page = 0; page < pages; page++) {
        for (int at = 0; at < 1024; at += 8) {
            if (words[page * 1024 + at] != seed + page * 31 + at % 64) return 0;
        }
    }
    return 1;
}

static void fill(unsigned seed) {
    for (size_t page = 0; page < pages; page++) {
        for (int at = 0; at < 1024; at += 8) words[page * 1024 + at] = seed + page * 31 + at % 64;
    }
}

int main(int count, char **arguments) {
    size_t bytes = (size_t)(count > 1 ? atol(arguments[1]) : 200) << 20;
    pages = bytes / 4096;
    words = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (words == MAP_FAILED) return 2;
    for (unsigned turn = 0; turn < 2; turn++) {
        fill(turn);
        if (mprotect(words, bytes, PROT_READ)) return 3;
        if (!is_right(turn) || !is_right(turn)) return 4;
        if (mprotect(words, bytes, PROT_READ | PROT_WRITE)) return 5;
        if (!is_right(turn)) return 6;
    }
    puts("right");
    return 0;
}
