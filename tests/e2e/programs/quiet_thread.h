// Threads that do not touch their control blocks for a while before they end, and a join with a timeout.
#ifndef QUIET_THREAD_H
#define QUIET_THREAD_H
#include <errno.h>
#include <pthread.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <time.h>

static long call(long number, const void *argument) {
    long result;
    register long second __asm__("rsi") = 0;
    __asm__ volatile("syscall" : "=a"(result) : "a"(number), "D"(argument), "r"(second) : "rcx", "r11", "memory");
    return result;
}

// The calling thread sleeps and ends. C library functions would touch its control block (errno, the stack protector), so
// it calls none.
static void *end_quietly(const struct timespec *after) {
    call(SYS_nanosleep, after);
    call(SYS_exit, 0);
    return NULL;
}

// Returns whether the thread ends within 20 seconds.
static int has_ended(pthread_t thread) {
    struct timespec until;
    clock_gettime(CLOCK_REALTIME, &until);
    until.tv_sec += 20;
    return pthread_timedjoin_np(thread, NULL, &until) != ETIMEDOUT;
}
#endif
