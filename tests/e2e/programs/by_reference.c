// Hands memory to the kernel by reference (vmsplice, zero copy) and does not change it. After memory pressure has swapped
// everything out, a reader must still get the content. The agent cannot intercept the calls, because they are inline.
// Usage: by_reference vmsplice|fifo|tee|child|onward|zerocopy|sendzc|fixed
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include "inline_call.h"

#define PAGE 4096UL
#define LENT_PAGES 256UL
// The first round begins before anything is swapped out, the second one after.
#define ROUNDS 2
#define PRESSURE_PAGES (72UL << 8)
#ifndef MSG_ZEROCOPY
#define MSG_ZEROCOPY 0x4000000
#endif

static void check(int is_right, const char *what) {
    if (!is_right) {
        printf("%s failed: %s\n", what, strerror(errno));
        exit(2);
    }
}

static uint64_t word(uint64_t page, uint64_t salt, unsigned index) {
    return ((page + 1) * 0x9E3779B97F4A7C15ull ^ salt * 0xD1B54A32D192ED03ull) + (index & 15);
}

static void fill(char *at, size_t pages, uint64_t salt) {
    for (size_t page = 0; page < pages; page++)
        for (unsigned index = 0; index < PAGE / 8; index++)
            ((volatile uint64_t *)(at + page * PAGE))[index] = word(page, salt, index);
}

static size_t wrong_pages(const char *at, size_t pages, uint64_t salt) {
    size_t wrong = 0;
    for (size_t page = 0; page < pages; page++) {
        int is_wrong = 0;
        for (unsigned index = 0; index < PAGE / 8; index++)
            is_wrong |= ((const volatile uint64_t *)(at + page * PAGE))[index] != word(page, salt, index);
        wrong += is_wrong;
    }
    return wrong;
}

