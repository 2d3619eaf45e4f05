"""What `make dist` makes installs into clean roots, runs a program inside a limit there, and leaves nothing when it is removed.

The roots are those of debian_roots.py.
"""
import gzip
import hashlib
import io
import json
import os
import re
import shutil
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest
from conftest import BIN, REPO, foliomem_only, make_packages, plain, soak_only
from debian_roots import LIMITED, PROGRAM, Root, needs_root

pytestmark = foliomem_only


@pytest.fixture(scope="module")
def dist(tmp_path_factory):
    """dist(part): the file or folder that scripts/dist makes."""
    out, made = tmp_path_factory.mktemp("dist"), {}

    def part(name):
        if name not in made:
            made[name] = Path(make_packages("--out", out, name).ok().out.decode().split()[-1])
        return made[name]

    return part


@pytest.fixture
def root(tmp_path):
    root = Root(tmp_path)
    yield root
    root.close()


@soak_only
def test_the_same_sources_give_the_same_packages(dist, tmp_path):
    parts = ["wheel", "tarball", "deb", *(["rpm"] if shutil.which("rpmbuild") else [])]
    for part in parts:
        first = dist(part)
        make_packages("--out", tmp_path, part).ok()
        assert (tmp_path / first.name).read_bytes() == first.read_bytes(), part
    assert make_packages("floppy").code == 2


@needs_root
def test_the_debian_package(dist, root):
    package = root.copy(dist("deb"))
    root.run("dpkg", "--force-unsafe-io", "-i", package)
    root.check_it_runs()
    root.check_the_group_may()
    assert root.run("python3", "-c", "import foliomem; print(foliomem.command())") == "/usr/bin/foliomem\n"
    for page in ("foliomem.1", "foliomem-run.1", "foliomem-ctl-reclaim.1"):
        # Minimal roots of Debian leave out man pages.
        assert f"/usr/share/man/man1/{page}.gz" in root.run("dpkg", "-L", "foliomem")
    rule = (root.path / "etc/udev/rules.d/60-foliomem.rules").read_text()
    assert 'GROUP="foliomem"' in rule
    # An upgrade keeps what is allowed.
    root.run("dpkg", "--force-unsafe-io", "-i", package)
    root.check_the_group_may()
    root.run("dpkg", "--purge", "foliomem")
    root.check_nothing_is_left()


@needs_root
def test_the_archive_with_its_installer(dist, root):
    archive = root.copy(dist("tarball"))
    root.run("tar", "-C", "/tmp", "-xf", archive)
    installer = f"{archive.removesuffix('.tar.gz')}/install.sh"
    root.run(installer, "--setup")
    root.check_it_runs()
    root.check_the_group_may()
    # Twice is an upgrade; another prefix is independent.
    root.run(installer)
    root.run(installer, "--prefix", "/opt/own")
    assert root.run("/opt/own/bin/foliomem", *LIMITED[1:]) == "16000 True\n"
    root.run(installer, "--prefix", "/opt/own", "--uninstall")
    assert not (root.path / "opt/own/bin").exists()
    root.check_it_runs()
    root.run(installer, "--uninstall")
    root.check_nothing_is_left()


def test_the_installer_needs_no_root(dist, tmp_path):
    with tarfile.open(dist("tarball")) as archive:
        archive.extractall(tmp_path, filter="tar")
    installer = next(tmp_path.glob("foliomem-*/install.sh"))
    prefix = tmp_path / "own"
    plain([installer, f"--prefix={prefix}"]).ok()
    got = plain([prefix / "bin/foliomem", "run", "--limit", "32M", "--", sys.executable, "-c", PROGRAM]).ok()
    assert got.out == b"16000 True\n"
    plain([installer, f"--prefix={prefix}", "--uninstall"]).ok()
    assert not prefix.exists()
    again = plain([installer, f"--prefix={prefix}", "--uninstall"])
    assert again.code == 1 and "nothing is installed" in again.err
    assert plain([installer, "--wrong"]).code == 2


