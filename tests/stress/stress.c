// Stresses memory and verifies its content for some seconds. Each thread owns regions and at random writes, verifies,
// mremaps (grow, shrink, move, carve), unmaps and maps again, discards and protects them, and forks.
//
//     stress [-t SECONDS] [-n THREADS] [-m MIB] [-s SEED] [-f CHILDREN] [-x OPERATION]... [-c]
//
// -c is the canary: a bit is flipped now and then, and verification must find it.
// -x leaves an operation out (write, verify, grow, ..., see `names`), to find out which operation causes a failure.
//
// Every page has a tag that determines all its bytes; tag 0 means zeros. The program prints "ok" and exits with 0 if no
// page ever had wrong content. Otherwise it prints the place of the wrong content and exits with 1. With the same seed
// each thread performs the same operations, as long as the kernel returns the same addresses.
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, WORDS = PAGE / 8, REGIONS = 16, FRESH = 8, MOST_MOVES = 2000 };

enum op { WRITE, VERIFY, GROW, SHRINK, MOVE, CARVE, PUNCH, REPLACE, REMAP, DISCARD, HINT, PROTECT, HIDE, FORK, KINDS };
static const char *names[] = {"write", "verify", "grow", "shrink", "move", "carve", "punch", "replace", "remap", "discard", "hint", "protect", "hide", "fork"};
static unsigned weights[] = {60, 60, 6, 3, 4, 6, 3, 3, 2, 6, 4, 4, 2, 1};

struct region {
    char *base;
    size_t pages;
    uint64_t *tags; // room for `limit` pages, kept by the thread
};

struct thread {
    pthread_t id;
    unsigned number;
    uint64_t random, next_tag;
    size_t held, most; // pages
    struct region regions[REGIONS];
    pid_t children[2];
    unsigned moves, done[KINDS], refused[KINDS];
    enum op last;
    int pipe[2];
};

static unsigned seconds = 10, thread_count = 4, mib = 192, most_children = 2, is_canary;
static uint64_t seed;
static size_t region_limit; // pages
static struct timespec begin;
static _Thread_local sigjmp_buf after_fault;
static _Thread_local char *volatile expected_fault;

// ---- random numbers and patterns ----

static uint64_t mix(uint64_t x) {
    x ^= x >> 31;
    x *= 0x7fb5d329728ea185;
    x ^= x >> 27;
    x *= 0x81dadef4bc2dd44d;
    return x ^ x >> 33;
}

static uint64_t next(struct thread *t) { return mix(t->random += 0x9e3779b97f4a7c15); }
static size_t below(struct thread *t, size_t n) { return n ? next(t) % n : 0; }

// Of 32 tags, 8 make pages of one repeated word, 16 of words in runs, 7 with an eighth of noise, 1 of noise only.
static uint64_t word(uint64_t tag, unsigned i) {
    if (!tag) return 0;
    unsigned kind = tag % 32;
    uint64_t id = mix(tag);
    if (kind < 8) return id;
    if (kind < 24) return id + i / 64;
    if (kind < 31) return i < WORDS / 8 ? mix(id + i) : id;
    return mix(id + i);
}

// ---- reports ----

static void stop(void) {
    fflush(stdout);
    _exit(1);
}

static double elapsed(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec - begin.tv_sec + (now.tv_nsec - begin.tv_nsec) / 1e9;
}

static void wrong(struct thread *t, struct region *r, size_t page, unsigned i, const char *when) {
    uint64_t *at = (uint64_t *)(r->base + page * PAGE);
    printf("WRONG: seed %lu, thread %u, pid %d, %.2f s, %s after %s: address %p (region %p, page %zu of %zu), word %u is %#lx, expected %#lx (tag %lu)\n",
           seed, t->number, getpid(), elapsed(), when, names[t->last], (void *)(at + i), (void *)r->base, page, r->pages, i, at[i],
           word(r->tags[page], i), r->tags[page]);
    stop();
}

static void broken(struct thread *t, const char *what) {
    printf("WRONG: seed %lu, thread %u, pid %d, %.2f s: %s (errno %d, %s)\n", seed, t->number, getpid(), elapsed(), what, errno, strerror(errno));
    stop();
}

// ---- the contents ----

