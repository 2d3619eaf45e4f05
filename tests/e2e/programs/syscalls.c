// System calls into swapped-out buffers. `syscalls MODE MIB`: a buffer of MIB is filled, forced out by touching twice
// as much other memory, then handed to the kernel; what arrives is compared. Exit 77: the kernel has no such call.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <pthread.h>
#include <stdarg.h>
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

static size_t size;
static uint64_t *out, *in, *other;

static void fail(const char *format, ...) {
    va_list args;
    va_start(args, format);
    int error = errno;
    printf("WRONG: ");
    vprintf(format, args);
    printf(" (errno %d, %s)\n", error, strerror(error));
    exit(9);
}

static uint64_t word(uint64_t tag, size_t i) { return tag * 0x9e3779b97f4a7c15 + i / 64; }

static void fill(uint64_t *p, uint64_t tag) {
    for (size_t i = 0; i < size / 8; i++) p[i] = word(tag, i);
}

static void check(const uint64_t *p, uint64_t tag, const char *what) {
    for (size_t i = 0; i < size / 8; i++)
        if (p[i] != word(tag, i)) fail("%s: word %zu of %zu is %#lx", what, i, size / 8, p[i]);
}

// Makes both buffers cold: twice their size of other memory is written and read.
static void force_out(void) {
    static uint64_t turn = 100;
    turn++;
    for (int half = 0; half < 4; half++) fill(other + half * (size / 8), turn + half * 50);
    for (int half = 0; half < 4; half++) check(other + half * (size / 8), turn + half * 50, "other memory");
}

static void prepare(uint64_t tag) {
    fill(out, tag);
    fill(in, tag + 1000);
    force_out();
}

static void *sender(void *arg) {
    int fd = *(int *)arg;
    for (size_t done = 0; done < size;) {
        ssize_t n = write(fd, (char *)out + done, size - done);
        if (n <= 0) fail("write at %zu gave %zd", done, n);
        done += n;
    }
    return 0;
}

static void receive(int fd) {
    for (size_t done = 0; done < size;) {
        ssize_t n = read(fd, (char *)in + done, size - done);
        if (n <= 0) fail("read at %zu gave %zd", done, n);
        done += n;
    }
}

static void via_pipe(void) {
    int fds[2];
    pthread_t thread;
    if (pipe(fds)) fail("pipe");
    prepare(1);
    pthread_create(&thread, 0, sender, &fds[1]);
    receive(fds[0]);
    pthread_join(thread, 0);
    check(in, 1, "pipe");
}

static int open_file(int flags) {
    char name[] = "syscalls.XXXXXX";
    int fd = mkstemp(name);
    if (fd < 0) fail("mkstemp");
    int again = flags ? open(name, O_RDWR | flags) : fd;
    unlink(name);
    if (again < 0 && errno == EINVAL) exit(77);
    return again;
}

static void all(ssize_t got, size_t wanted, const char *what) {
    if (got != (ssize_t)wanted) fail("%s moved %zd of %zu bytes", what, got, wanted);
}

static void via_file(int flags) {
    int fd = open_file(flags);
    prepare(2);
    all(pwrite(fd, out, size, 0), size, "pwrite");
    force_out();
    all(pread(fd, in, size, 0), size, "pread");
    check(in, 2, "pread");
    check(out, 2, "pwrite's buffer");
    prepare(3);
    struct iovec parts[16];
    for (int i = 0; i < 16; i++) parts[i] = (struct iovec){(char *)out + (15 - i) * (size / 16), size / 16};
    all(pwritev(fd, parts, 16, 0), size, "pwritev");
    for (int i = 0; i < 16; i++) parts[i].iov_base = (char *)in + (15 - i) * (size / 16);
    force_out();
    all(preadv(fd, parts, 16, 0), size, "preadv");
    check(in, 3, "preadv");
}

static void *message_sender(void *arg) {
    for (size_t done = 0, part = 64 << 10; done < size; done += part) {
        struct iovec iov[2] = {{(char *)out + done, part / 2}, {(char *)out + done + part / 2, part / 2}};
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = 2};
        all(sendmsg(*(int *)arg, &message, 0), part, "sendmsg");
    }
    return 0;
}

static void via_socket(void) {
    int fds[2];
    pthread_t thread;
    if (socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds)) fail("socketpair");
    prepare(4);
    pthread_create(&thread, 0, message_sender, &fds[0]);
    for (size_t done = 0, part = 64 << 10; done < size; done += part) {
        struct iovec iov[2] = {{(char *)in + done, 100}, {(char *)in + done + 100, part - 100}};
        struct msghdr message = {.msg_iov = iov, .msg_iovlen = 2};
        all(recvmsg(fds[1], &message, 0), part, "recvmsg");
    }
    pthread_join(thread, 0);
    check(in, 4, "sendmsg and recvmsg");
}

