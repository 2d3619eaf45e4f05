"""A tiny Redis client: RESP over a Unix socket, pipelined."""
import socket
import time


class Redis:
    """One connection; `many` sends a batch before it reads the answers."""

    def __init__(self, path, timeout=60):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(timeout)
        self.sock.connect(path)
        self.file = self.sock.makefile("rb", buffering=1 << 20)

    @staticmethod
    def connect(path, running, timeout=60):
        """Waits until the server takes commands (a big dump is loaded first)."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            try:
                client = Redis(path)
                if client.one("PING") == b"PONG":
                    return client
                client.close()
            except (OSError, ConnectionError):
                pass
            time.sleep(0.05)
        running.kill()
        raise AssertionError(f"redis-server did not start: {running.text(running.out)[-1500:]!r} "
                             f"{running.text(running.err)[-1500:]!r}")

    @staticmethod
    def encode(args):
        parts = [a if isinstance(a, bytes) else str(a).encode() for a in args]
        return b"*%d\r\n" % len(parts) + b"".join(b"$%d\r\n%s\r\n" % (len(p), p) for p in parts)

    def read(self):
        """One answer; an error of the server comes back as an exception object."""
        line = self.file.readline()
        if not line.endswith(b"\r\n"):
            raise ConnectionError("the server closed the connection")
        kind, rest = line[:1], line[1:-2]
        if kind == b"+":
            return rest
        if kind == b"-":
            return RuntimeError(rest.decode())
        if kind == b":":
            return int(rest)
        if kind == b"$":
            return None if rest == b"-1" else self.file.read(int(rest) + 2)[:-2]
        return [self.read() for _ in range(int(rest))]

    def many(self, commands):
        self.sock.sendall(b"".join(map(self.encode, commands)))
        return [self.read() for _ in commands]

    def one(self, *args):
        return self.many([args])[0]

    def info(self, name):
        """One field of INFO."""
        for line in self.one("INFO").decode().splitlines():
            if line.startswith(name + ":"):
                return line.split(":", 1)[1]
        raise KeyError(name)

    def shutdown(self):
        """Stops the server without a save."""
        try:
            self.one("SHUTDOWN", "NOSAVE")
        except (ConnectionError, OSError):
            pass
        self.close()

    def close(self):
        self.file.close()
        self.sock.close()
