"""ARGV[3] children read, change or copy (ARGV[1]) the ARGV[2] MiB of their parent, and all live until all are done."""
import os
import sys

MODE, SIZE, CHILDREN = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
PAGE = 4096


def page(tag, number):
    return (b"%d:%08d" % (tag, number) * (PAGE // 10))[:PAGE - 96] + bytes(96)


def check(data, tag):
    for number in range(0, len(data) // PAGE):
        if not data.startswith(page(tag, number), number * PAGE):
            os._exit(9)


data = bytearray().join(page(0, number) for number in range(SIZE << 8))
done, tell = os.pipe()
end, stop = os.pipe()
pids = []
for child in range(1, CHILDREN + 1):
    pid = os.fork()
    if pid == 0:
        os.close(stop)
        mine = bytearray(data) if MODE == "copy" else data
        if MODE == "change":
            for number in range(len(data) // PAGE):
                data[number * PAGE:(number + 1) * PAGE] = page(child, number)
        for _ in range(2):
            check(mine, child if MODE == "change" else 0)
        os.write(tell, b"x")
        os.read(end, 1)
        check(mine, child if MODE == "change" else 0)
        os._exit(0)
    pids.append(pid)
for _ in pids:
    os.read(done, 1)
os.close(stop)
assert [os.waitpid(pid, 0)[1] for pid in pids] == [0] * CHILDREN
check(data, 0)
print("right")