// Another process reads and writes this one's memory, as a debugger does.
static void via_process_vm(void) {
    prepare(5);
    pid_t parent = getpid(), pid = fork();
    if (pid == 0) {
        struct iovec here = {in, size}, there = {out, size};
        all(process_vm_readv(parent, &here, 1, &there, 1, 0), size, "process_vm_readv");
        check(in, 5, "process_vm_readv");
        fill(out, 6);
        force_out();
        here.iov_base = out;
        there.iov_base = in;
        all(process_vm_writev(parent, &here, 1, &there, 1, 0), size, "process_vm_writev");
        _exit(0);
    }
    int status;
    waitpid(pid, &status, 0);
    if (status) fail("the child ended with %#x", status);
    check(in, 6, "process_vm_writev");
    check(out, 5, "the parent's buffer");
}

static void *waker(void *arg) {
    uint32_t *words = arg;
    for (size_t i = 0; i < size / 4096; i++) {
        __atomic_store_n(&words[i * 1024], 7, __ATOMIC_SEQ_CST);
        syscall(SYS_futex, &words[i * 1024], FUTEX_WAKE_PRIVATE, 1, 0, 0, 0);
    }
    return 0;
}

// One futex in every page of the buffer, each swapped out before somebody waits on it.
static void via_futex(void) {
    pthread_t thread;
    memset(out, 0, size);
    for (size_t i = 0; i < size / 8; i += 512) out[i + 9] = i;
    force_out();
    pthread_create(&thread, 0, waker, out);
    uint32_t *words = (uint32_t *)out;
    for (size_t i = 0; i < size / 4096; i++)
        while (__atomic_load_n(&words[i * 1024], __ATOMIC_SEQ_CST) == 0)
            if (syscall(SYS_futex, &words[i * 1024], FUTEX_WAIT_PRIVATE, 0, 0, 0, 0) && errno != EAGAIN && errno != EINTR)
                fail("futex wait");
    pthread_join(thread, 0);
    for (size_t i = 0; i < size / 8; i += 512)
        if (out[i + 9] != i || (uint32_t)out[i] != 7) fail("futex page %zu", i / 512);
}

// ---- io_uring, with raw calls ----

struct ring {
    int fd;
    unsigned *sq_tail, *sq_mask, *sq_array, *cq_head, *cq_tail, *cq_mask;
    struct io_uring_sqe *sqes;
    struct io_uring_cqe *cqes;
};

static struct ring ring_open(void) {
    struct io_uring_params params = {0};
    int fd = syscall(SYS_io_uring_setup, 64, &params);
    if (fd < 0) exit(77);
    char *sq = mmap(0, params.sq_off.array + params.sq_entries * 4, PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQ_RING);
    char *cq = mmap(0, params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe), PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_CQ_RING);
    void *sqes = mmap(0, params.sq_entries * sizeof(struct io_uring_sqe), PROT_READ | PROT_WRITE, MAP_SHARED, fd, IORING_OFF_SQES);
    if (sq == MAP_FAILED || cq == MAP_FAILED || sqes == MAP_FAILED) fail("mmap of the ring");
    return (struct ring){fd, (unsigned *)(sq + params.sq_off.tail), (unsigned *)(sq + params.sq_off.ring_mask), (unsigned *)(sq + params.sq_off.array),
                         (unsigned *)(cq + params.cq_off.head), (unsigned *)(cq + params.cq_off.tail), (unsigned *)(cq + params.cq_off.ring_mask),
                         sqes, (struct io_uring_cqe *)(cq + params.cq_off.cqes)};
}

// Moves a whole buffer with 32 requests in flight; buffer index 0 or 1 when registered, else -1.
static void ring_move(struct ring *ring, int op, int file, char *buffer, int index) {
    size_t part = size / 32;
    for (int i = 0; i < 32; i++) {
        unsigned tail = *ring->sq_tail, slot = tail & *ring->sq_mask;
        ring->sqes[slot] = (struct io_uring_sqe){.opcode = op, .fd = file, .addr = (uint64_t)(buffer + i * part), .len = part, .off = i * part, .user_data = i};
        if (index >= 0) ring->sqes[slot].buf_index = index;
        ring->sq_array[slot] = slot;
        __atomic_store_n(ring->sq_tail, tail + 1, __ATOMIC_RELEASE);
    }
    for (int pending = 32, submit = 32; pending;) {
        int done = syscall(SYS_io_uring_enter, ring->fd, submit, 1, IORING_ENTER_GETEVENTS, 0, 0);
        if (done < 0 && errno != EINTR) fail("io_uring_enter");
        if (done > 0) submit -= done;
        for (; *ring->cq_head != __atomic_load_n(ring->cq_tail, __ATOMIC_ACQUIRE); pending--) {
            struct io_uring_cqe cqe = ring->cqes[*ring->cq_head & *ring->cq_mask];
            if (cqe.res != (int)part) fail("io_uring op %d, request %llu: %d of %zu bytes", op, cqe.user_data, cqe.res, part);
            __atomic_store_n(ring->cq_head, *ring->cq_head + 1, __ATOMIC_RELEASE);
        }
    }
}

