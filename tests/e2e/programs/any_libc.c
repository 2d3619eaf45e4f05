/* A program for each C library: threads, forks, and an allocator in use, over memory that does not fit. Prints OK. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define BYTES ((size_t)64 << 20)
#define PAGE 4096
#define THREADS 6

static unsigned char *data;
static long wanted;

static long sum(void) {
    long sum = 0;
    for (size_t at = 0; at < BYTES; at += PAGE)
        sum += data[at];
    return sum;
}

static void *work(void *wrong) {
    for (int turn = 0; turn < 300; turn++) {
        size_t bytes = 1000 + turn * 7919u % 200000;
        char *block = malloc(bytes);
        memset(block, turn, bytes);
        for (size_t at = 0; at < bytes; at += 512)
            *(int *)wrong += block[at] != (char)turn;
        free(block);
    }
    *(int *)wrong += sum() != wanted;
    return wrong;
}

int main(void) {
    data = malloc(BYTES);
    for (size_t at = 0; at < BYTES; at++)
        data[at] = at / PAGE * 31 + at % 17;
    wanted = sum();
    for (int turn = 0; turn < 3; turn++) {
        int status;
        pid_t child = fork();
        if (child == 0) {
            int is_wrong = sum() != wanted;
            data[PAGE] ^= 1;
            _exit(is_wrong);
        }
        if (waitpid(child, &status, 0) != child || status)
            return 1;
    }
    pthread_t threads[THREADS];
    int wrong[THREADS] = {0};
    for (int number = 0; number < THREADS; number++)
        pthread_create(&threads[number], NULL, work, &wrong[number]);
    for (int number = 0; number < THREADS; number++) {
        pthread_join(threads[number], NULL);
        if (wrong[number])
            return 2;
    }
#ifndef NO_SHELL
    if (system("true") != 0)
        return 3;
#endif
    if (sum() != wanted)
        return 4;
    puts("OK");
    return 0;
}
