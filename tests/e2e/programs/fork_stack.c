/* Forks by each function and system call that forks, from a thread with only BYTES of stack left.
 * fork_stack MIB BYTES */
#define _GNU_SOURCE
#include "fork_library.c"
#include "fork_paths.h"
#include <alloca.h>
#include <limits.h>
#include <pthread.h>

static const char *path;
static pid_t child;
static size_t left;

static int check(void) { return !is_right(); }

/* Goes down the stack until `left` bytes of it are there. */
static __attribute__((noinline)) void go_down(char *lowest) {
    char *here = alloca((char *)__builtin_frame_address(0) - lowest - left);
    *(volatile char *)here = 1;
    child = make_child(path, NULL, check);
}

static void *in_thread(void *lowest) { go_down(lowest); return NULL; }

int main(int count, char **arguments) {
    static const char *paths[] = { "fork", "_Fork", "SYS_fork", "SYS_clone", "SYS_clone3" };
    size_t bytes = PTHREAD_STACK_MIN;
    int wrong = 0;
    (void)count;
    left = atoi(arguments[2]);
    fill(atoi(arguments[1]));
    for (unsigned index = 0; index < sizeof paths / sizeof *paths; index++) {
        pthread_t thread; pthread_attr_t attributes;
        /* Its lowest page is the guard. */
        char *stack = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (stack == MAP_FAILED || mprotect(stack + PAGE, bytes, PROT_READ | PROT_WRITE)) return 2;
        pthread_attr_init(&attributes);
        pthread_attr_setstack(&attributes, stack + PAGE, bytes);
        path = paths[index];
        if (pthread_create(&thread, &attributes, in_thread, stack + PAGE)) return 2;
        pthread_join(thread, NULL);
        int right = ended_well(child) && is_right();
        if (!right) { printf("wrong: %s\n", path); wrong++; }
        munmap(stack, bytes + PAGE);
    }
    printf("wrong %d\n", wrong);
    return wrong != 0;
}
