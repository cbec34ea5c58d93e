"""The files image: a pod's first container, which puts the larger of a session's files into its folder.

A file is found in it by the digest of what is in it, so a session gets exactly the files that its Hub has, or a message
that the image is of another version. The image is written without any engine, and the same files give the same bytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from fgpu_scheduler import FGPUError
from fgpuspawner import __version__
from fgpuspawner.isolation.native import NOT_BUILT, command_files, find

FOLDER = "files"
"""Where put-files looks for the files, named by their digests, in the image."""
REFERENCE = f"fgpuspawner/files:{__version__}"
NOBODY = "65534:65534"
_ARCHITECTURES = {62: "amd64", 183: "arm64"}
"""By the machine that an ELF file names."""


class NoFilesImage(FGPUError):
    """The image cannot be written; the message says what is missing."""

    code = "no_files_image"


def digest_of(path: Path) -> str:
    """Return the digest of a file, 64 hexadecimal digits, by which the image has it."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_files_image(native: Path, out: BinaryIO | Path, *, reference: str) -> None:
    """Write the image, named ``reference``, of the parts in ``native`` and of the commands for sessions.

    What is written can be loaded by Docker, containerd (ctr) and skopeo ("docker-archive"). A file appears whole or not
    at all.

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
    """Write an image of one layer; all of ``files``, by their paths, can be read and run by everybody."""
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
        "config": {"Entrypoint": list(entry_point), "User": NOBODY, "WorkingDir": "/"},
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
    # Of the program, not of this machine: the header of an ELF file says it in its bytes 18 and 19.
    machine = int.from_bytes(program[18:20], "little")
    if program[:4] != b"\x7fELF" or machine not in _ARCHITECTURES:
        raise NoFilesImage(f"the files image is for {' and '.join(_ARCHITECTURES.values())} machines only")
    return _ARCHITECTURES[machine]
