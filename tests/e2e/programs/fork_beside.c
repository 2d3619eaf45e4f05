/* MADV_DONTFORK of one half of new memory, then of the other: a child has the half that is not left out, and all of it after
 * MADV_DOFORK. The halves become managed while the program gives the advice. */
#include "checked.h"
#include <sys/wait.h>

#define BLOCK (2 * MIB)

/* The wait status of a child that reads `bytes` at `at`, which contain ones. */
static int child_reads(const char *at, size_t bytes) {
    pid_t child = fork();
    if (child == 0) {
        size_t sum = 0;
        for (size_t offset = 0; offset < bytes; offset += PAGE) sum += at[offset];
        _exit(sum != bytes / PAGE);
    }
    int status = -1;
    return waitpid(child, &status, 0) == child ? status : -1;
}

int main(void) {
    // More than the limit: from here on memory is managed.
    prepare(24);
    for (int round = 0; round < 24; round++) {
        char *start = mmap(NULL, 2 * BLOCK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (start == MAP_FAILED) return 2;
        char *block = (char *)(((uintptr_t)start + BLOCK) & ~(BLOCK - 1));
        // A mapping of its own.
        madvise(block, BLOCK, MADV_HUGEPAGE);
        memset(block, 1, BLOCK);
        // Both halves are mappings of their own for a moment.
        mprotect(block + PAGE, PAGE, PROT_READ);
        mprotect(block + PAGE, PAGE, PROT_READ | PROT_WRITE);
        char *left_out = round & 1 ? block : block + BLOCK / 2, *copied = round & 1 ? block + BLOCK / 2 : block;
        if (madvise(left_out, BLOCK / 2, MADV_DONTFORK)) return 2;
        if (child_reads(copied, BLOCK / 2)) return verdict("a child lacks what lies beside memory that is left out");
        if (madvise(block, BLOCK, MADV_DOFORK)) return 2;
        if (child_reads(block, BLOCK)) return verdict("a child lacks memory after MADV_DOFORK");
        munmap(start, 2 * BLOCK);
    }
    return verdict(is_right() ? NULL : "the parent's memory");
}