# ---- OCI ----

def blob(layout, descriptor):
    """A blob of a layout, which is what its digest says."""
    kind, _, name = descriptor["digest"].partition(":")
    content = (layout / "blobs" / kind / name).read_bytes()
    assert hashlib.new(kind, content).hexdigest() == name and len(content) == descriptor["size"]
    return content


def test_the_image_is_valid(dist):
    layout = dist("oci")
    assert json.loads((layout / "oci-layout").read_text()) == {"imageLayoutVersion": "1.0.0"}
    index = json.loads((layout / "index.json").read_text())
    manifest = json.loads(blob(layout, index["manifests"][0]))
    configuration = json.loads(blob(layout, manifest["config"]))
    layers = [gzip.decompress(blob(layout, layer)) for layer in manifest["layers"]]
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    assert (configuration["os"], configuration["architecture"]) == ("linux", "amd64")
    if shutil.which("skopeo"):
        assert b"foliomem" in plain(["skopeo", "inspect", f"oci:{layout}"]).ok().out


@needs_root
def test_the_image_is_copied_into_another(dist, root):
    layout = dist("oci")
    manifest = json.loads(blob(layout, json.loads((layout / "index.json").read_text())["manifests"][0]))
    # COPY --from=foliomem /usr/local/ /usr/local/
    with tarfile.open(fileobj=io.BytesIO(gzip.decompress(blob(layout, manifest["layers"][0])))) as layer:
        layer.extractall(root.path, filter="tar")
    root.check_it_runs()


# ---- RPM ----

@needs_root
@pytest.mark.skipif(not shutil.which("rpm"), reason="no rpm here")
@soak_only
def test_the_rpm(dist, root):
    package = dist("rpm")
    # The root has no database of RPM's, and no package that it could depend on.
    rpm = ["rpm", "--root", root.path, "--dbpath", "/tmp/rpm", "--nodeps", "--nosignature"]
    plain([*rpm, "-i", package]).ok()
    root.check_it_runs()
    root.check_the_group_may()
    plain([*rpm, "-U", "--force", package]).ok()
    root.check_the_group_may()
    assert plain([*rpm, "-V", "foliomem"]).code == 0
    plain([*rpm, "-e", "foliomem"]).ok()
    root.check_nothing_is_left()


# ---- crates ----

def test_the_crates_have_what_a_registry_and_its_readers_need(dist):
    files = sorted(dist("crates").glob("*.crate"))
    assert len(files) >= 10
    for file in files:
        with tarfile.open(file) as crate:
            folder, names = file.stem, set(crate.getnames())
            manifest = tomllib.loads(crate.extractfile(f"{folder}/Cargo.toml").read().decode())
        assert {f"{folder}/{name}" for name in ("README.md", "LICENSE-APACHE", "LICENSE-MIT", "Cargo.toml.orig")} <= names, file
        assert all(name.startswith(f"{folder}/") and "/target/" not in name for name in names), file
        assert manifest["package"]["license"] == "MIT OR Apache-2.0" and manifest["package"]["description"]
        # A registry takes no dependency without a version.
        sections = [manifest.get(kind, {}) for kind in ("dependencies", "build-dependencies", "dev-dependencies")]
        assert all(isinstance(needs, str) or needs.get("version") for section in sections for needs in section.values()), file


@soak_only
def test_the_crates_build_from_what_would_be_published(dist, tmp_path):
    crates = dist("crates")
    for file in crates.glob("*.crate"):
        with tarfile.open(file) as crate:
            crate.extractall(tmp_path, filter="data")
    folders = sorted(path.name for path in tmp_path.iterdir())
    patches = "".join(f'{folder.rpartition("-")[0]} = {{ path = "{folder}" }}\n' for folder in folders)
    (tmp_path / "Cargo.toml").write_text(f'[workspace]\nresolver = "3"\nmembers = ["*"]\nexclude = ["target"]\n[patch.crates-io]\n{patches}')
    plain(["cargo", "check", "--workspace"], env={"CARGO_TARGET_DIR": tmp_path / "target"}, cwd=tmp_path, timeout=1200).ok()


