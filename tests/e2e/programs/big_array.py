"""A numpy array of ARGV[1] MiB, compressible: filled, changed in place, read in and out of order; prints checksums."""
import sys

import numpy as np

WORDS = int(sys.argv[1]) * (1 << 20) // 8
PART = 1 << 17
rng = np.random.default_rng(7)
data = np.empty(WORDS)
for at in range(0, WORDS, PART):
    part = data[at:at + PART]
    part[:] = np.repeat(rng.integers(0, 1000, PART // 16), 16)[:len(part)]
print("sum", data.sum())
for at in range(0, WORDS, PART):
    part = data[at:at + PART]
    part += at // PART
print("weighted", sum(float(data[i:i + PART].sum()) * (i // PART % 97) for i in range(0, WORDS, PART)))
picks = rng.integers(0, WORDS, 1000)  # each may bring in a whole folio
print("random", data[picks].sum())
data[picks] = -1.0
print("strided", data[::4096 // 8 * 3].sum())
data[:WORDS // 4] = data[WORDS // 4:WORDS // 4 * 2]
print("moved", data.sum(), (data < 0).sum())