static char *map(size_t pages) {
    char *at = mmap(NULL, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    check(at != MAP_FAILED, "mmap");
    return at;
}

// Writes twice the limit, twice, so that older pages are swapped out and their frames reused.
static void press(void) {
    static char *at;
    if (!at) at = map(PRESSURE_PAGES);
    for (uint64_t salt = 90; salt < 92; salt++) fill(at, PRESSURE_PAGES, salt);
}

static size_t read_all(int from, char *to, size_t bytes) {
    size_t have = 0;
    while (have < bytes) {
        ssize_t got = read(from, to + have, bytes - have);
        if (got <= 0) break;
        have += got;
    }
    return have;
}

static void lend_to(int pipe_end, char *at, size_t bytes) {
    while (bytes > 0) {
        struct iovec vector = { at, bytes };
        long lent = inline_call(SYS_vmsplice, pipe_end, (long)&vector, 1, 0, 0, 0);
        check(lent > 0, "vmsplice");
        at += lent;
        bytes -= lent;
    }
}

static void make_pipe(int ends[2]) {
    check(inline_call(SYS_pipe2, (long)ends, 0, 0, 0, 0, 0) == 0, "pipe");
    check(fcntl(ends[1], F_SETPIPE_SZ, LENT_PAGES * PAGE) > 0, "F_SETPIPE_SZ");
}

static void make_fifo(int ends[2]) {
    char directory[] = "/tmp/by-reference-XXXXXX", path[64];
    check(mkdtemp(directory) != NULL, "mkdtemp");
    snprintf(path, sizeof path, "%s/pipe", directory);
    check(mkfifo(path, 0600) == 0, "mkfifo");
    ends[0] = open(path, O_RDONLY | O_NONBLOCK);
    ends[1] = open(path, O_WRONLY);
    check(ends[0] >= 0 && ends[1] >= 0 && fcntl(ends[0], F_SETFL, 0) == 0, "open");
    check(fcntl(ends[1], F_SETPIPE_SZ, LENT_PAGES * PAGE) > 0, "F_SETPIPE_SZ");
    unlink(path);
    rmdir(directory);
}

// Returns the number of pages that have wrong content after they went through a pipe.
static size_t through_pipe(const char *how, char *at, uint64_t salt) {
    int ends[2], others[2] = { -1, -1 };
    if (!strcmp(how, "fifo")) make_fifo(ends); else make_pipe(ends);
    lend_to(ends[1], at, LENT_PAGES * PAGE);
    if (!strcmp(how, "tee")) {
        make_pipe(others);
        check(tee(ends[0], others[1], LENT_PAGES * PAGE, 0) == (ssize_t)(LENT_PAGES * PAGE), "tee");
    }
    press();
    char *copy = map(LENT_PAGES);
    size_t wrong = 0;
    for (int *pipe_ends = ends; pipe_ends[0] >= 0; pipe_ends = pipe_ends == ends ? others : (int[]){ -1 }) {
        if (read_all(pipe_ends[0], copy, LENT_PAGES * PAGE) != LENT_PAGES * PAGE) wrong++;
        wrong += wrong_pages(copy, LENT_PAGES, salt);
        close(pipe_ends[0]);
        close(pipe_ends[1]);
    }
    munmap(copy, LENT_PAGES * PAGE);
    return wrong;
}

// A child reads the pipe only after memory pressure, and the parent has closed its own read end. With `onward` the child
// first moves the pages into a second pipe by splice(2).
static size_t through_child(int onward, char *at, uint64_t salt) {
    int ends[2], go[2];
    make_pipe(ends);
    check(pipe(go) == 0, "pipe");
    pid_t child = fork();
    check(child >= 0, "fork");
    if (child == 0) {
        close(ends[1]);
        close(go[1]);
        int from = ends[0], others[2];
        if (onward) {
            make_pipe(others);
            for (size_t have = 0; have < LENT_PAGES * PAGE;) {
                ssize_t got = splice(ends[0], NULL, others[1], NULL, LENT_PAGES * PAGE - have, 0);
                check(got > 0, "splice");
                have += got;
            }
            from = others[0];
        }
        char start;
        if (read(go[0], &start, 1) < 0) _exit(99);
        char *copy = map(LENT_PAGES);
        size_t have = read_all(from, copy, LENT_PAGES * PAGE);
        size_t wrong = wrong_pages(copy, LENT_PAGES, salt) + (have != LENT_PAGES * PAGE);
        _exit(wrong > 90 ? 90 : wrong);
    }
    close(ends[0]);
    close(go[0]);
    // New memory, which the child does not share.
    munmap(at, LENT_PAGES * PAGE);
    check(mmap(at, LENT_PAGES * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == at, "mmap");
    fill(at, LENT_PAGES, salt);
    lend_to(ends[1], at, LENT_PAGES * PAGE);
    close(ends[1]);
    press();
    close(go[1]);
    int status;
    check(waitpid(child, &status, 0) == child, "waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 95;
}

static void connect_pair(int *sender, int *receiver) {
    int listener = socket(AF_INET, SOCK_STREAM, 0), bytes = 4096;
    struct sockaddr_in address = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
    socklen_t len = sizeof address;
    check(listener >= 0 && !setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &bytes, sizeof bytes), "socket");
    check(!bind(listener, (void *)&address, len) && !listen(listener, 1), "listen");
    check(!getsockname(listener, (void *)&address, &len), "getsockname");
    *sender = socket(AF_INET, SOCK_STREAM, 0);
    bytes = 4 << 20;
    setsockopt(*sender, SOL_SOCKET, SO_SNDBUFFORCE, &bytes, sizeof bytes);
    check(!connect(*sender, (void *)&address, len), "connect");
    *receiver = accept(listener, NULL, NULL);
    check(*receiver >= 0, "accept");
    close(listener);
}

// The kernel's ABI, as far as it is used here.
struct sqe { uint8_t opcode, flags; uint16_t ioprio; int32_t fd; uint64_t off, addr; uint32_t len, msg_flags; uint64_t user_data; uint16_t buf_index, personality; int32_t file_index; uint64_t pad[2]; };
struct sq_offsets { uint32_t head, tail, mask, entries, flags, dropped, array, resv; uint64_t user_addr; };
struct cq_offsets { uint32_t head, tail, mask, entries, overflow, cqes, flags, resv; uint64_t user_addr; };
struct ring_params { uint32_t sq_entries, cq_entries, flags, cpu, idle, features, wq_fd, resv[3]; struct sq_offsets sq; struct cq_offsets cq; };
#define OP_SEND_ZC 47
#define SENT_FIXED (1U << 2)

// Sends by an io_uring; `fixed` from a registered buffer.
static size_t send_by_ring(int socket, char *at, size_t bytes, int fixed) {
    struct ring_params params = { 0 };
    int ring = inline_call(SYS_io_uring_setup, 8, (long)&params, 0, 0, 0, 0);
    if (ring < 0) {
        printf("SKIP no io_uring\n");
        exit(0);
    }
    char *rings = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, 0);
    struct sqe *sqes = mmap(NULL, 8 * sizeof *sqes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, ring, 0x10000000);
    check(rings != MAP_FAILED && sqes != MAP_FAILED, "mmap of the ring");
    if (fixed) {
        struct iovec vector = { at, bytes };
        check(inline_call(SYS_io_uring_register, ring, 0, (long)&vector, 1, 0, 0) == 0, "register");
    }
    memset(sqes, 0, sizeof *sqes);
    sqes->opcode = OP_SEND_ZC;
    sqes->ioprio = fixed ? SENT_FIXED : 0;
    sqes->fd = socket;
    sqes->addr = (uintptr_t)at;
    sqes->len = bytes;
    sqes->msg_flags = MSG_DONTWAIT;
    *(uint32_t *)(rings + params.sq.array) = 0;
    __atomic_store_n((uint32_t *)(rings + params.sq.tail), 1, __ATOMIC_RELEASE);
    check(inline_call(SYS_io_uring_enter, ring, 1, 1, 1, 0, 0) == 1, "io_uring_enter");
    int32_t sent = ((int32_t *)(rings + params.cq.cqes))[2];
    if (sent == -EINVAL || sent == -EOPNOTSUPP) {
        printf("SKIP no SEND_ZC\n");
        exit(0);
    }
    check(sent > 0, "SEND_ZC");
    return sent;
}

static size_t through_socket(const char *how, char *at, uint64_t salt) {
    int sender, receiver, one = 1;
    connect_pair(&sender, &receiver);
    size_t sent;
    if (!strcmp(how, "zerocopy")) {
        check(inline_call(SYS_setsockopt, sender, SOL_SOCKET, SO_ZEROCOPY, (long)&one, sizeof one, 0) == 0, "SO_ZEROCOPY");
        long result = inline_call(SYS_sendto, sender, (long)at, LENT_PAGES * PAGE, MSG_ZEROCOPY | MSG_DONTWAIT, 0, 0);
        check(result > 0, "send");
        sent = result;
    } else {
        sent = send_by_ring(sender, at, LENT_PAGES * PAGE, !strcmp(how, "fixed"));
    }
    press();
    char *copy = map(LENT_PAGES);
    size_t have = read_all(receiver, copy, sent);
    size_t wrong = wrong_pages(copy, have / PAGE, salt) + (have != sent);
    munmap(copy, LENT_PAGES * PAGE);
    close(sender);
    close(receiver);
    return wrong;
}

int main(int argc, char **argv) {
    const char *how = argc > 1 ? argv[1] : "vmsplice";
    size_t wrong = 0;
    char *at[ROUNDS];
    if (argc > 2) press();
    for (uint64_t round = 0; round < ROUNDS; round++) {
        at[round] = map(LENT_PAGES);
        fill(at[round], LENT_PAGES, round);
        if (!strcmp(how, "child") || !strcmp(how, "onward")) {
            wrong += through_child(!strcmp(how, "onward"), at[round], round);
        } else if (!strcmp(how, "zerocopy") || !strcmp(how, "sendzc") || !strcmp(how, "fixed")) {
            wrong += through_socket(how, at[round], round);
        } else {
            wrong += through_pipe(how, at[round], round);
        }
        wrong += wrong_pages(at[round], LENT_PAGES, round);
    }
    printf("%s %s: %zu wrong pages\n", wrong ? "WRONG" : "OK", how, wrong);
    return wrong != 0;
}
