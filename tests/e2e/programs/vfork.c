// vfork, posix_spawn, clone and exec of itself, beside ARGV[1] MiB of memory that is checked after each.
#define _GNU_SOURCE
#include <spawn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;
static uint64_t *data;
static size_t words;

static void fill(uint64_t tag) {
    for (size_t i = 0; i < words; i++) data[i] = tag * 1000003 + i / 64;
}

static void check(uint64_t tag, const char *when) {
    for (size_t i = 0; i < words; i++)
        if (data[i] != tag * 1000003 + i / 64) {
            printf("WRONG: %s, word %zu\n", when, i);
            exit(9);
        }
}

static void join(pid_t pid, int wanted) {
    int status;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || !WIFEXITED(status) || WEXITSTATUS(status) != wanted) {
        printf("WRONG: child %d ended with %#x\n", pid, status);
        exit(8);
    }
}

int main(int argc, char **argv) {
    words = strtoul(argv[1], 0, 10) << 17;
    data = malloc(words * 8);
    uint64_t sum = 0;
    if (argc > 2) { // the program that was exec'd: memory of its own, from nothing
        fill(77);
        check(77, "after exec");
        printf("executed %s\n", argv[2]);
        return 5;
    }
    for (int turn = 0; turn < 3; turn++) {
        fill(turn);
        pid_t pid = vfork();
        if (pid == 0) {
            data[turn] += 0; // the parent's memory, written by the child
            execl("/bin/true", "true", (char *)0);
            _exit(127);
        }
        join(pid, 0);
        check(turn, "after vfork and exec");
        pid = vfork();
        if (pid == 0) _exit(data[words - 1] == turn * 1000003ull + (words - 1) / 64 ? 3 : 4);
        join(pid, 3);
        check(turn, "after vfork and _exit");
        char *false_args[] = {"false", 0};
        if (posix_spawn(&pid, "/bin/false", 0, 0, false_args, environ)) return 7;
        join(pid, 1);
        check(turn, "after posix_spawn");
        char size[32];
        snprintf(size, sizeof size, "%zu", words >> 18);
        pid = fork();
        if (pid == 0) {
            check(turn, "in the child before exec");
            fflush(stdout);
            execl("/proc/self/exe", argv[0], size, "itself", (char *)0);
            _exit(127);
        }
        join(pid, 5);
        check(turn, "after fork and exec");
        sum = sum * 31 + data[words / 3];
    }
    printf("checksum %lu\n", sum);
    return 0;
}
