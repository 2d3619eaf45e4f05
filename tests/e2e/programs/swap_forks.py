"""Random data of ARGV[1] MiB, of which both sides of forks read, change and replace parts."""
import hashlib
import os
import random
import sys

COUNT = int(sys.argv[1])
PART = 1 << 20


def make(n):
    return [os.urandom(PART) for _ in range(n)]


def digest(parts):
    return [hashlib.md5(p).digest() for p in parts]


def verify(who, parts, sums):
    if digest(parts) != sums:
        wrong = [n for n, (p, s) in enumerate(zip(parts, sums)) if hashlib.md5(p).digest() != s]
        print("WRONG", who, wrong, flush=True)
        os._exit(9)


def replace(parts, sums, seed):
    for n in random.Random(seed).sample(range(COUNT), COUNT // 3):
        parts[n] = os.urandom(PART)
        sums[n] = hashlib.md5(parts[n]).digest()


def fork(depth, parts, sums):
    pids = []
    for child in range(2):
        pid = os.fork()
        if pid == 0:
            replace(parts, sums, depth * 10 + child)
            verify(f"child {child} of {depth}", parts, sums)
            if depth > 0 and child == 0:
                fork(depth - 1, parts, sums)
            replace(parts, sums, depth * 10 + child + 5)
            verify(f"child {child} of {depth} again", parts, sums)
            os._exit(0)
        pids.append(pid)
        # What the parent frees here its child still needs.
        replace(parts, sums, depth * 10 + child + 2)
        verify(f"parent of {depth}", parts, sums)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    if any(codes):
        print("children ended with", codes, flush=True)
        os._exit(8)


parts = make(COUNT)
sums = digest(parts)
fork(1, parts, sums)
replace(parts, sums, 99)
verify("parent at the end", parts, sums)
print("intact on all sides")
