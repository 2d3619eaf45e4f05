/* A child unmaps every mapping except its code, data and stack; its parent must go on unharmed.   unmaps MIB */
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
        if (strstr(line, "unmaps") || strstr(line, "[stack]") || strstr(line, "[v")) continue;
        found[count].start = (char *)start;
        found[count++].len = stop - start;
    }
    for (size_t index = 0; index < count; index++) call(SYS_munmap, (long)found[index].start, (long)found[index].len);
    struct timespec time = { 3, 0 };
    call(SYS_nanosleep, (long)&time, 0);
    for (;;) call(SYS_exit_group, 0, 0);
}

int main(int argc, char **argv) {
    (void)argc;
    const char *fault = NULL;
    prepare(strtoul(argv[1], NULL, 10));
    for (int number = 0; !fault && number < 2; number++) {
        int status;
        pid_t child = fork();
        if (child == 0) unmap_all();
        waitpid(child, &status, 0);
        if (WIFSIGNALED(status) ? WTERMSIG(status) != 11 && WTERMSIG(status) != 9 : status) fault = "the child's end";
        if (!is_right()) fault = "the parent's memory";
    }
    return verdict(fault);
}
