// The parent watches the states of children that never sleep. Tools wait until a child is in state
// S to know that it sleeps in its own call, so a child must not look so before fork has returned.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

int main(int, char **argv)
{
	int children = atoi(argv[1]), sleeping = 0;
	volatile int *runs = mmap(0, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	for (int child = 1; child <= children; child++) {
		char path[64], stat[256];
		pid_t pid = fork();
		if (!pid) {
			*runs = child;
			for (;;)
				;
		}
		snprintf(path, sizeof path, "/proc/%d/stat", pid);
		int has_slept = 0;
		while (*runs != child) {
			int file = open(path, O_RDONLY);
			ssize_t length = read(file, stat, sizeof stat - 1);
			close(file);
			stat[length > 0 ? length : 0] = 0;
			char *name_end = strrchr(stat, ')');
			has_slept |= name_end && name_end[2] == 'S';
		}
		kill(pid, SIGKILL);
		waitpid(pid, NULL, 0);
		sleeping += has_slept;
	}
	int is_rare = sleeping <= children / 8;
	printf("%s of the children slept inside fork\n", is_rare ? "hardly any" : "many");
	return !is_rare;
}
