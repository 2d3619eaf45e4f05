/* A child destroys mappings, and checks its own memory. It may be stopped for that, but must never read wrong
   content; its parent must go on unharmed.

   destroys MIB HOW     all: unmaps every mapping except its code, data and stack. The others are about the largest
                        mapping, if it is as large as the agent's arena: discard: discards it all, end: unmaps its end,
                        which nobody uses yet, move: moves its start */
#include "checked.h"
#include <sys/syscall.h>
#include <sys/wait.h>

static struct { char *start; size_t len; } found[4096];

static inline long call(long number, long a, long b) {
    long result;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(a), "S"(b) : "rcx", "r11", "memory");
    return result;
}

__attribute__((noreturn)) static void unmap_all(void) {
    char line[512];
    size_t count = 0;
    FILE *maps = fopen("/proc/self/maps", "r");
    while (count < 4096 && fgets(line, sizeof line, maps)) {
        char *end;
        unsigned long start = strtoul(line, &end, 16), stop = strtoul(end + 1, NULL, 16);
        if (strstr(line, "destroys") || strstr(line, "[stack]") || strstr(line, "[v")) continue;
        found[count].start = (char *)start;
        found[count++].len = stop - start;
    }
    for (size_t index = 0; index < count; index++) call(SYS_munmap, (long)found[index].start, (long)found[index].len);
    struct timespec time = { 3, 0 };
    call(SYS_nanosleep, (long)&time, 0);
    for (;;) call(SYS_exit_group, 0, 0);
}

static char *largest(size_t *len) {
    char line[512], *found = NULL;
    FILE *maps = fopen("/proc/self/maps", "r");
    *len = 0;
    while (fgets(line, sizeof line, maps)) {
        char *end;
        unsigned long start = strtoul(line, &end, 16), stop = strtoul(end + 1, &end, 16);
        if (strncmp(end, " rw-p", 5) || stop - start <= *len) continue;
        found = (char *)start;
        *len = stop - start;
    }
    fclose(maps);
    return found;
}

static int destroy(const char *how) {
    size_t len;
    if (!strcmp(how, "all")) unmap_all();
    char *arena = largest(&len);
    if (len < 1024 * MIB) return 0;
    if (!strcmp(how, "discard")) return madvise(arena, len, MADV_DONTNEED);
    if (!strcmp(how, "end")) return munmap(arena + len - 16 * PAGE, 16 * PAGE);
    return mremap(arena, 16 * PAGE, 16 * PAGE, MREMAP_MAYMOVE | MREMAP_FIXED, arena - 64 * PAGE) == MAP_FAILED;
}

int main(int argc, char **argv) {
    (void)argc;
    const char *fault = NULL;
    prepare(strtoul(argv[1], NULL, 10));
    for (int number = 0; !fault && number < 3; number++) {
        int status;
        pid_t child = fork();
        if (child == 0) _exit(destroy(argv[2]) || !is_right());
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status) ? WTERMSIG(status) != 11 && WTERMSIG(status) != 9 : status) fault = "the child's end";
        if (!is_right()) fault = "the parent's memory";
    }
    return verdict(fault);
}