static void via_ring(int registered) {
    struct ring ring = ring_open();
    int file = open_file(0);
    prepare(8);
    if (registered) {
        struct iovec buffers[2] = {{out, size}, {in, size}};
        if (syscall(SYS_io_uring_register, ring.fd, IORING_REGISTER_BUFFERS, buffers, 2)) {
            if (errno == ENOMEM || errno == EPERM) exit(77); // RLIMIT_MEMLOCK
            fail("io_uring_register");
        }
        force_out(); // the registered buffers are pinned now and must stay where they are
    }
    ring_move(&ring, registered ? IORING_OP_WRITE_FIXED : IORING_OP_WRITE, file, (char *)out, registered ? 0 : -1);
    force_out();
    ring_move(&ring, registered ? IORING_OP_READ_FIXED : IORING_OP_READ, file, (char *)in, registered ? 1 : -1);
    check(in, 8, "io_uring");
    force_out();
    check(in, 8, "io_uring, later");
    check(out, 8, "io_uring's source, later");
}

// MADV_WIPEONFORK: a child finds zeros in the wiped buffer, also if it was swapped out, and all other content.
static void via_wipe(void) {
    prepare(8);
    if (madvise(in, size, MADV_WIPEONFORK)) fail("MADV_WIPEONFORK");
    for (int turn = 0; turn < 2; turn++) {
        pid_t child = fork();
        if (!child) {
            check(out, 8, "the child's copy");
            for (size_t i = 0; i < size / 8; i++)
                if (in[i]) fail("word %zu of what is wiped is %#lx", i, in[i]);
            _exit(0);
        }
        int status;
        if (waitpid(child, &status, 0) != child || status) fail("the child ended with %#x", status);
        check(in, 1008, "what the child does not see");
        force_out();
    }
}

// A range that was a guard reads as zeros after the guard is removed, also if its content was swapped out.
static void via_guard(void) {
    const int install = 102, remove = 103;
    prepare(11);
    size_t part = size / 2;
    if (madvise(in, part, install)) exit(errno == EINVAL ? 77 : 1);
    force_out();
    if (madvise(in, part, remove)) fail("MADV_GUARD_REMOVE");
    for (size_t i = 0; i < size / 8; i++)
        if (in[i] != (i < part / 8 ? 0 : word(1011, i))) fail("word %zu is %#lx", i, in[i]);
}

// A limit and locked memory exclude each other, so the agent lets mlockall succeed without locking. The program gives up
// CAP_IPC_LOCK first: a call that reached the kernel would populate the agent's reserved address space and fill the machine.
static void via_mlockall(void) {
    struct { unsigned version; int pid; } head = {0x20080522, 0};
    struct { unsigned effective, permitted, inheritable; } sets[2];
    if (syscall(SYS_capget, &head, sets)) fail("capget");
    sets[0].effective &= ~(1u << 14 /* CAP_IPC_LOCK */);
    if (syscall(SYS_capset, &head, sets)) fail("capset");
    prepare(9);
    if (mlockall(8) != -1 || errno != EINVAL) fail("a flag that there is not");
    if (mlockall(MCL_CURRENT | MCL_FUTURE)) fail("mlockall");
    prepare(10);
    check(out, 10, "after mlockall");
    if (munlockall()) fail("munlockall");
}

int main(int argc, char **argv) {
    const char *mode = argc > 2 ? argv[1] : "";
    size = argc > 2 ? strtoul(argv[2], 0, 10) << 20 : 0;
    char *all_memory = mmap(0, size * 6, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (!size || all_memory == MAP_FAILED) return 2;
    out = (uint64_t *)all_memory;
    in = out + size / 8;
    other = in + size / 8;
    if (!strcmp(mode, "pipe")) via_pipe();
    else if (!strcmp(mode, "file")) via_file(0);
    else if (!strcmp(mode, "direct")) via_file(O_DIRECT);
    else if (!strcmp(mode, "socket")) via_socket();
    else if (!strcmp(mode, "process_vm")) via_process_vm();
    else if (!strcmp(mode, "futex")) via_futex();
    else if (!strcmp(mode, "io_uring")) via_ring(0);
    else if (!strcmp(mode, "io_uring_fixed")) via_ring(1);
    else if (!strcmp(mode, "wipeonfork")) via_wipe();
    else if (!strcmp(mode, "guard")) via_guard();
    else if (!strcmp(mode, "mlockall")) via_mlockall();
    else return 2;
    printf("%s ok\n", mode);
    return 0;
}
