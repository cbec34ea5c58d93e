"""The files image: it has everything large that a session needs, and the same files give the same bytes."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.kubernetes.files import (
    NoFilesImage,
    digest_of,
    write_files_image,
    write_image,
)
from fgpuspawner.isolation import native
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU

SMALL_BYTES = 4096
"""What a pod's definition carries itself."""
needs_build = pytest.mark.skipif(native.find() is None, reason=native.NOT_BUILT)


def written(reference: str = "fgpuspawner/files:1") -> bytes:
    whole = io.BytesIO()
    write_files_image(native.FOLDER, whole, reference=reference)
    return whole.getvalue()


def opened(image: bytes) -> tuple[dict[str, Any], dict[str, tarfile.TarInfo], dict[str, bytes]]:
    """Return the image's configuration, and the members and files of its layer; its digests are checked on the way."""
    with tarfile.open(fileobj=io.BytesIO(image)) as archive:
        parts = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
    (manifest,) = json.loads(parts["manifest.json"])
    (layer,) = manifest["Layers"]
    described = parts[manifest["Config"]]
    assert manifest["Config"] == hashlib.sha256(described).hexdigest() + ".json"
    config = json.loads(described)
    assert config["rootfs"]["diff_ids"] == ["sha256:" + hashlib.sha256(parts[layer]).hexdigest()]
    with tarfile.open(fileobj=io.BytesIO(parts[layer])) as archive:
        members = {m.name: m for m in archive}
        files = {m.name: archive.extractfile(m).read() for m in archive if m.isfile()}  # type: ignore[union-attr]
    return config, members, files


def prepared(folder: Path) -> Prepared:
    """What a session of containers is given on a simulated GPU."""
    gpus = [{"name": "one", "cpu": 8, "memory_mib": 8192, "gpus": {"simulated": 1}}]
    (folder / "data").mkdir()
    settings = FGPU(data_dir=str(folder / "data"), accounting_dir=str(folder / "accounts"), nodes=gpus)
    nodes = settings.discover_nodes({})
    isolation = Isolation(settings, nodes)
    isolation.open(own_root=True, installation="test")
    (node,) = nodes
    (device,) = node.devices
    asked = Request("alice", "s", "python", node.resource_group, 500, 1000, 512)
    place = Placement(node.id, (Share(device.uuid, 500, device.memory_mib // 4, 25),))
    session = Session(1, asked, SessionState.PREPARING, 0, attempt=1, placement=place)
    return isolation.prepare(session, [1])


@needs_build
def test_image_has_every_large_file_by_its_digest(tmp_path: Path) -> None:
    files = opened(written())[2]
    # What sessions write is in no image.
    given = [m for m in prepared(tmp_path).mounts if m.read_only and m.source.is_file()]
    large = {m.target: m.source for m in given if m.source.stat().st_size > SMALL_BYTES}
    for target in ("libfgpu.so", "probe-static", "fgpu-smi", "simulated/libcuda.so.1"):
        assert f"/run/fgpu/{target}" in large
    for source in large.values():
        assert files[f"files/{digest_of(source)}"] == source.read_bytes()


@needs_build
def test_image_runs_put_files_unprivileged() -> None:
    config, members, files = opened(written())
    assert config["config"]["Entrypoint"] == ["/put-files"]
    # By number: Kubernetes cannot see of a name that it is not root's.
    assert config["config"]["User"] == "65534:65534"
    found = native.find()
    assert found is not None
    assert files["put-files"] == found.put_files.read_bytes()
    assert {m.mode for m in members.values()} == {0o755}
    assert {(m.uid, m.gid, m.mtime) for m in members.values()} == {(0, 0, 0)}


@needs_build
def test_equal_files_give_equal_images() -> None:
    assert written() == written()
    assert opened(written("other/files:2"))[2] == opened(written())[2]


def test_no_image_is_written_without_built_parts(tmp_path: Path) -> None:
    with pytest.raises(NoFilesImage, match="libfgpu is not built; install a C compiler"):
        write_files_image(tmp_path, tmp_path / "files.tar", reference="files:1")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("machine", "name"), [(62, "amd64"), (183, "arm64")])
def test_image_has_its_programs_architecture(tmp_path: Path, machine: int, name: str) -> None:
    program = b"\x7fELF".ljust(18, b"\0") + bytes([machine, 0])
    write_image(tmp_path / "one.tar", {"bin/one": program}, ["/bin/one"], reference="one:1")
    config, members, _ = opened((tmp_path / "one.tar").read_bytes())
    assert (config["architecture"], sorted(members)) == (name, ["bin", "bin/one"])


@pytest.mark.parametrize("program", [b"#!/bin/sh", b"\x7fELF".ljust(18, b"\0") + b"\x03\0"])
def test_program_for_another_machine_is_refused(tmp_path: Path, program: bytes) -> None:
    with pytest.raises(NoFilesImage, match="for amd64 and arm64 machines only"):
        write_image(tmp_path / "one.tar", {"one": program}, ["/one"], reference="one:1")
    assert not list(tmp_path.iterdir())
