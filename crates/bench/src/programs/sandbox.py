# A sandbox: a frame of ratings, grouped once. Then it forks: the child answers queries over all data, the parent waits.
import os
import sys

import numpy as np
import pandas as pd

rows, seed = int(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(seed)
users = np.sort(random.integers(0, 160_000, rows))
frame = pd.DataFrame({
    "user": users,
    "movie": random.zipf(1.3, rows) % 60_000,
    "rating": random.integers(1, 11, rows) / 2,
    "time": 1_000_000_000 + users * 1000 + random.integers(0, 600, rows),
})
best = frame.groupby("movie")["rating"].mean().max()
child = os.fork()
if child:
    sys.exit(os.waitstatus_to_exitcode(os.wait()[1]))
print("ready", flush=True)
while sys.stdin.readline():
    print(*(frame[column].sum() for column in frame), best, flush=True)
