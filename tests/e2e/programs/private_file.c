// A private mapping of a file, written and verified: `private_file FILE`.
#include <fcntl.h>
#include <stdio.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

int main(int count, char **arguments) {
    struct stat about;
    int file = count > 1 ? open(arguments[1], O_RDONLY) : -1;
    if (file < 0 || fstat(file, &about)) return 2;
    unsigned *words = mmap(NULL, about.st_size, PROT_READ | PROT_WRITE, MAP_PRIVATE, file, 0);
    if (words == MAP_FAILED) return 3;
    unsigned long wrong = 0, all = about.st_size / sizeof *words;
    for (unsigned long i = 0; i < all; i++) words[i] = (unsigned)(i / 3);
    usleep(500000);
    for (unsigned long i = 0; i < all; i++) wrong += words[i] != (unsigned)(i / 3);
    printf("wrong %lu\n", wrong);
    return wrong != 0;
}
