"""A session's files: the image that brings libfgpu into pods, and the init container that puts them into place.

Large files (libfgpu, the probes, the simulated driver) are in the image, each found by the digest of its content: a
session gets exactly its Hub's files, or a message that the image is of another version. Small files of the session are
written into the pod. All are in a volume of the pod that the session can only read.

The image is written without any engine, and equal files give equal bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import posixpath
import tarfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from fgpu_scheduler import FGPUError
from fgpuspawner import __version__
from fgpuspawner.isolation.base import IN_CONTAINER, Prepared
from fgpuspawner.isolation.native import NOT_BUILT, command_files, find

INIT = "fgpu-files"
READ, WRITTEN = "fgpu-files", "fgpu-written"
READ_AT, WRITTEN_AT = "/to/read", "/to/written"
BELOW = "outside"
"""The volume's folder for files that are mounted outside of the session's own folder."""
SMALL_BYTES = 4096
"""Smaller content goes with the pod. A variable may hold 128 KiB."""
WRITTEN_MIB = 32
NOBODY = 65534
"""The files' owner, so that the session's user cannot change them."""

FOLDER = "files"
"""The image's folder of files, named by their digests, from which put-files copies."""
REFERENCE = f"fgpuspawner/files:{__version__}"
_ARCHITECTURES = {62: "amd64", 183: "arm64"}
"""By the machine number of an ELF file."""


@dataclass(frozen=True, slots=True)
class PodFiles:
    """The parts of a pod for its files: lines for the init container, volumes, and mounts of the session."""

    lines: tuple[str, ...]
    volumes: tuple[Mapping[str, Any], ...]
    mounts: tuple[Mapping[str, Any], ...]

    @property
    def targets(self) -> frozenset[str]:
        """The paths in the session where our files are mounted."""
        return frozenset(str(mount["mountPath"]) for mount in self.mounts)


def pod_files(prepared: Prepared) -> PodFiles:
    """Return how a session's files get into its pod; raises OSError if one cannot be read."""
    lines: list[str] = []
    mounts = [_mount(READ, IN_CONTAINER, "run")]
    # A later mount covers an earlier one at the same place.
    for target, mount in sorted(
        {posixpath.normpath(mount.target): mount for mount in prepared.mounts}.items()
    ):
        if mount.source.is_dir():
            if target != IN_CONTAINER:
                raise OSError(f"{mount.source} is a folder, which is not session_files into pods")
            continue
        inside = _below(target)
        if not mount.read_only:
            # A file that the session writes: in a volume of its own, empty at first.
            name = f"file{len(lines)}"
            lines += [f"666 written/{name} base64:", f"444 read/{inside} base64:"]
            mounts.append(_mount(WRITTEN, target, name, read_only=False))
            continue
        mode = "555" if mount.source.stat().st_mode & 0o100 else "444"
        lines.append(f"{mode} read/{inside} {_content(mount.source)}")
        # Each file is a mount: the session cannot replace it, and fgpu-verify checks that.
        mounts.append(_mount(READ, target, inside))
    for path in sorted(prepared.in_memory):
        name = f"memory{path.replace('/', '-')}"
        lines += [f"755 read/{_below(path)}/ -", f"777 written/{name}/ -"]
        mounts.append(_mount(WRITTEN, path, name, read_only=False))
    volumes = (
        {"name": READ, "emptyDir": {}},
        {"name": WRITTEN, "emptyDir": {"medium": "Memory", "sizeLimit": f"{WRITTEN_MIB}Mi"}},
    )
    return PodFiles(tuple(lines), volumes, tuple(mounts))


def _mount(volume: str, target: str, below: str, *, read_only: bool = True) -> dict[str, Any]:
    return {"name": volume, "mountPath": target, "subPath": below, "readOnly": read_only}


def _below(target: str) -> str:
    """Return a file's path in the volume."""
    if target.startswith(f"{IN_CONTAINER}/"):
        return f"run/{target.removeprefix(IN_CONTAINER + '/')}"
    return f"{BELOW}/{target.lstrip('/')}"


def _content(source: Path) -> str:
    if source.stat().st_size <= SMALL_BYTES:
        return f"base64:{base64.b64encode(source.read_bytes()).decode()}"
    return f"sha256:{digest_of(source)}"