# ---- the action ----

class Job:
    """A job of a runner: what the action writes into its files, later steps see."""

    def __init__(self, folder, package):
        self.temp, self.package = folder / "temp", package
        self.temp.mkdir()
        self.files = {f"GITHUB_{name}": folder / name for name in ("PATH", "STATE", "STEP_SUMMARY")}
        for file in self.files.values():
            file.touch()
        self.env = {**self.files, "RUNNER_TEMP": self.temp}

    def act(self, script, **env):
        return plain(["node", REPO / "packaging/action" / script], env={**self.env, **env})

    def start(self, limit):
        return self.act("main.js", INPUT_LIMIT=limit, INPUT_PACKAGE=self.package)

    def step(self, script, shell="bash"):
        """Runs a step as the runner does: with the shell that PATH leads to."""
        path = os.pathsep.join([*reversed(self.files["GITHUB_PATH"].read_text().split()), os.environ["PATH"]])
        file = self.temp / f"{len(list(self.temp.iterdir()))}.sh"
        file.write_text(script)
        options = ["--noprofile", "--norc", "-eo", "pipefail"] if shell == "bash" else ["-e"] if shell == "sh" else []
        return plain([shutil.which(shell, path=path), *options, file], env={**self.env, "PATH": path})

    def finish(self):
        state = dict(line.split("=", 1) for line in self.files["GITHUB_STATE"].read_text().splitlines())
        self.act("post.js", **{f"STATE_{name}": value for name, value in state.items()}).ok()
        return self.files["GITHUB_STEP_SUMMARY"].read_text()


@pytest.mark.skipif(not shutil.which("node"), reason="no node here")
def test_the_action_limits_the_steps_of_a_job(dist, tmp_path):
    job = Job(tmp_path, dist("tarball"))
    job.start("40M").ok()
    check = f"python3 - <<'END'\n{PROGRAM}\nEND\n"
    assert job.step(f"# builds|all\n{check}").ok().out == b"16000 True\n"
    assert job.step(check, shell="sh").ok().out == b"16000 True\n"
    assert job.step("foliomem doctor >/dev/null; exit 7").code == 7
    # A shell inside a step is the real one, in the same run.
    inner = job.step("bash -c 'readlink /proc/$PPID/exe; foliomem ctl $$ status --json; true'").ok()
    assert b'"limit_bytes": 41943040' in inner.out and inner.out.splitlines()[0].endswith(b"bash")
    # One that is no step is the real one, too.
    path = job.files["GITHUB_PATH"].read_text().split()[-1]
    assert plain([f"{path}/bash", "-c", "grep -c memfd:foliomem /proc/self/maps || true"]).ok().out == b"0\n"
    summary = job.finish()
    rows = [line for line in summary.splitlines() if line.startswith("| `")]
    assert len(rows) == 4 and summary.startswith("### foliomem\n")
    assert re.fullmatch(r"\| `# builds\\\|all` \| 40 MiB.* \| \d+ MiB \| \d+ MiB [\d.]+x \| [\d.]+ s \| [\d.]+ s \|", rows[0]), rows[0]


@pytest.mark.skipif(not shutil.which("node"), reason="no node here")
def test_the_action_says_what_is_wrong(dist, tmp_path):
    job = Job(tmp_path, dist("tarball"))
    wrong = job.start("much")
    assert wrong.code == 1 and b"::error::foliomem: " in wrong.out and "much" in wrong.err
    assert not job.files["GITHUB_PATH"].read_text(), "later steps run as they are"
    job.start("auto").ok()
    assert job.step("exit 0").code == 0
    other = job.act("main.js", GITHUB_ACTION_REF="main")
    assert other.code == 1 and b"main is no release" in other.out
