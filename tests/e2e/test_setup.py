"""`foliomem setup`: what it writes, what it refuses, and that undoing removes exactly that; in folders, and in a real system."""
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import BIN, cli, foliomem_only
from debian_roots import Root, needs_root

pytestmark = foliomem_only
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root")


def tree(root):
    """All below a folder: files with their text, and folders."""
    return {str(path.relative_to(root)): path.read_text() if path.is_file() else None for path in sorted(root.rglob("*"))}


@pytest.fixture
def root(tmp_path):
    """A system with two services."""
    if not shutil.which("groupadd"):
        pytest.skip("no groupadd")
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc/group").write_text("root:x:0:\n")
    units = tmp_path / "usr/lib/systemd/system"
    units.mkdir(parents=True)
    (units / "web.service").write_text("[Service]\nType=notify\nUser=web\nExecStart=/bin/web --port=80 \\\n  --all\n")
    (units / "old.service").write_text("[Service]\nType=forking\nExecStart=/bin/old\n")
    return tmp_path


def group_files(files):
    """Without what groupadd and groupdel keep for themselves."""
    return {name: text for name, text in files.items() if name not in ("etc/group-", "etc/gshadow", "etc/gshadow-", "etc/.pwd.lock")}


@AS_ROOT
def test_setup_writes_rule_group_and_description_and_undo_removes_exactly_these(root):
    before = tree(root)
    cli("setup", "--root", str(root)).ok()
    after = tree(root)
    assert 'GROUP="foliomem", MODE="0660"' in after["etc/udev/rules.d/60-foliomem.rules"]
    assert '"kind": "foliomem.dev/userfaultfd"' in after["etc/cdi/foliomem.json"]
    assert "foliomem:x:" in after["etc/group"]
    assert "already" in cli("setup", "--root", str(root)).ok().err and tree(root) == after
    cli("setup", "--undo", "--root", str(root)).ok()
    assert group_files(tree(root)) == before
    nothing = cli("setup", "--undo", "--root", str(root))
    assert nothing.code == 125 and "nothing to undo" in nothing.err


@AS_ROOT
def test_setup_leaves_what_is_others(root):
    (root / "etc/cdi").mkdir()
    (root / "etc/cdi/foliomem.json").write_text("mine")
    before = tree(root)
    got = cli("setup", "--root", str(root))
    assert got.code == 125 and "foliomem did not write it" in got.err and tree(root) == before
    (root / "etc/cdi/foliomem.json").unlink()
    (root / "etc/group").write_text("root:x:0:\nfoliomem:x:77:\n")
    cli("setup", "--root", str(root)).ok()
    (root / "etc/udev/rules.d/60-foliomem.rules").write_text("changed")
    got = cli("setup", "--undo", "--root", str(root))
    assert got.code == 125 and "60-foliomem.rules has been changed" in got.err
    assert (root / "etc/udev/rules.d/60-foliomem.rules").read_text() == "changed" and (root / "etc/cdi").is_dir()
    assert not (root / "etc/cdi/foliomem.json").exists() and "foliomem:x:77:" in (root / "etc/group").read_text()


def test_setup_of_a_unit_writes_a_drop_in(root):
    before = tree(root)
    cli("setup", "unit", "web", "--limit", "1G", "--root", str(root)).ok()
    text = (root / "etc/systemd/system/web.service.d/90-foliomem.conf").read_text()
    assert f"ExecStart=\nExecStart={BIN} run --limit 1G --quiet -- /bin/web --port=80 --all\n" in text, text
    assert "\nNotifyAccess=all\n" in text and "\nSupplementaryGroups=foliomem\n" in text
    if shutil.which("systemd-analyze"):
        checked = subprocess.run(["systemd-analyze", "--root", root, "verify", "web.service"], capture_output=True, text=True)
        assert "90-foliomem.conf" not in checked.stderr, checked.stderr
    # Again, with another limit: the drop-in is not taken for the unit's own command.
    cli("setup", "unit", "web.service", "--limit", "2G", "--root", str(root)).ok()
    text = (root / "etc/systemd/system/web.service.d/90-foliomem.conf").read_text()
    assert text.count("foliomem run") == 1 and "--limit 2G" in text
    cli("setup", "unit", "web", "--undo", "--root", str(root)).ok()
    assert tree(root) == before


