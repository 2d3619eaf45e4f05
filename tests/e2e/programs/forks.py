"""Forks over ARGV[2] MiB in mode ARGV[1] (pool, nested, both, spawn): every side changes and checks.

Without numpy: where everything goes out all the time it takes a minute to import that."""
import os
import sys
import zlib

MODE, SIZE = sys.argv[1], int(sys.argv[2])
PART = 1 << 20
RUN = 512
NUMBERS = 4096
# Each run of 512 bytes is its number, again and again: what begins at one is copied and compared at the speed of memory.
ALL = memoryview(b"".join(run.to_bytes(8, "little") * (RUN // 8) for run in range(NUMBERS + PART // RUN)))


def content(number):
    """A part that tells of `number`, and each run of it where it is."""
    start = number % NUMBERS * RUN
    return ALL[start:start + PART]


def make(parts, tag):
    """`parts` MiB, each part of it different."""
    data = bytearray(parts * PART)
    for p in range(parts):
        data[p * PART:(p + 1) * PART] = content(tag * 1000003 + p * 7)
    return data


def check(data, tag, who, changed=lambda p: 0):
    for p in range(len(data) // PART):
        if not data.startswith(content(tag * 1000003 + p * 7 + changed(p)), p * PART):
            print(f"WRONG: {who}, part {p}", flush=True)
            os._exit(9)


def add(data, p, by):
    """Changes all of a part, which has to be as somebody made it: what is overwritten would not be missed."""
    at = p * PART
    number = int.from_bytes(data[at:at + 8], "little")
    if not data.startswith(content(number), at):
        print(f"WRONG: part {p} before it is changed", flush=True)
        os._exit(9)
    data[at:at + PART] = content(number + by)


def change(data, by, step):
    for p in range(0, len(data) // PART, step):
        add(data, p, by)


def join(pid):
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code:
        print("child ended with", code, flush=True)
        os._exit(8)


shared = None
touched = set()


def work(n):
    """One task of the pool: checks the inherited array, changes it or a copy of it, and one of its own."""
    mine = shared.copy() if n % 2 else shared
    own = make(SIZE // 8, n + 2)
    add(mine, n, n)
    if mine is shared:
        touched.add(n)
    check(own, n + 2, f"worker {n} own")
    check(shared, 1, f"worker {n} inherited", lambda p: p if p in touched else 0)
    return zlib.crc32(own), zlib.crc32(mine[n * PART:(n + 1) * PART])


def pool():
    import multiprocessing
    global shared
    shared = make(SIZE, 1)
    with multiprocessing.get_context("fork").Pool(3) as workers:
        pending = workers.map_async(work, range(12))
        change(shared, 5, 2)
        check(shared, 1, "parent, workers alive", lambda p: 5 if p % 2 == 0 else 0)
        result = pending.get(100)
    check(shared, 1, "parent after", lambda p: 5 if p % 2 == 0 else 0)
    return result


def nested():
    data = make(SIZE, 1)

    def level(depth):
        check(data, 1, f"depth {depth} inherited", lambda p: depth if p % 3 == 0 else 0)
        change(data, 1, 3)
        if depth < 3:
            pid = os.fork()
            if pid == 0:
                level(depth + 1)
                os._exit(0)
            check(data, 1, f"depth {depth} beside its child", lambda p: depth + 1 if p % 3 == 0 else 0)
            join(pid)
        check(data, 1, f"depth {depth} at the end", lambda p: depth + 1 if p % 3 == 0 else 0)

    level(0)
    return zlib.crc32(data)


def both():
    data = make(SIZE, 1)
    for turn in range(4):
        pid = os.fork()
        by = 1000 if pid == 0 else 1
        change(data, by, 2)
        done = turn + by if pid == 0 else turn + 1
        check(data, 1, f"turn {turn} {'child' if pid == 0 else 'parent'}", lambda p: done if p % 2 == 0 else 0)
        if pid == 0:
            os._exit(0)
        join(pid)
    check(data, 1, "parent at the end", lambda p: 4 if p % 2 == 0 else 0)
    return zlib.crc32(data)


def spawn():
    """subprocess takes vfork, posix_spawn is called by name; children with memory of their own."""
    import subprocess
    data = make(SIZE, 1)
    child = "import sys; b = bytearray(int(sys.argv[1]) << 20); b[::4096] = b'x' * len(b[::4096]); print(sum(b[::4096]))"
    sums = [int(subprocess.run([sys.executable, "-c", child, str(n)], stdout=subprocess.PIPE, check=True).stdout)
            for n in (1, SIZE // 2)]
    for n in range(3):
        read, write = os.pipe()
        join(os.posix_spawn("/bin/echo", ["echo", f"spawned {n}"], os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, write, 1)]))
        os.close(write)
        sums.append(os.read(read, 100))
        os.close(read)
        change(data, 1, 2)
    shell = subprocess.Popen(["sh", "-c", "cat | wc -c"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=False)
    sums.append(shell.communicate(data[:4 * PART])[0].strip())
    check(data, 1, "parent at the end", lambda p: 3 if p % 2 == 0 else 0)
    return sums


print({"pool": pool, "nested": nested, "both": both, "spawn": spawn}[MODE]())