static void write_pages(struct thread *t, struct region *r, size_t from, size_t count) {
    for (size_t p = from; p < from + count; p++) {
        uint64_t tag = t->next_tag += 1 + (next(t) & 3);
        uint64_t *at = (uint64_t *)(r->base + p * PAGE);
        for (unsigned i = 0; i < WORDS; i++) at[i] = word(tag, i);
        r->tags[p] = tag;
    }
}

static void verify_pages(struct thread *t, struct region *r, size_t from, size_t count, const char *when) {
    for (size_t p = from; p < from + count; p++) {
        uint64_t *at = (uint64_t *)(r->base + p * PAGE), tag = r->tags[p];
        for (unsigned i = 0; i < WORDS; i++)
            if (at[i] != word(tag, i)) wrong(t, r, p, i, when);
    }
}

static void verify_all(struct thread *t, const char *when) {
    for (int i = 0; i < REGIONS; i++) verify_pages(t, &t->regions[i], 0, t->regions[i].pages, when);
}

static void zero_tags(struct region *r, size_t from, size_t count) { memset(r->tags + from, 0, count * 8); }

// Picks a random part of a region: often short, sometimes long, sometimes aligned to 64K.
static void pick_range(struct thread *t, struct region *r, size_t *from, size_t *count) {
    size_t most = below(t, 4) ? 16 : below(t, 3) ? 64 : 1024;
    *from = below(t, r->pages);
    if (below(t, 3) == 0) *from &= ~(size_t)15;
    *count = 1 + below(t, most);
    if (*count > r->pages - *from) *count = r->pages - *from;
}

// ---- the mappings ----

