"""A real terminal for tests: a shell in tmux, of which tests read the screen and press the keys."""
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from conftest import clean_env

# Seconds to wait for something on the screen: it may come late on a loaded machine.
PATIENCE = 60


def until(condition):
    """Waits until the condition is true."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, "it did not become true"
        time.sleep(0.05)


class Terminal:
    """A shell in a terminal of its own."""

    def __init__(self, columns=80, rows=24, env=()):
        self.folder = tempfile.TemporaryDirectory(prefix="foliomem-tmux-")
        shell = ["env", "PS1=ready> ", "ENV=", "HISTFILE=", "sh", "-i"]
        env = {"LC_ALL": "C.UTF-8", "TERM": "xterm-256color", **dict(env)}
        self.tmux("-f", "/dev/null", "-u", "new-session", "-d", "-x", columns, "-y", rows, *shell, env=clean_env(env))
        self.wait(lambda screen: "ready>" in screen)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.tmux("kill-server", check=False)
        self.folder.cleanup()

    def tmux(self, *words, env=None, check=True):
        argv = ["tmux", "-S", Path(self.folder.name) / "socket", *words]
        done = subprocess.run([str(word) for word in argv], capture_output=True, text=True, env=env, timeout=60)
        assert done.returncode == 0 or not check, (argv, done.stderr)
        return done.stdout

    def screen(self, *options):
        """The screen, as lines in one text."""
        return self.tmux("capture-pane", "-p", *options)

    def value(self, name):
        """A value of the terminal that tmux knows, such as cursor_flag."""
        return self.tmux("display-message", "-p", f"#{{{name}}}").strip()

    def resize(self, columns, rows):
        self.tmux("resize-window", "-x", columns, "-y", rows)

    def press(self, *keys):
        """Presses keys, by the names that tmux has for them."""
        self.tmux("send-keys", "--", *keys)

    def type(self, text):
        self.tmux("send-keys", "-l", "--", text)

    def enter(self, line):
        self.type(line)
        self.press("Enter")

    def wait(self, wanted):
        """The screen, once `wanted` is true of it; `wanted` itself if that is a list or more."""
        end = time.monotonic() + PATIENCE
        while not (found := wanted(screen := self.screen())):
            assert time.monotonic() < end, f"it did not come on the screen:\n{screen}"
            time.sleep(0.05)
        return found if isinstance(found, (dict, list)) else screen


HAS_TMUX = shutil.which("tmux") is not None
