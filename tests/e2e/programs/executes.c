// Executes itself in the way of ARGV[1] with an environment of two variables. The new program shows its environment, whether
// the library of ARGV[2] is loaded, and 96 MiB that it has filled and checked.
#define _GNU_SOURCE
#include "checked.h"
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <spawn.h>
#include <sys/syscall.h>
#include <sys/wait.h>

extern char **environ;
static char *self;

static int is_loaded(const char *name) {
    char line[4096];
    FILE *maps = fopen("/proc/self/maps", "r");
    int found = 0;
    while (fgets(line, sizeof line, maps))
        found |= strstr(line, name) != NULL;
    fclose(maps);
    return found;
}

static int show(int argc, char **argv) {
    for (char **variable = environ; *variable; variable++)
        puts(*variable);
    const char *preload = getenv("LD_PRELOAD");
    printf("%d arguments, %s\n", argc, !preload || is_loaded(strrchr(preload, '/')) ? "preloaded" : "not preloaded");
    if (atoi(argv[3]) > 0) {
        // Once more, with what it sees itself.
        char left[16];
        sprintf(left, "%d", atoi(argv[3]) - 1);
        fflush(stdout);
        execl("/proc/self/exe", self, "show", argv[2], left, NULL);
        return 3;
    }
    data = reserve(96, 1);
    fill(&data);
    printf("%zu wrong pages\n%s\n", wrong_pages(&data), is_loaded(argv[2]) ? "loaded" : "not loaded");
    return 0;
}

static void *from_thread(void *arguments) {
    char **argv = arguments;
    char *with[] = {"A=1", "B=two", NULL};
    execve(self, argv, with);
    return NULL;
}

static int child_of(pid_t pid) {
    int status;
    return waitpid(pid, &status, 0) == pid ? WEXITSTATUS(status) : 4;
}

int main(int argc, char **argv) {
    self = argv[0];
    const char *way = argv[1];
    if (strcmp(way, "show") == 0)
        return show(argc, argv);
    char *library = argv[2];
    char preload[4096] = "LD_PRELOAD=";
    char *show[] = {self, "show", library, strcmp(way, "again") == 0 ? "2" : "0", NULL};
    char *with[] = {"A=1", "B=two", NULL}, *with_preload[] = {"A=1", preload, "B=two", NULL}, *none[] = {NULL};
    char *many[4001] = {0};
    strcat(preload, argc > 3 ? argv[3] : "");
    for (int index = 0; index < 1500; index++)
        many[index] = "X=1";
    pid_t pid;
    char command[8192];
    snprintf(command, sizeof command, "%s show %s 0", self, library);
    if (strcmp(way, "execve") == 0 || strcmp(way, "again") == 0)
        execve(self, show, with);
    else if (strcmp(way, "none") == 0)
        execve(self, show, none);
    else if (strcmp(way, "null") == 0)
        execve(self, show, NULL);
    else if (strcmp(way, "many") == 0)
        execve(self, show, many);
    else if (strcmp(way, "preload") == 0)
        execve(self, show, with_preload);
    else if (strcmp(way, "missing") == 0) {
        if (execve("/nowhere/at/all", show, with) == -1 && errno == ENOENT && execve("/", show, with) == -1 &&
            errno == EACCES)
            execve(self, show, with);
    } else if (strcmp(way, "execle") == 0)
        execle(self, self, "show", library, "0", NULL, with);
    else if (strcmp(way, "execvpe") == 0)
        execvpe(self, show, with);
    else if (strcmp(way, "fexecve") == 0)
        fexecve(open(self, O_RDONLY | O_CLOEXEC), show, with);
    else if (strcmp(way, "execveat") == 0)
        syscall(SYS_execveat, AT_FDCWD, self, show, with, 0);
    else if (strcmp(way, "syscall") == 0)
        syscall(SYS_execve, self, show, with);
    else if (strcmp(way, "dlsym") == 0) {
        int (*function)(const char *, char **, char **) = dlsym(dlopen("libc.so.6", RTLD_NOW), "execve");
        function(self, show, with);
    } else if (strcmp(way, "thread") == 0) {
        pthread_t thread;
        pthread_create(&thread, NULL, from_thread, show);
        pthread_join(thread, NULL);
    } else if (strcmp(way, "spawn") == 0)
        return posix_spawn(&pid, self, NULL, NULL, show, with) ? 5 : child_of(pid);
    else if (strcmp(way, "spawnp") == 0)
        return posix_spawnp(&pid, self, NULL, NULL, show, with) ? 5 : child_of(pid);
    else if (strcmp(way, "spawn_missing") == 0)
        return posix_spawn(&pid, "/nowhere/at/all", NULL, NULL, show, with) != ENOENT ? 5
            : posix_spawn(&pid, self, NULL, NULL, show, with) ? 6 : child_of(pid);
    else if (strcmp(way, "vfork") == 0) {
        if ((pid = vfork()) == 0) {
            execve(self, show, with);
            _exit(7);
        }
        return child_of(pid);
    } else {
        // These take the program's own environment.
        clearenv();
        setenv("A", "1", 1);
        if (strcmp(way, "execv") == 0)
            execv(self, show);
        else if (strcmp(way, "execvp") == 0)
            execvp(self, show);
        else if (strcmp(way, "execl") == 0)
            execl(self, self, "show", library, "0", NULL);
        else if (strcmp(way, "execlp") == 0)
            execlp(self, self, "show", library, "0", NULL);
        else if (strcmp(way, "system") == 0)
            return system(command) ? 8 : 0;
        else if (strcmp(way, "popen") == 0) {
            FILE *output = popen(command, "r");
            while (fgets(command, sizeof command, output))
                fputs(command, stdout);
            return pclose(output) ? 9 : 0;
        }
    }
    return 2;
}
