"""Leaves the compressed store full of holes, and time to close them: fills 64K mappings, gives three in four back, makes some others."""
import mmap
import os
import random
import time

chance = random.Random(7)
SIZE, PAGE = 64 << 10, 4096


def make():
    """A mapping whose pages compress to all kinds of sizes."""
    content = b"".join(chance.randbytes(n := chance.randrange(300, 3600)) + bytes(PAGE - n) for _ in range(SIZE // PAGE))
    mapping = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping[:] = content
    return mapping, hash(content)


live = [make() for _ in range(2400)]
chance.shuffle(live)
for mapping, _ in live[600:]:
    mapping.close()
live = live[:600] + [make() for _ in range(400)]
time.sleep(1)
print(all(hash(mapping[:]) == wanted for mapping, wanted in live[::10]), flush=True)
time.sleep(0.5)
os._exit(0)
