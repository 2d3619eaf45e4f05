/* A program that defines C library functions itself, each of which writes to memory that may be swapped out. It is built
 * with -fno-builtin -rdynamic, so that libraries bind to these functions. OWN_* macros select them. Prints OK or WRONG. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#define MIB (1UL << 20)
#define BOOK_ENTRIES (MIB / 2)

static volatile unsigned long *book;

static void note(unsigned long what) {
    if (book)
        book[what * 4099 % BOOK_ENTRIES]++;
}

#ifdef OWN_MEMORY
void *memcpy(void *restrict to, const void *restrict from, size_t bytes) {
    note(bytes);
    for (size_t at = 0; at < bytes; at++)
        ((volatile char *)to)[at] = ((const char *)from)[at];
    return to;
}
void *memmove(void *to, const void *from, size_t bytes) {
    note(bytes);
    if ((uintptr_t)to < (uintptr_t)from)
        for (size_t at = 0; at < bytes; at++)
            ((volatile char *)to)[at] = ((const char *)from)[at];
    else
        for (size_t at = bytes; at--;)
            ((volatile char *)to)[at] = ((const char *)from)[at];
    return to;
}
void *memset(void *to, int byte, size_t bytes) {
    note(bytes);
    for (size_t at = 0; at < bytes; at++)
        ((volatile char *)to)[at] = byte;
    return to;
}
int memcmp(const void *one, const void *other, size_t bytes) {
    note(bytes);
    const volatile unsigned char *a = one, *b = other;
    for (size_t at = 0; at < bytes; at++)
        if (a[at] != b[at])
            return a[at] - b[at];
    return 0;
}
int bcmp(const void *one, const void *other, size_t bytes) { return memcmp(one, other, bytes); }
size_t strlen(const char *text) {
    const volatile char *end = text;
    while (*end)
        end++;
    note(end - text);
    return end - text;
}
#endif

#ifdef OWN_CALLS
/* These functions all return errors or impossible values, so a caller in the agent would fail. */
long syscall(long number, ...) { note(number); errno = ENOSYS; return -1; }
int clock_gettime(clockid_t clock, struct timespec *time) { note(clock); time->tv_sec = time->tv_nsec = 0; return 0; }
unsigned long getauxval(unsigned long type) { note(type); return 0; }
int madvise(void *at, size_t bytes, int advice) { note((uintptr_t)at + bytes + advice); errno = EINVAL; return -1; }
int munmap(void *at, size_t bytes) { note((uintptr_t)at + bytes); errno = EINVAL; return -1; }
int sched_yield(void) { note(1); return 0; }
int getrusage(__rusage_who_t who, struct rusage *usage) { note(who + (uintptr_t)usage); errno = EINVAL; return -1; }
ssize_t read(int file, void *to, size_t bytes) { note(file + (uintptr_t)to + bytes); errno = EIO; return -1; }
int close(int file) { note(file); errno = EIO; return -1; }
pid_t getpid(void) { note(7); return 1; }
char *getenv(const char *name) { note((uintptr_t)name); return NULL; }
void *dlsym(void *handle, const char *name) { note((uintptr_t)handle + (uintptr_t)name); return NULL; }
int dl_iterate_phdr(int (*callback)(void *, size_t, void *), void *data) { note((uintptr_t)callback + (uintptr_t)data); return 0; }
unsigned long ZSTD_trace_compress_begin(void *context) { note((uintptr_t)context); return 1; }
unsigned long ZSTD_trace_decompress_begin(void *context) { note((uintptr_t)context); return 1; }
void ZSTD_trace_compress_end(unsigned long context, void *trace) { note(context + (uintptr_t)trace); }
void ZSTD_trace_decompress_end(unsigned long context, void *trace) { note(context + (uintptr_t)trace); }
#endif

#ifdef OWN_LOCKS
int pthread_mutex_lock(pthread_mutex_t *lock) { note((uintptr_t)lock); return 0; }
int pthread_mutex_unlock(pthread_mutex_t *lock) { note((uintptr_t)lock); return 0; }
pthread_t pthread_self(void) { note(3); return 0; }
int pthread_getcpuclockid(pthread_t thread, clockid_t *clock) { note(thread + (uintptr_t)clock); return ENOENT; }
int *__errno_location(void) { static int number; note(5); return &number; }
#endif

#ifdef OWN_MALLOC
static char *next, *end;
void *malloc(size_t bytes) {
    note(bytes);
    if (!next) {
        next = mmap(NULL, 64 * MIB, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        end = next + 64 * MIB;
    }
    bytes = (bytes + 31) & ~15UL;
    if ((size_t)(end - next) < bytes)
        return NULL;
    next += bytes;
    *(size_t *)(next - bytes) = bytes - 16;
    return next - bytes + 16;
}
void free(void *at) { note((uintptr_t)at); }
void *calloc(size_t count, size_t bytes) { return malloc(count * bytes); }
void *realloc(void *old, size_t bytes) {
    char *new = malloc(bytes);
    for (size_t at = 0; old && new && at < bytes && at < ((size_t *)old)[-2]; at++)
        new[at] = ((char *)old)[at];
    return new;
}
#endif

#ifdef THREAD_LOCAL_MIB
/* More thread-local storage than the stacks of the agent's threads can hold. */
static __thread volatile char thread_local[THREAD_LOCAL_MIB * MIB];
#endif

static uint64_t word(size_t page, size_t at) { return (page + 1) * 0x9E3779B97F4A7C15ull + (at & 15); }

static void fill(volatile uint64_t *at, size_t bytes) {
    for (size_t i = 0; i < bytes / 8; i++)
        at[i] = word(i / 512, i % 512);
}

static size_t wrong(const volatile uint64_t *at, size_t bytes) {
    size_t count = 0;
    for (size_t i = 0; i < bytes / 8; i++)
        count += at[i] != word(i / 512, i % 512);
    return count;
}

static void *map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

int main(void) {
    volatile unsigned long *own = map(BOOK_ENTRIES * sizeof *own);
    for (size_t at = 0; at < BOOK_ENTRIES; at++)
        own[at] = at * 77;
    book = own;
    size_t bytes = 32 * MIB, pressure_bytes = 160 * MIB, bad = 0;
    void *content = map(bytes), *pressure = map(pressure_bytes);
    fill(content, bytes);
#ifdef THREAD_LOCAL_MIB
    for (size_t at = 0; at < sizeof thread_local; at += 4096)
        thread_local[at] = at / 4096;
#endif
    for (int round = 0; round < 2; round++) {
        fill(pressure, pressure_bytes);
        bad += wrong(content, bytes);
    }
    bad += wrong(pressure, pressure_bytes);
#ifdef THREAD_LOCAL_MIB
    for (size_t at = 0; at < sizeof thread_local; at += 4096)
        bad += thread_local[at] != (char)(at / 4096);
#endif
    static const char verdicts[2][7] = {"OK\n", "WRONG\n"};
    const char *verdict = verdicts[bad != 0];
    if (write(1, verdict, bad ? 6 : 3) < 0)
        return 2;
    return bad != 0;
}
