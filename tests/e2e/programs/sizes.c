/* A program that maps, advises and touches memory as it is told on stdin, and verifies what it wrote at the end.
 * Commands, one a line, numbers in MiB:
 *   map N            makes a mapping at a multiple of 2M, which later commands work on. The program touches some memory
 *                    before the mapping and waits a moment, so that foliomem registers the mapping
 *   map-unseen N     makes such a mapping by an inline system call, which foliomem cannot intercept, and does not wait
 *   part A B         later commands work on MiB A to B of the mapping only
 *   touch            writes every page
 *   huge, nohuge     madvise, through the C library; raw-huge through syscall()
 *   disable F        prctl(PR_SET_THP_DISABLE) with flags F
 *   lose-dontneed K, lose-free K, lose-rawfree K (by an inline system call), lose-unmap K
 *                    discards the first K KiB of each MiB, or unmaps them page by page
 *   pageout, cold    madvise
 *   unmap, remap     remap moves the mapping to another multiple of 2M
 *   smaps            prints AnonHugePages of the last mapping
 *   fork             a child goes on; the parent waits and ends with the child's exit code
 *   verify
 * Prints "ok" after each. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MIB (1ul << 20)
#define MOST 1024

/* One MiB of memory. */
struct unit {
    char *at;
    int touched;
    /* Bytes at the start of the unit that are discarded (they read as 0 or as before) or unmapped (they cannot be read). */
    size_t discarded, unmapped;
};
static struct unit units[MOST];
static int count, first, end;

static void die(const char *what) { fprintf(stderr, "sizes: %s: %s\n", what, strerror(errno)); exit(1); }

