// Many children at once, each of which fills new memory and changes some memory that it shares with its parent:
// `crowd PARENT_MIB CHILDREN`.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { OWN = 2 << 20, PAGE = 4096 };

static unsigned char *filled(size_t bytes, unsigned seed) {
    unsigned char *start = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (start == MAP_FAILED) exit(2);
    for (size_t at = 0; at < bytes; at++) start[at] = (unsigned char)(seed + at / 7);
    return start;
}

static int is_wrong(const unsigned char *start, size_t bytes, unsigned seed) {
    for (size_t at = 0; at < bytes; at++) {
        if (start[at] != (unsigned char)(seed + at / 7)) return 1;
    }
    return 0;
}

int main(int count, char **arguments) {
    if (count != 3) return 2;
    size_t bytes = (size_t)atol(arguments[1]) << 20;
    int children = atoi(arguments[2]), wrong = 0;
    unsigned char *shared = filled(bytes, 1);
    for (int child = 0; child < children; child++) {
        pid_t pid = fork();
        if (pid < 0) return 3;
        if (pid > 0) continue;
        unsigned char *own = filled(OWN, child);
        for (size_t at = 0; at < bytes; at += 50 * PAGE) shared[at]++;
        usleep(300000);
        for (size_t at = 0; at < bytes; at += 50 * PAGE) shared[at]--;
        _exit(is_wrong(own, OWN, child) || is_wrong(shared, 1 << 20, 1));
    }
    for (int child = 0, status; child < children; child++) wrong += wait(&status) < 0 || status != 0;
    printf("wrong %d\n", wrong + is_wrong(shared, bytes, 1));
    return 0;
}