static char *map(void *at, size_t pages, int protection, int flags) {
    char *p = mmap(at, pages * PAGE, protection, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
    return p == MAP_FAILED ? 0 : p;
}

static void forget(struct thread *t, struct region *r) {
    t->held -= r->pages;
    r->base = 0;
    r->pages = 0;
}

// New regions take the first slots only, so that carved ones find room.
static struct region *free_region(struct thread *t, int most) {
    for (int i = 0; i < most; i++)
        if (!t->regions[i].pages) return &t->regions[i];
    return 0;
}

static void take(struct thread *t, struct region *r, char *base, size_t pages) {
    r->base = base;
    r->pages = pages;
    t->held += pages;
}

static void new_region(struct thread *t) {
    struct region *r = free_region(t, FRESH);
    size_t pages = 1 + below(t, below(t, 3) ? region_limit : 64);
    if (!r || t->held + pages > t->most) return;
    char *base = map(0, pages, PROT_READ | PROT_WRITE, 0);
    if (!base) return;
    take(t, r, base, pages);
    zero_tags(r, 0, pages);
    if (below(t, 4)) write_pages(t, r, 0, pages);
}

// Handles that [from, from+count) of the region is no longer mapped. Half of the time, maps zeros there again if the range
// is still free. Otherwise splits the region into the parts before and after the hole.
static void mend(struct thread *t, struct region *r, size_t from, size_t count) {
    char *hole = r->base + from * PAGE, *tail = hole + count * PAGE;
    size_t after = r->pages - from - count;
    if (below(t, 2) && map(hole, count, PROT_READ | PROT_WRITE, MAP_FIXED_NOREPLACE) == hole) {
        zero_tags(r, from, count);
        return;
    }
    uint64_t *tail_tags = r->tags + from + count;
    t->held -= count + after;
    r->pages = from;
    struct region *rest = from && after ? free_region(t, REGIONS) : 0;
    if (!from && after) { // only the tail is left
        memmove(r->tags, tail_tags, after * 8);
        take(t, r, tail, after);
    } else if (rest) {
        memcpy(rest->tags, tail_tags, after * 8);
        take(t, rest, tail, after);
    } else if (after && munmap(tail, after * PAGE)) {
        broken(t, "munmap of a tail");
    }
    if (!r->pages) r->base = 0;
}

// mremap refuses ranges of more than one mapping, also without foliomem; then nothing may have changed.
static int refused(struct thread *t, enum op op) {
    if (errno != EFAULT && errno != ENOMEM) broken(t, "mremap failed");
    t->refused[op]++;
    return 1;
}

static int grow(struct thread *t, struct region *r) {
    size_t more = 1 + below(t, 256);
    if (r->pages + more > region_limit || t->held + more > t->most) return 1;
    char *moved = mremap(r->base, r->pages * PAGE, (r->pages + more) * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return refused(t, GROW);
    r->base = moved;
    zero_tags(r, r->pages, more);
    r->pages += more;
    t->held += more;
    return 0;
}

static int shrink(struct thread *t, struct region *r) {
    if (r->pages < 2) return 1;
    size_t keep = 1 + below(t, r->pages - 1);
    if (mremap(r->base, r->pages * PAGE, keep * PAGE, 0) == MAP_FAILED) return refused(t, SHRINK);
    t->held -= r->pages - keep;
    r->pages = keep;
    return 0;
}

// Returns whether the region is one mapping. Operations split mappings, and mremap moves only one (since 6.17 several,
// unless they are registered with userfaultfd).
static int is_one_mapping(struct region *r) {
    FILE *maps = fopen("/proc/self/maps", "r");
    if (!maps) return 0;
    uintptr_t from, to, base = (uintptr_t)r->base;
    int found = 0;
    char line[512];
    while (!found && fgets(line, sizeof line, maps))
        found = sscanf(line, "%lx-%lx", &from, &to) == 2 && from <= base && base + r->pages * PAGE <= to;
    fclose(maps);
    return found;
}

// Moves the region to a chosen target. If mremap fails, the kernel may or may not have unmapped the target, so the target
// is never unmapped here.
static int move(struct thread *t, struct region *r) {
    if (t->moves++ > MOST_MOVES || !is_one_mapping(r)) return 1;
    char *place = map(0, r->pages + 512, PROT_NONE, MAP_NORESERVE);
    if (!place) return refused(t, MOVE);
    size_t shift = below(t, 2) ? below(t, 512) : 0; // another place in the 64K and 2M grid, or the same
    char *target = place + shift * PAGE;
    size_t after = 512 - shift;
    if (shift && munmap(place, shift * PAGE)) broken(t, "munmap before the target");
    if (after && munmap(target + r->pages * PAGE, after * PAGE)) broken(t, "munmap after the target");
    if (mremap(r->base, r->pages * PAGE, r->pages * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, target) == MAP_FAILED) {
        return refused(t, MOVE);
    }
    r->base = target;
    return 0;
}

// A part of the region moves away and becomes a region of its own.
static int carve(struct thread *t, struct region *r, size_t from, size_t count) {
    struct region *own = free_region(t, REGIONS);
    if (!own || from + count == r->pages || t->held + 1 > t->most) return 1;
    char *moved = mremap(r->base + from * PAGE, count * PAGE, (count + 1) * PAGE, MREMAP_MAYMOVE);
    if (moved == MAP_FAILED) return refused(t, CARVE);
    memcpy(own->tags, r->tags + from, count * 8);
    own->tags[count] = 0;
    take(t, own, moved, count + 1);
    mend(t, r, from, count);
    return 0;
}

static int punch(struct thread *t, struct region *r, size_t from, size_t count) {
    if (munmap(r->base + from * PAGE, count * PAGE)) broken(t, "munmap of a part");
    mend(t, r, from, count);
    return 0;
}

static int replace(struct thread *t, struct region *r, size_t from, size_t count) {
    if (!map(r->base + from * PAGE, count, PROT_READ | PROT_WRITE, MAP_FIXED)) broken(t, "mmap over a part");
    zero_tags(r, from, count);
    return 0;
}

static int remap(struct thread *t, struct region *r) {
    if (munmap(r->base, r->pages * PAGE)) broken(t, "munmap of a region");
    forget(t, r);
    new_region(t);
    return 0;
}

static int discard(struct thread *t, struct region *r, size_t from, size_t count) {
    if (madvise(r->base + from * PAGE, count * PAGE, MADV_DONTNEED)) broken(t, "madvise(MADV_DONTNEED)");
    zero_tags(r, from, count);
    return 0;
}

static int hint(struct thread *t, struct region *r, size_t from, size_t count) {
    static const int advice[] = {MADV_WILLNEED, MADV_COLD, MADV_PAGEOUT, MADV_NORMAL, MADV_RANDOM, MADV_SEQUENTIAL, MADV_HUGEPAGE, MADV_NOHUGEPAGE};
    if (below(t, 4) == 0) from = 0, count = r->pages; // a part only makes more mappings of one
    madvise(r->base + from * PAGE, count * PAGE, advice[below(t, sizeof advice / sizeof *advice)]); // may be refused
    return 0;
}

// ---- protection ----

static void on_fault(int number, siginfo_t *info, void *context) {
    (void)context;
    if (info->si_addr == expected_fault) siglongjmp(after_fault, 1);
    printf("WRONG: seed %lu, pid %d, %.2f s: signal %d, code %d at %p\n", seed, getpid(), elapsed(), number, info->si_code, info->si_addr);
    stop();
}

// Checks that a write (or, with `reading`, a read) at `at` faults.
static void must_fault(struct thread *t, char *at, int reading) {
    expected_fault = at;
    if (!sigsetjmp(after_fault, 1)) {
        if (reading) (void)*(volatile char *)at;
        else *(volatile char *)at = 1;
        expected_fault = 0;
        broken(t, reading ? "a hidden page could be read" : "a protected page could be written");
    }
    expected_fault = 0;
}

static int protect(struct thread *t, struct region *r, size_t from, size_t count) {
    char *at = r->base + from * PAGE;
    if (mprotect(at, count * PAGE, PROT_READ)) return refused(t, PROTECT);
    must_fault(t, at + below(t, count * PAGE), 0);
    verify_pages(t, r, from, count, "while protected");
    must_fault(t, at + below(t, count * PAGE), 0);
    if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE)) broken(t, "mprotect back");
    return 0;
}

