/* Purges as allocators do: discards parts of its 64K chunks with MADV_DONTNEED, reads other chunks, and uses the purged
 * parts again. Arguments: MiB and rounds. Verifies all it reads, and prints how many pages it has purged. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define PAGE 4096ul
#define CHUNK_PAGES 16ul
#define CHUNK (CHUNK_PAGES * PAGE)

/* A chunk: what its pages were filled with (0: purged), and which part is purged. */
struct chunk { uint32_t filled[CHUNK_PAGES]; unsigned first, end; };

static char *memory;
static struct chunk *chunks;
static uint64_t random_state = 88172645463325252ul;

static uint64_t chance(void) {
    random_state ^= random_state << 13;
    random_state ^= random_state >> 7;
    return random_state ^= random_state << 17;
}

static uint64_t word(uint32_t filled, unsigned index) { return filled ? (uint64_t)filled << 20 | (index * 2654435761u >> 20) : 0; }

static void fill(size_t chunk, unsigned page, uint32_t with) {
    uint64_t *words = (uint64_t *)(memory + chunk * CHUNK + page * PAGE);
    for (unsigned i = 0; i < PAGE / 8; i++) words[i] = word(with, i);
    chunks[chunk].filled[page] = with;
}

static void verify(size_t chunk, unsigned page) {
    uint64_t *words = (uint64_t *)(memory + chunk * CHUNK + page * PAGE);
    for (unsigned i = 0; i < PAGE / 8; i++)
        if (words[i] != word(chunks[chunk].filled[page], i)) {
            fprintf(stderr, "purge: page %u of chunk %zu is wrong at %u: %lx\n", page, chunk, i, (long)words[i]);
            exit(1);
        }
}

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    size_t len = strtoul(argv[1], NULL, 10) << 20, count = len / CHUNK, purged = 0;
    unsigned rounds = strtoul(argv[2], NULL, 10);
    char *at = mmap(NULL, len + CHUNK, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    chunks = calloc(count, sizeof *chunks);
    if (at == MAP_FAILED || !chunks) return 1;
    memory = (char *)(((uintptr_t)at + CHUNK - 1) & ~(CHUNK - 1));
    for (size_t chunk = 0; chunk < count; chunk++)
        for (unsigned page = 0; page < CHUNK_PAGES; page++) fill(chunk, page, chunk + 1);
    for (unsigned round = 1; round <= rounds; round++) {
        for (size_t chunk = 0; chunk < count; chunk++) {
            struct chunk *it = &chunks[chunk];
            for (unsigned page = 0; page < CHUNK_PAGES; page++) verify(chunk, page);
            if (chance() % 2) continue;
            it->first = chance() % CHUNK_PAGES;
            it->end = it->first + 1 + chance() % 8;
            if (it->end > CHUNK_PAGES) it->end = CHUNK_PAGES;
            if (madvise(memory + chunk * CHUNK + it->first * PAGE, (it->end - it->first) * PAGE, MADV_DONTNEED)) return 1;
            memset(it->filled + it->first, 0, (it->end - it->first) * sizeof *it->filled);
            purged += it->end - it->first;
            /* What was purged a hundred chunks ago is used again. */
            struct chunk *old = &chunks[(chunk + count - 100) % count];
            for (; old->first < old->end; old->first++) fill(old - chunks, old->first, round * 1000003 + chunk);
        }
    }
    for (size_t chunk = 0; chunk < count; chunk++)
        for (unsigned page = 0; page < CHUNK_PAGES; page++) verify(chunk, page);
    printf("%zu\n", purged);
    return 0;
}
