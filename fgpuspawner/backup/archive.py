"""The backup file: databases, configuration, and a manifest with their digests, in a gzipped tar."""

from __future__ import annotations

import json
import os
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from hashlib import file_digest
from pathlib import Path, PurePosixPath
from typing import Any

from fgpu_scheduler import schema_revision
from fgpuspawner.backup.databases import SQLITE, BackupFailed, check

MOST_BYTES, MOST_OTHER_BYTES, MOST_FILES = 64 << 30, 16 << 20, 1000
"""Limits of a backup: bytes of all databases, bytes of each other file, number of files. After years databases have
some GiB.
"""
MANIFEST = "manifest.json"
DATABASES = "databases/"
CONFIG = "config/"


@dataclass(frozen=True, slots=True)
class Manifest:
    """The description in a backup.

    ``made_at`` is in UTC; ``databases`` has the kind of each by name; ``digests`` the SHA-256 of each file by path;
    ``schema`` the revision of the scheduler's database.
    """

    made_at: str
    version: str
    jupyterhub: str
    installation: str
    databases: Mapping[str, str]
    digests: Mapping[str, str] = field(default_factory=dict)
    schema: str = field(default_factory=schema_revision)


def pack(folder: Path, manifest: Manifest, to: Path) -> Manifest:
    """Write the files below ``folder`` into a new archive, atomically and readable only by its owner.

    Returns the manifest with their digests.
    """
    found = sorted(path for path in folder.rglob("*") if path.is_file())
    digests = {str(path.relative_to(folder)): _digest(path) for path in found}
    whole = Manifest(**{**asdict(manifest), "digests": digests})
    (folder / MANIFEST).write_text(json.dumps(asdict(whole), indent=2))
    draft = to.with_name(f".{to.name}.draft")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
            with tarfile.open(fileobj=file, mode="w:gz", compresslevel=6) as packed:
                for name in (MANIFEST, *digests):
                    packed.add(folder / name, arcname=name, recursive=False)
            file.flush()
            os.fsync(file.fileno())
        draft.rename(to)
    finally:
        draft.unlink(missing_ok=True)
    return whole


@contextmanager
def unpacked(archive: Path) -> Iterator[tuple[Path, Manifest]]:
    """Unpack a backup into a temporary folder, and check every file's digest and every database."""
    with tempfile.TemporaryDirectory(prefix="fgpu-backup-") as name:
        folder = Path(name)
        try:
            with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:gz") as packed:
                _unpack(packed, folder)
        except (FileNotFoundError, PermissionError):
            raise
        except (tarfile.TarError, EOFError, OSError) as e:
            raise BackupFailed(f"{archive} is no backup, or damaged: {e}") from None
        manifest = _manifest(archive, folder)
        for path, digest in manifest.digests.items():
            if not (folder / path).is_file() or _digest(folder / path) != digest:
                raise BackupFailed(f"{archive} is damaged: {path} is not what was backed up")
        for database, kind in manifest.databases.items():
            check(folder / database_file(database, kind), kind)
        yield folder, manifest


def database_file(name: str, kind: str) -> str:
    """Return a database's path in the archive."""
    return f"{DATABASES}{name}.{'sqlite' if kind == SQLITE else 'pgdump'}"


def _unpack(packed: tarfile.TarFile, folder: Path) -> None:
    """Write files below the folder and nothing else. Python before 3.11.4 (Debian 12) has no extraction filters."""
    left = MOST_BYTES
    for count, member in enumerate(packed):
        most = left if member.name.startswith(DATABASES) else MOST_OTHER_BYTES
        if member.size > most or count >= MOST_FILES:
            raise tarfile.ExtractError(
                f"{member.name} is more than a backup may hold: {MOST_FILES} files, {MOST_BYTES >> 30} GiB of databases, "
                f"and {MOST_OTHER_BYTES >> 20} MiB of each other file"
            )
        left -= member.size
        room = shutil.disk_usage(folder).free
        if member.size > room:
            raise tarfile.ExtractError(
                f"{member.name} has {member.size >> 20} MiB, and {folder.parent} has room for {room >> 20}; set TMPDIR"
            )
        if member.isdir():
            continue
        path = PurePosixPath(member.name)
        file = packed.extractfile(member) if member.isreg() else None
        if file is None or path.is_absolute() or ".." in path.parts:
            raise tarfile.ExtractError(f"{member.name} is no file of a backup")
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        with file, target.open("xb") as to:
            shutil.copyfileobj(file, to)


def _manifest(archive: Path, folder: Path) -> Manifest:
    try:
        found: dict[str, Any] = json.loads((folder / MANIFEST).read_text())
        if found.get("schema") != schema_revision():
            raise BackupFailed(
                f"{archive} is of fgpuspawner {found['version']}, whose tables this version cannot use; restore it with "
                f"that version, or start with an empty database (tar xzf {archive} config unpacks the configuration)"
            )
        return Manifest(**found)
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise BackupFailed(f"{archive} is no backup of fgpuspawner: {e!r}") from None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()
