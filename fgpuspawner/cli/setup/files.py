"""The files of an installation, made from the answers and from fgpuspawner/deploy. Nothing is written here."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import fgpuspawner
from fgpuspawner.cli.command import CONFIG_OF_SETUP
from fgpuspawner.cli.setup.answers import Answers
from fgpuspawner.cli.units import HUB, PROXY

OURS = Path(fgpuspawner.__file__).parent
ETC, UNITS, BACKUPS = "/etc/jupyterhub", "/etc/systemd/system", "/var/lib/fgpu-backup"
CONFIG, TOKEN = CONFIG_OF_SETUP, f"{ETC}/proxy.env"
PASSWORDS = {f"{ETC}/password": 12, f"{ETC}/admin-password": 32}
"""The passwords of `--login password`, and of how many random bytes they are."""
FIREWALL, BACKUP, DISK = "fgpu-firewall.service", "fgpu-backup.timer", "fgpu-disk.path"


@dataclass(frozen=True, slots=True)
class File:
    """A file to write. With mode 0640 its group is that of the Hub's user; it belongs to root."""

    path: str
    text: str
    what: str
    mode: int = 0o644
    restarts: tuple[str, ...] = ()
    """The units that see a change only when they are restarted."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where what the units start is: the folder of this environment's programs, the proxy, and its PATH with Node."""

    folder: str
    proxy: str
    proxy_path: str


def units(answers: Answers) -> tuple[str, ...]:
    """Return the units that are started with the machine."""
    return (PROXY, HUB, *((FIREWALL, DISK) if answers.runtime == "docker" else ()), BACKUP)


def files(answers: Answers, programs: Programs, secrets: dict[str, str]) -> list[File]:
    """Return all files of an installation but the engine's; the secrets are the texts of files, by path."""
    made = Environment(
        loader=FileSystemLoader(OURS / "deploy"), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, keep_trailing_newline=True,
    )  # fmt: skip
    made.filters["set_of"] = set_of
    known = {
        **asdict(answers),
        **dict(zip(("api_port", "hub_port", "service_port"), answers.ports, strict=True)),
        "url": answers.url,
        "port": answers.public_port,
        "state_directory": answers.data.removeprefix("/var/lib/") if answers.in_var_lib else "",
        "groups_of_hub": " ".join(answers.groups_of_hub),
        "programs": programs.folder,
        "proxy": programs.proxy,
        "proxy_path": programs.proxy_path,
        "pages": OURS / "proxy_pages",
        "etc": ETC,
    }
    reverse = {"caddy": "Caddyfile", "nginx": "nginx.conf"}.get(answers.tls)
    docker = answers.runtime == "docker"
    rows = (
        (True, "sysusers.conf", "/etc/sysusers.d/fgpu.conf", "the Hub's user"),
        (True, "jupyterhub_config.py.j2", CONFIG, "the Hub's configuration"),
        (reverse, reverse, f"{ETC}/{reverse}", "to be imported by your web server"),
        (True, PROXY, f"{UNITS}/{PROXY}", "the proxy"),
        (True, HUB, f"{UNITS}/{HUB}", "the Hub"),
        (docker, FIREWALL, f"{UNITS}/{FIREWALL}", "the firewall, at every boot"),
        (docker, "fgpu-disk.service", f"{UNITS}/fgpu-disk.service", "counts the disk's files for the Hub"),
        (docker, DISK, f"{UNITS}/{DISK}", "when the Hub asks"),
        (not docker, "tmpfiles.conf", "/etc/tmpfiles.d/fgpu.conf", "old output of sessions goes"),
        (True, "fgpu-backup.service", f"{UNITS}/fgpu-backup.service", f"a backup into {BACKUPS}"),
        (True, BACKUP, f"{UNITS}/{BACKUP}", "every night, the newest 14 kept"),
    )
    found = []
    for wanted, name, path, what in rows:
        if wanted and name:
            mode = 0o640 if path == CONFIG else 0o644
            restarts = (HUB,) if path == CONFIG else (name,) if name in units(answers) else ()
            found.append(File(path, made.get_template(name).render(known), what, mode, restarts))
    kept = [File(TOKEN, secrets[TOKEN], "what the Hub proves itself to the proxy with", 0o600, (HUB, PROXY))]
    if answers.login == "password":
        kept += [File(path, secrets[path], "password", 0o640, (HUB,)) for path in PASSWORDS]
    return [found[0], *kept, *found[1:]]


def set_of(names: Iterable[str]) -> str:
    """Return the Python that makes a set of these names, in order."""
    return "{" + ", ".join(f'"{name}"' for name in sorted(names)) + "}" if names else "set()"