static int hide(struct thread *t, struct region *r, size_t from, size_t count) {
    char *at = r->base + from * PAGE;
    if (mprotect(at, count * PAGE, PROT_NONE)) return refused(t, HIDE);
    must_fault(t, at + below(t, count * PAGE), 1);
    if (write(t->pipe[1], at + below(t, count) * PAGE, 8) != -1 || errno != EFAULT) broken(t, "write from hidden memory did not give EFAULT");
    if (mprotect(at, count * PAGE, PROT_READ | PROT_WRITE)) broken(t, "mprotect back");
    verify_pages(t, r, from, count, "after it was hidden");
    return 0;
}

// ---- fork ----

static int reap(struct thread *t, int block) {
    int left = 0;
    for (int i = 0; i < 2; i++) {
        int status;
        if (!t->children[i]) continue;
        pid_t got = waitpid(t->children[i], &status, block ? 0 : WNOHANG);
        if (got == 0) {
            left++;
            continue;
        }
        if (got != t->children[i] || status) {
            printf("WRONG: seed %lu, thread %u: child %d ended with %#x\n", seed, t->number, t->children[i], status);
            stop();
        }
        t->children[i] = 0;
    }
    return left;
}

// Verifies in the child that its memory is as at the fork, whatever the parent writes; then the child writes its own.
static void child(struct thread *t) {
    alarm(60);
    verify_all(t, "in the child");
    for (int i = 0; i < REGIONS; i++)
        if (t->regions[i].pages) {
            size_t from, count;
            pick_range(t, &t->regions[i], &from, &count);
            if (below(t, 2)) write_pages(t, &t->regions[i], from, count);
            else discard(t, &t->regions[i], from, count);
        }
    verify_all(t, "in the child, changed");
    _exit(0);
}

static int fork_child(struct thread *t) {
    static atomic_uint alive;
    static _Thread_local unsigned mine;
    unsigned left = reap(t, 0);
    atomic_fetch_sub(&alive, mine - left);
    mine = left;
    if (left == 2 || atomic_load(&alive) >= most_children) return 1;
    pid_t pid = fork();
    if (pid < 0) broken(t, "fork");
    if (pid == 0) child(t);
    t->children[t->children[0] ? 1 : 0] = pid;
    mine++;
    atomic_fetch_add(&alive, 1);
    return 0;
}

// ---- a thread's life ----

static enum op pick_op(struct thread *t) {
    unsigned all = 0;
    for (int i = 0; i < KINDS; i++) all += weights[i];
    unsigned at = below(t, all);
    for (int i = 0;; i++) {
        if (at < weights[i]) return i;
        at -= weights[i];
    }
}