@pytest.mark.parametrize("name, limit, part", [("none", "1G", "there is no unit none.service"), ("old", "1G", "Type=forking"),
                                               ("web.timer", "1G", "is no service"), ("web", "1", "too small")])
def test_setup_of_a_unit_refuses_what_cannot_work(root, name, limit, part):
    before = tree(root)
    got = cli("setup", "unit", name, "--limit", limit, "--root", str(root))
    assert got.code == 125 and part in got.err and tree(root) == before, got.err


# ---- a real system ----

@pytest.fixture
def debian(tmp_path):
    """A Debian system with systemd and udev, in which foliomem is installed."""
    root = Root(tmp_path)
    for name in ("foliomem", "libfoliomem_agent.so"):
        root.copy(Path(BIN).with_name(name), "usr/local/bin")
    root.before = root.changes()
    yield root
    root.close()


def restart(root):
    """Does to the device what udev does when the machine starts: it is new, and rules are used. What they are said to do."""
    device = root.path / "dev/userfaultfd"
    os.chown(device, 0, 0)
    device.chmod(0o600)
    said = root.run("sh", "-c", "udevadm test /sys/class/misc/userfaultfd 2>&1")
    return re.findall(r"60-foliomem\.rules:\d+ (\w+) ", said)


@needs_root
def test_setup_of_a_system_outlasts_a_restart_and_its_undoing_leaves_no_trace(debian):
    device, group = debian.device(), "foliomem:x:"
    debian.run("foliomem", "setup")
    assert group in debian.run("getent", "group", "foliomem")
    debian.check_the_group_may()
    assert restart(debian) == ["GROUP", "MODE"]
    debian.check_the_group_may()
    debian.run("foliomem", "setup", "--undo")
    assert debian.device() == device and group not in (debian.path / "etc/group").read_text()
    debian.check_nothing_is_left()
    assert restart(debian) == [] and debian.device() == device


@needs_root
def test_setup_of_a_system_from_outside_is_the_same(debian):
    cli("setup", "--root", str(debian.path)).ok()
    restart(debian)
    debian.check_the_group_may()
    cli("setup", "--undo", "--root", str(debian.path)).ok()
    restart(debian)
    debian.check_nothing_is_left()


# Units of Debian: an instance of a template whose command has quotes and escapes, one with a prefix
# and device rules, and one of the start of the system.
UNITS = {
    "getty@tty1": "-/usr/local/bin/foliomem run --limit 64M --quiet -- /sbin/agetty -o '-p -- \\\\u' --noclear - $TERM",
    "systemd-networkd": "!!/usr/local/bin/foliomem run --limit 64M --quiet -- /lib/systemd/systemd-networkd",
    "systemd-journald": "/usr/local/bin/foliomem run --limit 64M --quiet -- /lib/systemd/systemd-journald",
}


@needs_root
@pytest.mark.parametrize("unit, command", UNITS.items(), ids=UNITS)
def test_systemd_accepts_the_drop_in_for_a_unit_of_debian(debian, unit, command):
    verify = ["systemd-analyze", "--man=no", "verify", f"{unit}.service"]
    debian.run(*verify)
    debian.run("foliomem", "setup", "unit", unit, "--limit", "64M")
    drop_in = debian.path / f"etc/systemd/system/{unit}.service.d/90-foliomem.conf"
    assert f"\nExecStart=\nExecStart={command}\n" in drop_in.read_text()
    debian.run(*verify)
    # The check can fail.
    text = drop_in.read_text()
    drop_in.write_text(text.replace("ExecStart=\n", ""))
    with pytest.raises(AssertionError, match="more than one ExecStart= setting"):
        debian.run(*verify)
    drop_in.write_text(text)
    debian.run("foliomem", "setup", "unit", unit, "--undo")
    debian.check_nothing_is_left()
