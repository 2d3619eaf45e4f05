"""An in-memory SQLite database of about ARGV[1] MB: filled, indexed, updated, checked; prints checksums."""
import sqlite3
import sys

ROWS = int(sys.argv[1]) * 1000
TEXT = "the quick brown fox jumps over the lazy dog; " * 18
db = sqlite3.connect(":memory:")
db.execute("PRAGMA temp_store=MEMORY")
db.execute("CREATE TABLE item(id INTEGER PRIMARY KEY, rank INTEGER, name TEXT, body TEXT)")


def row(i):
    return i, i * 2654435761 % 1000003, f"name-{i % 5000}", f"{i}:{TEXT}{i * 31}"


with db:
    db.executemany("INSERT INTO item VALUES(?,?,?,?)", (row(i) for i in range(ROWS)))
with db:
    db.execute("CREATE INDEX by_rank ON item(rank)")
with db:
    db.execute("UPDATE item SET body = 'changed ' || id || body WHERE rank % 17 = 0")
    db.execute("DELETE FROM item WHERE rank % 23 = 0")
print(db.execute("PRAGMA integrity_check").fetchone()[0])
print(db.execute("SELECT count(*), sum(id), sum(rank), sum(length(body)), sum(unicode(substr(body, 5, 1))) FROM item").fetchone())
print(db.execute("SELECT sum(x) FROM (SELECT id * (row_number() OVER (ORDER BY rank)) % 1000 AS x FROM item)").fetchone())
wrong = sum(1 for i, rank, body in db.execute("SELECT id, rank, body FROM item")
            if body != ("changed %d" % i if rank % 17 == 0 else "") + row(i)[3])
print("wrong", wrong)