/* mmap by an inline system call, which the agent cannot intercept. */
static char *map_unheard(size_t len, long prot, long flags) {
    register long r10 __asm__("r10") = flags, r8 __asm__("r8") = -1, r9 __asm__("r9") = 0;
    long result;
    __asm__ volatile("syscall"
                     : "=a"(result)
                     : "a"(SYS_mmap), "D"(NULL), "S"(len), "d"(prot), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    if (result < 0 && result > -4096) {
        errno = (int)-result;
        return MAP_FAILED;
    }
    return (char *)result;
}

/* Maps `len` bytes at a multiple of 2M, and 1 MiB directly before them, in which no huge page fits. */
static char *map_aligned(size_t len, int unseen) {
    const int prot = PROT_READ | PROT_WRITE, flags = MAP_PRIVATE | MAP_ANONYMOUS;
    char *at = unseen ? map_unheard(len + 4 * MIB, prot, flags) : mmap(NULL, len + 4 * MIB, prot, flags, -1, 0);
    if (at == MAP_FAILED) die("mmap");
    char *start = (char *)(((uintptr_t)at + 4 * MIB - 1) & ~(2 * MIB - 1));
    munmap(at, start - at - MIB);
    munmap(start + len, at + 4 * MIB - start);
    return start;
}

static uint64_t word(struct unit *unit, size_t offset) { return (uint64_t)(unit - units + 1) * 0x9e3779b97f4a7c15ul ^ offset; }

static void touch(struct unit *unit) {
    for (size_t at = unit->unmapped; at < MIB; at += 512) *(uint64_t *)(unit->at + at) = word(unit, at);
    unit->touched = 1;
    unit->discarded = 0;
}

static void lose(struct unit *unit, const char *how, size_t len) {
    if (!strcmp(how, "unmap")) {
        for (size_t at = 0; at < len; at += 4096)
            if (munmap(unit->at + at, 4096)) die("munmap");
        unit->unmapped = len;
        return;
    }
    if (!strcmp(how, "rawfree")) {
        register long advice __asm__("rdx") = MADV_FREE;
        long failed;
        __asm__ volatile("syscall" : "=a"(failed) : "a"(SYS_madvise), "D"(unit->at), "S"(len), "r"(advice) : "rcx", "r11", "memory");
        if (failed) die("madvise");
    } else if (madvise(unit->at, len, strcmp(how, "free") ? MADV_DONTNEED : MADV_FREE)) {
        die("madvise");
    }
    unit->discarded = len;
}

static void verify(void) {
    for (struct unit *unit = units; unit < units + count; unit++)
        for (size_t at = unit->unmapped; unit->at && unit->touched && at < MIB; at += 512)
            if (*(uint64_t *)(unit->at + at) != word(unit, at) && (at >= unit->discarded || *(uint64_t *)(unit->at + at))) {
                fprintf(stderr, "sizes: MiB %ld is wrong at %zx\n", (long)(unit - units), at);
                exit(1);
            }
}

/* Whether one of the units from `from` on begins between the two addresses. */
static int is_among(int from, uintptr_t low, uintptr_t high) {
    for (struct unit *unit = units + from; unit < units + count; unit++)
        if ((uintptr_t)unit->at >= low && (uintptr_t)unit->at < high) return 1;
    return 0;
}

/* AnonHugePages of the units from `from` on, in MiB. No huge page lies across two mappings. */
static long anon_huge_mib(int from) {
    FILE *file = fopen("/proc/self/smaps", "r");
    char line[4096];
    unsigned long low, high;
    long kib, sum = 0;
    int counts = 0;
    if (!file) die("smaps");
    while (fgets(line, sizeof line, file)) {
        if (sscanf(line, "%lx-%lx ", &low, &high) == 2) counts = is_among(from, low, high);
        if (counts && sscanf(line, "AnonHugePages: %ld", &kib) == 1) sum += kib;
    }
    fclose(file);
    return sum / 1024;
}

int main(void) {
    char line[128], name[32];
    int base = 0;
    setvbuf(stdout, NULL, _IONBF, 0);
    printf("pid %d\n", getpid());
    while (fgets(line, sizeof line, stdin)) {
        long a = 0, b = 0;
        if (sscanf(line, "%31s %ld %ld", name, &a, &b) < 1) continue;
        char *at = units[first].at;
        size_t len = (end - first) * MIB;
        if (!strcmp(name, "map") || !strcmp(name, "map-unseen")) {
            char *start = map_aligned(a * MIB, !strcmp(name, "map-unseen"));
            if (!strcmp(name, "map")) {
                memset(start - MIB, 1, MIB);
                usleep(60000);
            }
            base = first = count;
            for (long i = 0; i < a; i++) units[count++].at = start + i * MIB;
            end = count;
        } else if (!strcmp(name, "part")) {
            first = base + a;
            end = base + b;
        } else if (!strcmp(name, "touch")) {
            for (int i = first; i < end; i++) touch(&units[i]);
        } else if (!strcmp(name, "verify")) {
            verify();
        } else if (!strcmp(name, "huge")) {
            if (madvise(at, len, MADV_HUGEPAGE)) die("madvise");
        } else if (!strcmp(name, "raw-huge")) {
            if (syscall(SYS_madvise, at, len, MADV_HUGEPAGE)) die("madvise");
        } else if (!strcmp(name, "nohuge")) {
            if (madvise(at, len, MADV_NOHUGEPAGE)) die("madvise");
        } else if (!strcmp(name, "disable")) {
            if (prctl(PR_SET_THP_DISABLE, 1, a, 0, 0)) die("prctl");
        } else if (!strncmp(name, "lose-", 5)) {
            for (int i = first; i < end; i++) lose(&units[i], name + 5, a << 10);
        } else if (!strcmp(name, "pageout")) {
            if (madvise(at, len, MADV_PAGEOUT)) die("madvise");
        } else if (!strcmp(name, "cold")) {
            if (madvise(at, len, MADV_COLD)) die("madvise");
        } else if (!strcmp(name, "unmap")) {
            if (munmap(at, len)) die("munmap");
            for (int i = first; i < end; i++) units[i].at = NULL;
        } else if (!strcmp(name, "remap")) {
            char *to = map_aligned(len, 0);
            if (mremap(at, len, len, MREMAP_MAYMOVE | MREMAP_FIXED, to) == MAP_FAILED) die("mremap");
            for (int i = first; i < end; i++) units[i].at = to + (i - first) * MIB;
        } else if (!strcmp(name, "smaps")) {
            printf("huge %ld\n", anon_huge_mib(base));
        } else if (!strcmp(name, "fork")) {
            pid_t child = fork();
            if (child < 0) die("fork");
            int status;
            if (child) {
                waitpid(child, &status, 0);
                return WEXITSTATUS(status);
            }
        } else {
            die(name);
        }
        printf("ok\n");
    }
    verify();
    /* The agent has time to count the last advice before the program ends. */
    usleep(20000);
    return 0;
}
