// Threads fork whose stacks the program has mapped itself (pthread_attr_setstack). Parent and child check the stack content.
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { THREADS = 4, WORDS = 65536, STACK = 32 << 20 };
static int forks;
static long wrongs[THREADS];

static void *body(void *argument) {
    volatile long words[WORDS], wrong = 0;
    long thread = (long)argument;
    for (int turn = 0; turn < forks; turn++) {
        for (long i = 0; i < WORDS; i++) words[i] = i * 31 + turn + thread;
        int status;
        pid_t child = fork();
        for (long i = 0; i < WORDS; i++) wrong += words[i] != i * 31 + turn + thread;
        if (child == 0) _exit(wrong != 0);
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) wrong++;
    }
    wrongs[thread] = wrong;
    return NULL;
}

int main(int count, char **arguments) {
    pthread_t threads[THREADS];
    pthread_attr_t attributes;
    long wrong = 0;
    forks = count > 1 ? atoi(arguments[1]) : 10;
    for (long i = 0; i < THREADS; i++) {
        void *stack = mmap(NULL, STACK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        pthread_attr_init(&attributes);
        pthread_attr_setstack(&attributes, stack, STACK);
        if (stack == MAP_FAILED || pthread_create(&threads[i], &attributes, body, (void *)i)) return 2;
    }
    for (int i = 0; i < THREADS; i++) {
        pthread_join(threads[i], NULL);
    }
    for (int i = 0; i < THREADS; i++) wrong += wrongs[i];
    printf("wrong %ld\n", wrong);
    return wrong != 0;
}
