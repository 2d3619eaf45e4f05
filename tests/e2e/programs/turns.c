/* Two processes whose memory together does not fit, and that need each other.
 * turns pipe MEBIBYTES MESSAGES: each answers the other's messages, after reads and writes of its memory.
 * turns unmap MEBIBYTES SECONDS: a thread of each waits for memory that another thread unmaps.
 * turns threads MEBIBYTES THREADS: each starts threads all the time, which read its memory. */
#include "checked.h"
#include <pthread.h>
#include <signal.h>
#include <sys/wait.h>

enum { READS = 3000 };

static struct checked memory;
static uint64_t state;

static uint64_t next_random(void) {
    state ^= state << 13;
    state ^= state >> 7;
    return state ^= state << 17;
}

/* Reads single words all over the memory, and writes them again. */
static void touch(void) {
    for (int i = 0; i < READS; i++) {
        size_t page = next_random() % memory.pages;
        unsigned index = next_random() % WORDS;
        volatile uint64_t *at = &((volatile uint64_t *)memory.at)[page * WORDS + index];
        if (*at != word(&memory, page, index)) {
            printf("WRONG: page %zu\n", page);
            exit(9);
        }
        *at = word(&memory, page, index);
    }
}

static void answer(int in, int out, long messages, int is_first) {
    char byte = 0;
    for (long i = 0; i < messages; i++) {
        if (is_first || i) touch();
        if (!is_first && read(in, &byte, 1) != 1) exit(3);
        if (write(out, &byte, 1) != 1) exit(4);
        if (is_first && read(in, &byte, 1) != 1) exit(3);
    }
}

static void ended(int signal) {
    (void)signal;
    _exit(0);
}

static void *read_on(void *unused) {
    (void)unused;
    for (;;) touch();
}

static void unmap_at_work(long seconds) {
    pthread_t thread;
    signal(SIGSEGV, ended);
    if (pthread_create(&thread, NULL, read_on, NULL)) exit(5);
    sleep(seconds);
    munmap(memory.at, memory.pages * PAGE);
    sleep(60);
    puts("WRONG: the thread waits for memory that does not exist");
    exit(6);
}

static void *read_some(void *first) {
    for (size_t i = 0; i < READS / 8; i++) {
        size_t page = ((size_t)first + i * 7919) % memory.pages;
        if (((volatile uint64_t *)memory.at)[page * WORDS] != word(&memory, page, 0)) exit(9);
    }
    return first;
}

/* Every eight threads end before the next eight start; their stacks are new each time. */
static void start_threads(long threads) {
    pthread_t started[8];
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    for (long i = 0; i < threads; i++) {
        pthread_attr_setstacksize(&attributes, (64 + i % 64) * 4096);
        if (pthread_create(&started[i % 8], &attributes, read_some, (void *)next_random())) exit(5);
        for (int j = 0; i % 8 == 7 && j < 8; j++) pthread_join(started[j], NULL);
    }
}

int main(int argc, char **argv) {
    if (argc != 4) return 2;
    int there[2], back[2];
    if (pipe(there) || pipe(back)) return 3;
    long count = atol(argv[3]);
    pid_t child = fork();
    state = 88172645463325252ull + (child ? 1 : 7919);
    memory = reserve(atol(argv[2]), child ? 1 : 2);
    fill(&memory);
    if (!strcmp(argv[1], "unmap")) {
        int status;
        if (!child) unmap_at_work(count + 1);
        pid_t other = fork();
        if (!other) unmap_at_work(count);
        munmap(memory.at, memory.pages * PAGE);
        for (int i = 0; i < 2; i++)
            if (wait(&status) < 0 || status) return 7;
        puts("right");
        return 0;
    }
    if (!strcmp(argv[1], "threads"))
        start_threads(count);
    else if (child)
        answer(back[0], there[1], count, 1);
    else
        answer(there[0], back[1], count, 0);
    size_t wrong = wrong_pages(&memory);
    if (wrong) printf("WRONG: %zu pages\n", wrong);
    if (!child) return wrong != 0;
    int status;
    wait(&status);
    puts(wrong || status ? "WRONG" : "right");
    return 0;
}
