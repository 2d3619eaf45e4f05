"""An OCI image layout with nothing but the command and the agent, to `COPY --from`.

It is a folder (image-spec 1.0): `docker build --build-context foliomem=oci-layout://target/dist/oci`, and podman and buildah read it
as oci:target/dist/oci.
"""
from __future__ import annotations

import datetime
import gzip
import hashlib
import json
from pathlib import Path
from typing import Any

from .contents import LEVEL, LICENSE, NAME, SUMMARY, VERSION, epoch, fresh, programs
from .tarball import tar_of

PREFIX = "usr/local"
IMAGE = "application/vnd.oci.image"


def digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def build(out: Path) -> list[Path]:
    """Writes the layout."""
    layout = fresh(out / "oci")
    blobs = layout / "blobs/sha256"
    blobs.mkdir(parents=True)

    def blob(content: bytes, kind: str) -> dict[str, Any]:
        name = digest(content)
        (blobs / name.partition(":")[2]).write_bytes(content)
        return {"mediaType": f"{IMAGE}.{kind}", "digest": name, "size": len(content)}

    def described(value: dict[str, Any], kind: str) -> dict[str, Any]:
        return blob(json.dumps(value, indent=1).encode(), kind)

    files = tar_of(programs(with_companions=False), PREFIX)
    layer = blob(gzip.compress(files, LEVEL, mtime=0), "layer.v1.tar+gzip")
    created = datetime.datetime.fromtimestamp(epoch(), datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
    labels = {
        "org.opencontainers.image.title": NAME,
        "org.opencontainers.image.description": SUMMARY,
        "org.opencontainers.image.version": VERSION,
        "org.opencontainers.image.licenses": LICENSE,
    }
    configuration = described({
        "created": created,
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": [f"/{PREFIX}/bin/{NAME}"], "Labels": labels},
        "rootfs": {"type": "layers", "diff_ids": [digest(files)]},
        "history": [{"created": created, "created_by": "scripts/dist oci"}],
    }, "config.v1+json")
    manifest = described({
        "schemaVersion": 2,
        "mediaType": f"{IMAGE}.manifest.v1+json",
        "config": configuration,
        "layers": [layer],
        "annotations": labels,
    }, "manifest.v1+json")
    manifest["annotations"] = {"org.opencontainers.image.ref.name": VERSION}
    manifest["platform"] = {"architecture": "amd64", "os": "linux"}
    index = {"schemaVersion": 2, "mediaType": f"{IMAGE}.index.v1+json", "manifests": [manifest]}
    (layout / "index.json").write_text(json.dumps(index, indent=1) + "\n")
    (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}\n')
    return [layout]
