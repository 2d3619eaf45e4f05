/* Threads that begin and end all the time, half of them detached, and exchange blocks of malloc of all sizes, over memory that
   does not fit; children verify all blocks. Usage: churn MIB ROUNDS. Prints the number of blocks that were verified. */
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 8
#define MEAN_BYTES 5120
#define PARTS 64

struct block {
    unsigned char *data;
    size_t bytes;
    unsigned char seed;
};

static struct block *blocks;
static size_t count;
static pthread_mutex_t locks[PARTS];
/* A fork waits until no block is half changed. */
static pthread_rwlock_t changes = PTHREAD_RWLOCK_INITIALIZER;
static sem_t detached_ends;
static int turns;

static unsigned next(unsigned *state) {
    return (*state = *state * 1664525 + 1013904223) >> 8;
}

static void fail(const char *what, size_t index) {
    fprintf(stderr, "churn: %s of block %zu\n", what, index);
    _exit(3);
}

static void verify(size_t index) {
    struct block *block = &blocks[index];
    for (size_t at = 0; at < block->bytes; at += 64)
        if (block->data[at] != (unsigned char)(block->seed + at / 64))
            fail("wrong content", index);
}

/* Returns a random block size: mostly small, sometimes some pages, rarely so large that malloc maps the block by itself. */
static size_t size(unsigned *state) {
    unsigned kind = next(state) % 64;
    return 1 + next(state) % (kind == 0 ? 65 * MEAN_BYTES : kind < 16 ? 4 * MEAN_BYTES : MEAN_BYTES / 2);
}

static void replace(size_t index, unsigned *state) {
    struct block *block = &blocks[index];
    size_t bytes = size(state);
    if (next(state) % 4 == 0) {
        block->data = realloc(block->data, bytes);
    } else {
        free(block->data);
        block->data = malloc(bytes);
    }
    if (!block->data)
        fail("no memory", index);
    block->bytes = bytes;
    block->seed = next(state);
    for (size_t at = 0; at < bytes; at += 64)
        block->data[at] = block->seed + at / 64;
}

static void exchange(unsigned seed) {
    for (int turn = 0; turn < turns; turn++) {
        size_t index = next(&seed) % count;
        pthread_rwlock_rdlock(&changes);
        pthread_mutex_lock(&locks[index % PARTS]);
        verify(index);
        replace(index, &seed);
        pthread_mutex_unlock(&locks[index % PARTS]);
        pthread_rwlock_unlock(&changes);
    }
}

static void *joined(void *seed) {
    exchange((unsigned)(size_t)seed);
    return seed;
}

static void *detached(void *seed) {
    exchange((unsigned)(size_t)seed);
    sem_post(&detached_ends);
    return NULL;
}

/* A child verifies everything, and uses malloc itself. */
static void fork_child(unsigned seed) {
    int status;
    pthread_rwlock_wrlock(&changes);
    pid_t child = fork();
    if (child == 0) {
        for (size_t index = 0; index < count; index++) {
            verify(index);
            if (index % 16 == 0)
                replace(index, &seed);
        }
        _exit(0);
    }
    pthread_rwlock_unlock(&changes);
    if (waitpid(child, &status, 0) != child || status)
        fail("a child found wrong content", 0);
}

int main(int argc, char **argv) {
    if (argc != 3)
        return 2;
    unsigned seed = 1;
    count = (strtoul(argv[1], NULL, 10) << 20) / MEAN_BYTES;
    turns = count / THREADS / 4;
    blocks = calloc(count, sizeof *blocks);
    for (int part = 0; part < PARTS; part++)
        pthread_mutex_init(&locks[part], NULL);
    sem_init(&detached_ends, 0, 0);
    for (size_t index = 0; index < count; index++)
        replace(index, &seed);
    for (int round = 0; round < atoi(argv[2]); round++) {
        pthread_t threads[THREADS];
        for (int number = 0; number < THREADS; number++) {
            void *argument = (void *)(size_t)next(&seed);
            if (pthread_create(&threads[number], NULL, number % 2 ? detached : joined, argument))
                fail("no thread for change", number);
            if (number % 2)
                pthread_detach(threads[number]);
        }
        fork_child(seed);
        for (int number = 0; number < THREADS; number++)
            if (number % 2)
                sem_wait(&detached_ends);
            else if (pthread_join(threads[number], NULL))
                fail("no end of a thread for change", number);
    }
    for (size_t index = 0; index < count; index++)
        verify(index);
    printf("%zu\n", count);
    return 0;
}
