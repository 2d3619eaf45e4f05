/* Threads by clone(2) with CLONE_CHILD_CLEARTID. The words that the kernel clears at their ends are swapped out
 * meanwhile.   cleared_words MIB */
#include "checked.h"
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>

#define THREADS 8

static volatile int may_end;

/* The thread has the control block of its maker, so it calls nothing of the C library. */
static inline long raw(long number, const void *first, long second) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(first), "S"(second) : "rcx", "r11", "memory");
    return result;
}

static int waits(void *unused) {
    (void)unused;
    struct timespec pause = { 0, 1000000 };
    while (!may_end) raw(SYS_nanosleep, &pause, 0);
    raw(SYS_exit, 0, 0);
    return 0;
}

int main(int argc, char **argv) {
    if (argc < 2) return 2;
    prepare(atoi(argv[1]));
    int flags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD | CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    int *words[THREADS];
    for (int index = 0; index < THREADS; index++) {
        /* The stack is no managed memory's neighbour, and is in use all the time. */
        char *stack = mmap(NULL, 64 << 10, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
        words[index] = (int *)&data.at[data.pages / THREADS * index * WORDS];
        *words[index] = 1;
        if (clone(waits, stack + (64 << 10), flags, NULL, NULL, NULL, words[index]) < 0) { perror("clone"); return 2; }
    }
    for (int round = 0; round < 3; round++) fill(&pressure);
    may_end = 1;
    double end = now() + 20;
    for (int index = 0; index < THREADS; index++) {
        while (__atomic_load_n(words[index], __ATOMIC_SEQ_CST) != 0) {
            struct timespec pause = { 0, 100000000 };
            syscall(SYS_futex, words[index], FUTEX_WAIT, 1, &pause, NULL, 0);
            if (now() > end) return verdict("a word is not cleared");
        }
        *words[index] = (int)word(&data, data.pages / THREADS * index, 0);
    }
    return verdict(is_right() ? NULL : "memory");
}
