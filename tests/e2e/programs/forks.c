/* Forks children, one after the other, each of which looks at its memory, for some seconds.   forks MIB SECONDS
 * Prints "ready" before the first one. */
#include "checked.h"
#include <sys/wait.h>
#include <time.h>

int main(int argc, char **argv) {
    if (argc < 3) return 2;
    prepare(atoi(argv[1]));
    printf("ready\n");
    fflush(stdout);
    time_t end = time(NULL) + atoi(argv[2]);
    for (size_t page = 0; time(NULL) < end; page = (page + 1) % data.pages) {
        pid_t child = fork();
        if (child == 0) _exit(data.at[page * WORDS] != word(&data, page, 0));
        int status = -1;
        if (child < 0 || waitpid(child, &status, 0) != child || status != 0) return verdict("a child");
    }
    return verdict(is_right() ? NULL : "memory");
}
