"""The commands ``fgpu backup`` and ``fgpu restore``: an installation in one file, and from it."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import click
import jupyterhub

from fgpu_scheduler import Claim, PrivateImages, SessionState, StoreUnavailable, lock_file
from fgpuspawner import __version__
from fgpuspawner.backup.archive import CONFIG, Manifest, database_file, pack, unpacked
from fgpuspawner.backup.databases import BackupFailed, check_free, dump, kind_of, put_back
from fgpuspawner.cli.command import FILE, UsageError, command, config_option, read_only
from fgpuspawner.cli.hub_config import loaded
from fgpuspawner.cli.units import as_hub_user
from fgpuspawner.settings import FGPU

SCHEDULER, HUB = "scheduler", "hub"
NAMED = "fgpu-%Y%m%dT%H%M%SZ.tar.gz"
PATTERN = "fgpu-????????T??????Z.tar.gz"


@dataclass(frozen=True, slots=True)
class Here:
    """What is backed up on this machine, and where it is put back."""

    settings: FGPU
    config: Path
    databases: dict[str, tuple[str, str]]
    """By name: the URL, and the setting that says it. The scheduler's first: a Hub ends what it does not know."""


@command("backup")
@click.argument("to", metavar="FILE", type=FILE)
@click.option("--keep", type=int, metavar="N", help="in a folder: remove all but the newest N backups")
@click.option("--verify", is_flag=True, help="make none: say whether this one can be restored")
@config_option
def backup_command(to: str, keep: int | None, verify: bool, config: str) -> list[str]:
    """Write databases, configuration and catalogue into one file, while the Hub runs.

    FILE is the new file; or a folder, in which the file is named by the time. It has no homes and no images.
    """
    if verify:
        with unpacked(Path(to)) as (_, manifest):
            return [f"OK: {to} can be restored", *_contents(manifest)]
    if keep is not None and (keep < 1 or not Path(to).is_dir()):
        raise UsageError("--keep: a number of at least 1, with a folder")
    file, manifest = _back_up(here_of(config), Path(to))
    lines = [f"OK: {file}, {file.stat().st_size // 1024} KiB", *_contents(manifest)]
    if keep is not None:
        for old in sorted(Path(to).glob(PATTERN))[:-keep]:
            old.unlink()
            lines.append(f"  removed {old.name}")
    return lines


def _back_up(here: Here, to: Path) -> tuple[Path, Manifest]:
    now = datetime.now(UTC)
    file = to / now.strftime(NAMED) if to.is_dir() else to
    if not file.absolute().parent.is_dir():
        raise BackupFailed(f"there is no folder {file.absolute().parent}; make it, or name another")
    if file.exists():
        raise BackupFailed(f"{file} is there already; name another file")
    with tempfile.TemporaryDirectory(prefix=".fgpu-backup-", dir=file.absolute().parent) as name:
        folder = Path(name)
        for part in ("databases", CONFIG):
            (folder / part).mkdir()
        kinds = {}
        for database, (url, setting) in here.databases.items():
            kinds[database] = kind_of(url, setting)
            dump(url, folder / database_file(database, kinds[database]), setting=setting)
        shutil.copyfile(here.config, folder / CONFIG / here.config.name)
        if here.settings.catalogue:
            shutil.copyfile(here.settings.catalogue_path(), folder / CONFIG / "catalogue.toml")
        with read_only(here.settings.database_url()) as store:
            installation = store.installation_id
        manifest = Manifest(
            made_at=now.isoformat(timespec="seconds"),
            version=__version__,
            jupyterhub=jupyterhub.__version__,
            installation=installation,
            databases=kinds,
        )
        return file, pack(folder, manifest, file)


@command("restore")
@click.argument("file", type=FILE)
@config_option
def restore_command(file: str, config: str) -> list[str]:
    """Put the databases of a backup where this machine's configuration has them, while no Hub runs.

    What was there is kept beside it.
    """
    with unpacked(Path(file)) as (folder, manifest):
        here = here_of(config)
        lacking = here.databases.keys() - manifest.databases.keys()
        if lacking:
            raise BackupFailed(f"{file} has no database {', '.join(sorted(lacking))}")
        data = here.settings.data_path()
        data.mkdir(parents=True, exist_ok=True, mode=0o700)
        with (
            # Root may run this, and the Hub has a user of its own: every file has to be that user's.
            as_hub_user(data, folder),
            lock_file(data / "hub.lock", f"a Hub runs on {data}; stop it first"),
            contextlib.closing(Claim(here.settings.database_url())) as claim,
        ):
            claim.take()
            for name, (url, setting) in here.databases.items():
                of, own = manifest.databases[name], kind_of(url, setting)
                if of != own:
                    words = f"the backup is of {of}, and this is {own}; name a {of} database"
                    raise BackupFailed(f"{setting}: {words}")
                check_free(url, setting=setting)
            lines = [f"OK: restored the backup of {manifest.made_at}"]
            aside = time.strftime(".before-%Y%m%dT%H%M%S")
            for name, (url, setting) in here.databases.items():
                own_file = folder / database_file(name, manifest.databases[name])
                kept = put_back(own_file, url, setting=setting, aside=aside)
                lines.append(f"  database {name}" + (f"; what was there is {kept}" if kept else ""))
            return [*lines, *_follows(here)]


def here_of(config: str) -> Here:
    """Return what a Hub's configuration says of its databases; no engine is asked."""
    found, settings = loaded(config)
    hub = found.JupyterHub
    return Here(
        settings,
        Path(config).absolute(),
        {
            SCHEDULER: (settings.database_url(), "c.FGPU.db_url"),
            HUB: (str(hub.db_url), "c.JupyterHub.db_url"),
        },
    )


def _contents(manifest: Manifest) -> list[str]:
    databases = ", ".join(f"{name} ({kind})" for name, kind in manifest.databases.items())
    files = [path.removeprefix(CONFIG) for path in manifest.digests if path.startswith(CONFIG)]
    return [
        f"  made at {manifest.made_at} by fgpuspawner {manifest.version}, JupyterHub {manifest.jupyterhub}",
        f"  databases: {databases}",
        f"  files: {', '.join(files)}",
    ]


def _follows(here: Here) -> list[str]:
    try:
        with read_only(here.settings.database_url()) as store:
            states = [session.state for session in store.snapshot(0).sessions]
            images = [image.name for image in PrivateImages(store).all()]
    except StoreUnavailable as e:
        return [f"  next: start the Hub ({e})"]
    waiting = states.count(SessionState.PENDING)
    lines = [
        f"  {waiting} waiting: each keeps its place",
        f"  {len(states) - waiting} under way: the Hub looks for each as it starts; those that are gone end (EXITED)",
    ]
    if images:
        lines.append(
            f"  private images, which must be on the engines: {', '.join(images)} (fgpu images check)"
        )
    return [*lines, "  next: start the Hub; homes are not in a backup"]
