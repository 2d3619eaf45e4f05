// Makes system calls inline, so that the agent cannot intercept them in the C library. With -DLIBRARY the code is in the
// library $INLINE_CALLS, which the first call loads, and not in the program.
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef LIBRARY
static long inline_call(long number, long a, long b, long c, long d, long e, long f) {
    static long (*made_there)(long, long, long, long, long, long, long);
    if (!made_there) {
        void *library = dlopen(getenv("INLINE_CALLS"), RTLD_NOW);
        if (library) *(void **)&made_there = dlsym(library, "inline_call");
        if (!made_there) {
            printf("%s\n", dlerror());
            exit(2);
        }
    }
    return made_there(number, a, b, c, d, e, f);
}
#else
#ifndef HERE
#define HERE static
#endif
HERE long inline_call(long number, long a, long b, long c, long d, long e, long f) {
    long result;
    register long r10 __asm__("r10") = d, r8 __asm__("r8") = e, r9 __asm__("r9") = f;
    __asm__ volatile("syscall" : "=a"(result) : "0"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9)
                     : "rcx", "r11", "memory");
    return result;
}
#endif
