/* Forks children, one after the other, each of which looks at its memory and ends by HOW.   many HOW COUNT MIB
 * Prints "ready" after a tenth of them and "done" after all, and waits for a byte on stdin each time. */
#include "checked.h"
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>

static const char *how;

static void end(int code) {
    if (!strcmp(how, "killed") && code == 0) kill(getpid(), SIGKILL);
    syscall(!strcmp(how, "raw") ? SYS_exit : SYS_exit_group, code);
}

static int run_children(int count) {
    int wrong = 0;
    for (int index = 0; index < count; index++) {
        pid_t child = fork();
        if (child == 0) end(data.at[(index % data.pages) * WORDS] != word(&data, index % data.pages, 0));
        int status = -1;
        wrong += child < 0 || waitpid(child, &status, 0) != child || (status != 0 && status != SIGKILL);
    }
    return wrong;
}

static int pause_at(const char *where) {
    char byte;
    printf("%s\n", where);
    fflush(stdout);
    return read(0, &byte, 1) != 1;
}

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    how = argv[1];
    int count = atoi(argv[2]);
    prepare(atoi(argv[3]));
    int wrong = run_children(count / 10);
    wrong += pause_at("ready");
    wrong += run_children(count - count / 10);
    wrong += pause_at("done");
    return verdict(wrong ? "a child" : is_right() ? NULL : "memory");
}