def init_container(image: str, session_files: PodFiles, *, pull_policy: str) -> dict[str, Any]:
    """Return the init container that puts a session's files into place."""
    return {
        "name": INIT,
        "image": image,
        "imagePullPolicy": pull_policy,
        "args": ["/to"],
        "env": [{"name": "FGPU_FILES", "value": "\n".join(session_files.lines)}],
        "volumeMounts": [{"name": READ, "mountPath": READ_AT}, {"name": WRITTEN, "mountPath": WRITTEN_AT}],
        "resources": {
            "limits": {"cpu": "200m", "memory": "64Mi"},
            "requests": {"cpu": "10m", "memory": "64Mi"},
        },
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
            "runAsNonRoot": True,
            "runAsUser": NOBODY,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


# --- The files image ---


class NoFilesImage(FGPUError):
    """The files image cannot be written; the message says what is missing."""

    code = "no_files_image"


def digest_of(path: Path) -> str:
    """Return a file's SHA-256 digest, 64 hexadecimal digits: its name in the image."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_files_image(native: Path, out: BinaryIO | Path, *, reference: str) -> None:
    """Write the image ``reference`` with the parts in ``native`` and the commands for sessions.

    The format is "docker-archive", which Docker, containerd (ctr) and skopeo load. A file appears whole or not at all.

    Raises:
        NoFilesImage: ``native`` lacks a part.
        OSError: a file cannot be read or written.
    """
    found = find(native)
    if found is None or not found.put_files.is_file():
        raise NoFilesImage(NOT_BUILT)
    program = found.put_files.read_bytes()
    contents = [*(part.read_bytes() for part in found.parts), *command_files().values()]
    files = {f"{FOLDER}/{hashlib.sha256(content).hexdigest()}": content for content in contents}
    write_image(out, {**files, "put-files": program}, ["/put-files"], reference=reference)


def write_image(
    out: BinaryIO | Path, files: Mapping[str, bytes], entry_point: Sequence[str], *, reference: str
) -> None:
    """Write an image of one layer with these files, by their paths; every user can read and run them."""
    if isinstance(out, Path):
        draft = out.with_name(f"{out.name}.new")
        try:
            with draft.open("wb") as file:
                write_image(file, files, entry_point, reference=reference)
            draft.replace(out)
        finally:
            draft.unlink(missing_ok=True)
        return
    layer = _tar(files, mode=0o755)
    config = {
        "architecture": _architecture(files[entry_point[0].lstrip("/")]),
        "os": "linux",
        "created": "1970-01-01T00:00:00Z",
        "config": {"Entrypoint": list(entry_point), "User": f"{NOBODY}:{NOBODY}", "WorkingDir": "/"},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{hashlib.sha256(layer).hexdigest()}"]},
        "history": [{"created": "1970-01-01T00:00:00Z", "created_by": f"fgpuspawner {__version__}"}],
    }
    described = json.dumps(config, sort_keys=True).encode()
    name = f"{hashlib.sha256(described).hexdigest()}.json"
    manifest = [{"Config": name, "RepoTags": [reference], "Layers": ["layer/layer.tar"]}]
    members = {name: described, "layer/layer.tar": layer, "manifest.json": json.dumps(manifest).encode()}
    out.write(_tar(members, mode=0o644))


def _tar(files: Mapping[str, bytes], *, mode: int) -> bytes:
    whole = io.BytesIO()
    with tarfile.open(fileobj=whole, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for folder in sorted({str(parent) for path in files for parent in Path(path).parents} - {"."}):
            member = tarfile.TarInfo(folder)
            member.type, member.mode = tarfile.DIRTYPE, 0o755
            archive.addfile(member)
        for path, content in sorted(files.items()):
            member = tarfile.TarInfo(path)
            member.size, member.mode = len(content), mode
            archive.addfile(member, io.BytesIO(content))
    return whole.getvalue()


def _architecture(program: bytes) -> str:
    # The program's, which may differ from this machine's: bytes 18 and 19 of an ELF file.
    machine = int.from_bytes(program[18:20], "little")
    if program[:4] != b"\x7fELF" or machine not in _ARCHITECTURES:
        raise NoFilesImage(f"the files image is for {' and '.join(_ARCHITECTURES.values())} machines only")
    return _ARCHITECTURES[machine]
