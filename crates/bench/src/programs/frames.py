# A frame of orders for `foliomem bench languages`: arguments are the rows and the rounds. Each round replaces a quarter
# of the rows, and groups, joins and sorts them; the printed total depends on all of them.
import sys

import numpy as np
import pandas as pd

rows, rounds = int(sys.argv[1]), int(sys.argv[2])
random = np.random.default_rng(1)
words = "north river stone market winter copper garden silver harbour meadow lantern orchard thunder village".split()
customers = pd.DataFrame({"customer": np.arange(5000), "region": random.choice(words, 5000)})


def make(count):
    numbers = random.integers(0, 100_000, count)
    frame = pd.DataFrame({
        "name": [f"{words[number % 14]}-{words[number // 14 % 14]}-{number}" for number in numbers.tolist()],
        "customer": random.integers(0, 5000, count),
        "amount": random.integers(1, 1000, count),
        "price": random.integers(1, 400, count) / 4,
    })
    frame["value"] = frame["amount"] * frame["price"]
    return frame


def verify(frame):
    assert (frame["amount"] * frame["price"] == frame["value"]).all(), "a row has changed"


orders = make(rows)
total = 0
for _ in range(rounds):
    verify(orders)
    start = int(random.integers(0, rows - rows // 4))
    kept = [orders.iloc[:start], orders.iloc[start + rows // 4:]]
    orders = pd.concat([*kept, make(rows // 4)], ignore_index=True)
    by_region = orders.merge(customers, on="customer").groupby("region", sort=True)["value"].sum()
    longest = orders["name"].str.len().sort_values(kind="stable").index[-1000:]
    for number in [*(by_region * 4).astype("int64"), *longest]:
        total = (total * 31 + int(number)) % 2147483647
verify(orders)
hashes = pd.util.hash_pandas_object(orders, index=False)
print(total, int(hashes.sum()))
