// A fork storm: ARGV[2] short children, one after the other, of a parent of ARGV[1] MiB. Each child checks two words, writes
// one and ends; the parent writes to a page at random after each, and checks everything in the end.
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

enum { PAGE_WORDS = 512 };

static unsigned long expected(size_t page, int word) { return page + (unsigned long)(word >> 4); }

int main(int count, char **arguments) {
    if (count != 3)
        return 2;
    size_t pages = strtoul(arguments[1], NULL, 10) << 8;
    unsigned long children = strtoul(arguments[2], NULL, 10);
    unsigned long *memory =
        mmap(NULL, pages * sizeof(long[PAGE_WORDS]), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED)
        return 3;
    for (size_t page = 0; page < pages; page++)
        for (int word = 0; word < PAGE_WORDS; word++)
            memory[page * PAGE_WORDS + word] = expected(page, word);
    unsigned long random = 1;
    for (unsigned long child = 0; child < children; child++) {
        pid_t pid = fork();
        if (pid == 0) {
            size_t page = child * 7919 % pages;
            unsigned long *first = memory + page * PAGE_WORDS;
            if (first[0] != expected(page, 0) || first[PAGE_WORDS - 1] != expected(page, PAGE_WORDS - 1))
                _exit(1);
            first[0] = ~0ul;
            _exit(first[0] != ~0ul);
        }
        int status;
        if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0)
            return 4;
        random = random * 6364136223846793005ul + 1442695040888963407ul;
        size_t page = (random >> 33) % pages;
        memory[page * PAGE_WORDS] = expected(page, 0);
    }
    for (size_t page = 0; page < pages; page++)
        for (int word = 0; word < PAGE_WORDS; word++)
            if (memory[page * PAGE_WORDS + word] != expected(page, word))
                return 5;
    printf("%lu children of %zu pages\n", children, pages);
    return 0;
}
