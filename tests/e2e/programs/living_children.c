// Children that all live at once, each of which has memory of its own: living_children COUNT
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int count, char **arguments) {
    int children = count > 1 ? atoi(arguments[1]) : 0, begun[2], ended[2], failed = 0, status;
    uint64_t word = 0;
    char byte;
    if (pipe(begun) || pipe(ended)) return 2;
    for (int child = 0; child < children; child++) {
        word = child;
        pid_t pid = fork();
        if (pid < 0) return 3;
        if (!pid) {
            close(ended[1]);
            if (write(begun[1], "x", 1) != 1 || read(ended[0], &byte, 1) != 0) _exit(4);
            _exit(word != (uint64_t)child);
        }
    }
    close(begun[1]);
    for (int child = 0; child < children; child++)
        if (read(begun[0], &byte, 1) != 1) return 5;
    close(ended[1]);
    for (int child = 0; child < children; child++) failed |= wait(&status) < 0 || status != 0;
    puts(failed ? "wrong" : "right");
    return failed;
}
