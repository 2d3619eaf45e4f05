"""redis-server with a dataset three times its limit: every value read back, BGSAVE under writes, reload equal."""
import shutil
import tempfile
import time

import pytest
from conftest import LONG, assert_swapped, start
from resp import Redis

pytestmark = pytest.mark.skipif(not shutil.which("redis-server"), reason="redis-server is not installed")
TEXT = b"all work and no play makes jack a dull boy. " * 22
BATCH = 500


def value(i, version=0):
    """About 1 KB, different for every key and version, compressible."""
    return b"%d/%d:" % (i, version) + TEXT + b"%d" % (i * 7919 + version)


def batches(keys):
    keys = list(keys)
    return (keys[at:at + BATCH] for at in range(0, len(keys), BATCH))


def write_all(redis, keys, version=0):
    for part in batches(keys):
        assert set(redis.many([("SET", f"key:{i}", value(i, version)) for i in part])) == {b"OK"}


def assert_all(redis, versions):
    """Every key has the value of its version."""
    assert redis.one("DBSIZE") == len(versions)
    wrong = [i for part in batches(versions) for i, got in zip(part, redis.many([("GET", f"key:{i}") for i in part]))
             if got != value(i, versions[i])]
    assert not wrong, f"{len(wrong)} wrong values, the first is key:{wrong[0]}"


def save_under_writes(redis, versions):
    """BGSAVE while keys change; gives the versions the dump must hold: those of the moment of the fork."""
    last = redis.one("LASTSAVE")
    time.sleep(1.05 - time.time() % 1 if redis.one("TIME")[0] == b"%d" % last else 0)
    assert b"saving started" in redis.one("BGSAVE")
    frozen = dict(versions)
    keys, turn = list(versions), 0
    while redis.info("rdb_bgsave_in_progress") == "1" or turn < 3:
        part = keys[turn % 7::7][:4000]
        turn += 1
        write_all(redis, part, version=turn)
        versions.update(dict.fromkeys(part, turn))
        assert turn < 500, "BGSAVE does not end"
    assert redis.info("rdb_last_bgsave_status") == "ok"
    return frozen


def server(folder, limit, torture, options=()):
    sock = f"{folder}/redis.sock"
    running = start(["redis-server", "--port", "0", "--unixsocket", sock, "--dir", folder, "--save", "",
                     "--appendonly", "no", "--ignore-warnings", "ARM64-COW-BUG"], limit, options, torture=torture)
    return running, Redis.connect(sock, running)


# With dictionaries, a child of a fork needs those that its parent has made.
@pytest.mark.parametrize("options", [(), ("--codec", "zstd+dict", "--granule", "4K")], ids=["default", "dictionaries"])
def test_redis(torture, options):
    if torture and options and not LONG:
        pytest.skip("as without dictionaries, and takes half a minute: FOLIOMEM_LONG=1")
    count, limit = (3_000, "16M") if torture else (20_000, "16M")
    with tempfile.TemporaryDirectory(prefix="fm-redis-") as folder:
        running, redis = server(folder, limit, torture, options)
        try:
            versions = dict.fromkeys(range(count), 0)
            write_all(redis, versions)
            assert_all(redis, versions)
            frozen = save_under_writes(redis, versions)
            assert_all(redis, versions)
            redis.shutdown()
            assert_swapped(running.finish(30).ok())
            running, redis = server(folder, limit, torture, options)
            assert_all(redis, frozen)
            redis.shutdown()
            assert_swapped(running.finish(30).ok())
        finally:
            running.kill()