static int step(struct thread *t, struct region *r, enum op op) {
    size_t from, count;
    pick_range(t, r, &from, &count);
    switch (op) {
    case WRITE: write_pages(t, r, from, count); return 0;
    case VERIFY: verify_pages(t, r, from, count, "verify"); return 0;
    case GROW: return grow(t, r);
    case SHRINK: return shrink(t, r);
    case MOVE: return move(t, r);
    case CARVE: return carve(t, r, from, count);
    case PUNCH: return punch(t, r, from, count);
    case REPLACE: return replace(t, r, from, count);
    case REMAP: return remap(t, r);
    case DISCARD: return discard(t, r, from, count);
    case HINT: return hint(t, r, from, count);
    case PROTECT: return protect(t, r, from, count);
    case HIDE: return hide(t, r, from, count);
    case FORK: return fork_child(t);
    default: abort();
    }
}

// Flips one bit of a page, which verification must find.
static void flip(struct thread *t) {
    struct region *r = &t->regions[below(t, REGIONS)];
    if (r->pages) r->base[below(t, r->pages * PAGE)] ^= 1 << below(t, 8);
}

static void *live(void *arg) {
    struct thread *t = arg;
    for (unsigned turn = 0; elapsed() < seconds; turn++) {
        if (t->held < t->most / 4 * 3 || turn % 64 == 0) new_region(t);
        struct region *r = &t->regions[below(t, REGIONS)];
        if (!r->pages) continue;
        enum op op = pick_op(t);
        if (!step(t, r, op)) t->done[op]++;
        t->last = op;
        if (is_canary && elapsed() > seconds / 2.0 && turn % 64 == 0) flip(t);
        if (turn % 4096 == 4095) verify_all(t, "full check");
    }
    reap(t, 1);
    while (is_canary && t->number == 0) flip(t), verify_all(t, "canary");
    verify_all(t, "last check");
    return 0;
}

static void set_up(struct thread *t, unsigned number) {
    t->number = number;
    t->random = mix(seed + number * 1000003);
    t->next_tag = (uint64_t)(number + 1) << 40;
    t->most = ((size_t)mib << 8) / thread_count;
    if (pipe(t->pipe)) broken(t, "pipe");
    for (int i = 0; i < REGIONS; i++)
        if (!(t->regions[i].tags = malloc((region_limit + 2) * 8))) broken(t, "malloc");
}

static void summary(struct thread *threads) {
    for (int op = 0; op < KINDS; op++) {
        unsigned done = 0, no = 0;
        for (unsigned i = 0; i < thread_count; i++) {
            done += threads[i].done[op];
            no += threads[i].refused[op];
        }
        printf("%s %u%s", names[op], done, no ? "" : op + 1 < KINDS ? ", " : "\n");
        if (no) printf(" (refused %u)%s", no, op + 1 < KINDS ? ", " : "\n");
    }
}

static int leave_out(const char *name) {
    for (int op = 0; op < KINDS; op++)
        if (!strcmp(name, names[op])) {
            weights[op] = 0;
            return 1;
        }
    return 0;
}

int main(int argc, char **argv) {
    seed = (uint64_t)time(0) * 1000 + getpid() % 1000;
    for (int option; (option = getopt(argc, argv, "t:n:m:s:f:x:c")) != -1;) {
        uint64_t value = optarg ? strtoull(optarg, 0, 10) : 0;
        if (option == 't') seconds = value;
        else if (option == 'n') thread_count = value;
        else if (option == 'm') mib = value;
        else if (option == 's') seed = value;
        else if (option == 'f') most_children = value;
        else if (option == 'c') is_canary = 1;
        else if (option == 'x' && leave_out(optarg)) continue;
        else return 2;
    }
    if (!thread_count || mib < thread_count) return 2;
    region_limit = ((size_t)mib << 8) / thread_count / 3;
    printf("seed %lu, %u s, %u threads, %u MiB, %u children\n", seed, seconds, thread_count, mib, most_children);
    fflush(stdout);
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, 0);
    sigaction(SIGBUS, &action, 0);
    clock_gettime(CLOCK_MONOTONIC, &begin);
    struct thread *threads = calloc(thread_count, sizeof *threads);
    for (unsigned i = 0; i < thread_count; i++) set_up(&threads[i], i);
    for (unsigned i = 0; i < thread_count; i++)
        if (pthread_create(&threads[i].id, 0, live, &threads[i])) broken(&threads[i], "pthread_create");
    for (unsigned i = 0; i < thread_count; i++) pthread_join(threads[i].id, 0);
    summary(threads);
    printf("ok\n");
    return 0;
}
