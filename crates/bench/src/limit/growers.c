/* Programs that grow at the speed of memory, each in a way of its own, and verify what they wrote:
 *
 *   growers malloc MIB BYTES THREADS   blocks of BYTES by malloc, from so many threads
 *   growers array MIB                  one mapping, filled from its start to its end
 *   growers forks MIB                  three children read an array that a fourth one writes
 *   growers inline MIB THREADS         mappings of 64 KiB to 4 MiB by system calls of the program's own
 *   growers lazy MIB                   memory that is freed lazily (MADV_FREE) and written again
 *
 * The exit code is 1 if content was wrong, and 2 if memory could not be had. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

enum { MAX_THREADS = 64, READERS = 3, TURNS = 2 };
static const size_t MIB = 1 << 20;

static size_t total_bytes, block_bytes, threads;

/* The word at `index` of a block: runs of equal words, as compressible as much real data. */
static uint64_t word(uint64_t tag, size_t index) { return tag * 2654435761u + index / 64; }

static void fill(uint64_t *words, size_t bytes, uint64_t tag) {
    for (size_t i = 0; i < bytes / 8; i++) words[i] = word(tag, i);
}

static void verify(const uint64_t *words, size_t bytes, uint64_t tag) {
    for (size_t i = 0; i < bytes / 8; i++) {
        if (words[i] == word(tag, i)) continue;
        printf("wrong: word %zu of block %lu is %lx\n", i, (unsigned long)tag, (unsigned long)words[i]);
        fflush(stdout);
        _exit(1);
    }
}

static void *had(void *memory) {
    if (memory && memory != MAP_FAILED) return memory;
    perror("growers");
    _exit(2);
}

static void in_threads(void *(*body)(void *)) {
    pthread_t started[MAX_THREADS];
    for (size_t i = 0; i < threads; i++) {
        if (pthread_create(&started[i], NULL, body, (void *)i)) had(NULL);
    }
    for (size_t i = 0; i < threads; i++) pthread_join(started[i], NULL);
}

static void *by_malloc(void *number) {
    size_t count = total_bytes / threads / block_bytes;
    uint64_t tag = (uint64_t)number << 32, **blocks = had(malloc(count * sizeof *blocks));
    for (size_t i = 0; i < count; i++) fill(blocks[i] = had(malloc(block_bytes)), block_bytes, tag + i);
    for (size_t i = 0; i < count; i++) verify(blocks[i], block_bytes, tag + i);
    return NULL;
}

static uint64_t *mapped(size_t bytes) {
    return had(mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
}

static void array(void) {
    uint64_t *words = mapped(total_bytes);
    fill(words, total_bytes, 1);
    verify(words, total_bytes, 1);
}

static int in_child(int child, uint64_t *words) {
    for (int turn = 0; turn < TURNS; turn++) {
        if (child == READERS) {
            fill(words, total_bytes, 2 + turn);
            verify(words, total_bytes, 2 + turn);
        } else {
            verify(words, total_bytes, 1);
        }
    }
    return 0;
}

static int forks(void) {
    uint64_t *words = mapped(total_bytes);
    int failed = 0, status;
    fill(words, total_bytes, 1);
    for (int child = 0; child <= READERS; child++) {
        pid_t pid = fork();
        if (pid < 0) had(NULL);
        if (!pid) _exit(in_child(child, words));
    }
    while (wait(&status) > 0) failed |= status != 0;
    verify(words, total_bytes, 1);
    return failed;
}

static void *inline_mapped(size_t bytes) {
#ifdef __x86_64__
    register long flags __asm__("r10") = MAP_PRIVATE | MAP_ANONYMOUS, file __asm__("r8") = -1, offset __asm__("r9") = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "0"(SYS_mmap), "D"(NULL), "S"(bytes), "d"(PROT_READ | PROT_WRITE), "r"(flags), "r"(file), "r"(offset)
                     : "rcx", "r11", "memory");
    return had(result < 0 && result > -4096 ? NULL : (void *)result);
#else
    return mapped(bytes);
#endif
}

static void *by_inline_calls(void *number) {
    size_t share = total_bytes / threads, used = 0, pieces = 0;
    uint64_t tag = (uint64_t)number << 32, **starts = had(malloc(share / (64 << 10) * sizeof *starts));
    size_t bytes = 64 << 10;
    for (; used + bytes <= share; used += bytes, bytes = (64 << 10) << pieces % 7) {
        fill(starts[pieces] = inline_mapped(bytes), bytes, tag + pieces);
        pieces++;
    }
    for (size_t i = 0; i < pieces; i++) verify(starts[i], (64 << 10) << i % 7, tag + i);
    return NULL;
}

static void lazy(void) {
    char *memory = (char *)mapped(total_bytes);
    for (int turn = 0; turn < TURNS; turn++) {
        for (size_t at = 0; at < total_bytes; at += MIB) {
            fill((uint64_t *)(memory + at), MIB, turn + at);
            if (madvise(memory + at, MIB, MADV_FREE)) had(NULL);
            fill((uint64_t *)(memory + at), MIB, turn + at + 1);
        }
        for (size_t at = 0; at < total_bytes; at += MIB) verify((uint64_t *)(memory + at), MIB, turn + at + 1);
    }
}

int main(int count, char **arguments) {
    const char *mode = count > 2 ? arguments[1] : "";
    total_bytes = count > 2 ? strtoul(arguments[2], NULL, 10) * MIB : 0;
    threads = count > 3 ? strtoul(arguments[count - 1], NULL, 10) : 1;
    if (threads < 1 || threads > MAX_THREADS) return 2;
    if (!strcmp(mode, "malloc") && count == 5) {
        block_bytes = strtoul(arguments[3], NULL, 10);
        in_threads(by_malloc);
    } else if (!strcmp(mode, "inline") && count == 4) {
        in_threads(by_inline_calls);
    } else if (!strcmp(mode, "array")) {
        array();
    } else if (!strcmp(mode, "lazy")) {
        lazy();
    } else if (!strcmp(mode, "forks")) {
        return forks();
    } else {
        return 2;
    }
    return 0;
}
