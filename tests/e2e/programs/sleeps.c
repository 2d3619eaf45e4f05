/* Fills memory, sleeps until its standard input ends, and verifies the memory: `sleeps MIB`. Prints "right". */
#include "checked.h"

int main(int count, char **arguments) {
    if (count != 2) return 2;
    data = reserve(strtoul(arguments[1], NULL, 10), (uint64_t)getpid());
    fill(&data);
    char byte;
    if (read(STDIN_FILENO, &byte, 1) != 0) return 3;
    puts(wrong_pages(&data) ? "WRONG" : "right");
    return 0;
}
