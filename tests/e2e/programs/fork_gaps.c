/* Children of a program, of whose memory only a few pages of each 2 MiB are resident: each child has all of it. The kernel may
 * make huge pages of such memory in the child (khugepaged), and would fill the gaps with zeros.
 * Usage: fork_gaps MIB FORKS */
#include "checked.h"
#include <sys/wait.h>

#define HUGE_PAGES (512)

int main(int argc, char **argv) {
    if (argc != 3) return 2;
    data = reserve(strtoul(argv[1], NULL, 0), 1);
    madvise(data.at, data.pages * PAGE, MADV_HUGEPAGE);
    fill(&data);
    for (int round = 0, forks = atoi(argv[2]); round < forks; round++) {
        for (size_t page = round * 7 % HUGE_PAGES; page < data.pages; page += HUGE_PAGES) {
            volatile uint64_t *resident = data.at + page * WORDS;
            *resident = *resident;
        }
        pid_t child = fork();
        if (child == 0) {
            for (size_t page = 0; page < data.pages; page += 37)
                if (data.at[page * WORDS + 1] != word(&data, page, 1)) _exit(1);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child) return 2;
        if (status) return verdict("a child's memory");
    }
    return verdict(wrong_pages(&data) ? "the parent's memory" : NULL);
}
