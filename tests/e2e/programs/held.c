/* A program whose memory is mostly swapped out, for tests that inspect it from outside.   held HOW MIB
 * `wait`: prints "ready", waits for a byte, and checks. `threads`: checks in threads and in children of forks. */
#include "checked.h"
#include <pthread.h>
#include <sys/wait.h>

static __attribute__((noinline)) int check(const struct checked *memory) {
    __asm__ volatile("" ::: "memory");
    return wrong_pages(memory) == 0;
}

static void *check_data(void *unused) {
    (void)unused;
    return (void *)(intptr_t)!check(&data);
}

static int in_threads_and_children(void) {
    int wrong = 0;
    for (int round = 0; round < 3; round++) {
        pthread_t threads[2];
        void *result;
        for (int index = 0; index < 2; index++) pthread_create(&threads[index], NULL, check_data, NULL);
        pid_t child = fork();
        if (child == 0) _exit(!check(&data));
        int status = -1;
        waitpid(child, &status, 0);
        wrong += status != 0;
        for (int index = 0; index < 2; index++) {
            pthread_join(threads[index], &result);
            wrong += result != NULL;
        }
        fill(&pressure);
    }
    return wrong;
}

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    prepare(atoi(argv[2]));
    if (!strcmp(argv[1], "threads")) return verdict(in_threads_and_children() ? "memory" : NULL);
    char byte;
    printf("ready\n");
    fflush(stdout);
    if (!strcmp(argv[1], "wait") && read(0, &byte, 1) < 0) return 2;
    return verdict(check(&data) && check(&pressure) ? NULL : "memory");
}
