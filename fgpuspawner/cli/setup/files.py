"""The files of an installation, made from the answers. Nothing is read or written here but our own templates."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

import fgpuspawner
from fgpuspawner.cli.setup.answers import Answers
from fgpuspawner.cli.usage import CONFIG_OF_SETUP

ETC, UNITS = "/etc/jupyterhub", "/etc/systemd/system"
CONFIG, TOKEN = CONFIG_OF_SETUP, f"{ETC}/proxy.env"
PASSWORDS = {f"{ETC}/password": 12, f"{ETC}/admin-password": 32}
"""The passwords of `--login password`, and of how many random bytes they are."""
DAEMON = "/etc/docker/daemon.json"
HUB, PROXY, FIREWALL, BACKUP = (
    "jupyterhub.service",
    "jupyterhub-proxy.service",
    "fgpu-firewall.service",
    "fgpu-backup.timer",
)
BACKUPS = "/var/lib/fgpu-backup"


@dataclass(frozen=True, slots=True)
class File:
    """A file as it is to be. With ``of_hub`` the Hub's user may read it too, else its mode says who."""

    path: str
    text: str
    what: str
    mode: int = 0o644
    of_hub: bool = False
    restarts: tuple[str, ...] = ()
    """The units that see a change only when they are restarted."""


@dataclass(frozen=True, slots=True)
class Programs:
    """Where what the units start is."""

    folder: str
    """Of this environment: jupyterhub, fgpu."""
    proxy: str
    proxy_path: str
    """The folders that the proxy needs on its PATH: Node's."""


def units(answers: Answers) -> tuple[str, ...]:
    """Return the units that are started with the machine."""
    return (PROXY, HUB, *((FIREWALL,) if answers.runtime == "docker" else ()), BACKUP)


def files(answers: Answers, programs: Programs, secrets: dict[str, str]) -> list[File]:
    """Return all files of an installation but the engine's; the secrets are the texts of files, by path."""
    made = _Templates(answers, programs)
    reverse = {"caddy": "Caddyfile", "nginx": "nginx.conf"}.get(answers.tls)
    passwords = [
        File(path, secrets[path], "password", 0o640, of_hub=True, restarts=(HUB,))
        for path in PASSWORDS
        if answers.login == "password"
    ]
    return [
        made.file("sysusers.conf", "/etc/sysusers.d/fgpu.conf", "the Hub's user"),
        File(
            TOKEN,
            secrets[TOKEN],
            "what the Hub proves itself to the proxy with",
            0o600,
            restarts=(HUB, PROXY),
        ),
        *passwords,
        made.file(
            "jupyterhub_config.py.j2", CONFIG, "the Hub's configuration", 0o640, of_hub=True, restarts=(HUB,)
        ),
        *([made.file(reverse, f"{ETC}/{reverse}", "to be imported by your web server")] if reverse else []),
        made.file(PROXY, f"{UNITS}/{PROXY}", "the proxy", restarts=(PROXY,)),
        made.file(HUB, f"{UNITS}/{HUB}", "the Hub", restarts=(HUB,)),
        *(
            [made.file(FIREWALL, f"{UNITS}/{FIREWALL}", "the firewall, at every boot", restarts=(FIREWALL,))]
            if answers.runtime == "docker"
            else [made.file("tmpfiles.conf", "/etc/tmpfiles.d/fgpu.conf", "old output of sessions goes")]
        ),
        made.file("fgpu-backup.service", f"{UNITS}/fgpu-backup.service", f"a backup into {BACKUPS}"),
        made.file(BACKUP, f"{UNITS}/{BACKUP}", "every night, the newest 14 kept", restarts=(BACKUP,)),
    ]


def set_of(names: Iterable[str]) -> str:
    """Return the Python that makes a set of these names, in order."""
    return "{" + ", ".join(f'"{name}"' for name in sorted(names)) + "}" if names else "set()"


class _Templates:
    def __init__(self, answers: Answers, programs: Programs) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(Path(__file__).parent / "files"),
            undefined=StrictUndefined,
            autoescape=False,
            trim_blocks=True,
            lstrip_blocks=True,
            keep_trailing_newline=True,
        )
        self._environment.filters["set_of"] = set_of
        api_port, hub_port, service_port = answers.ports
        state = answers.data.removeprefix("/var/lib/") if answers.data.startswith("/var/lib/") else ""
        self._known = {
            **asdict(answers),
            "url": answers.url,
            "port": answers.public_port,
            "api_port": api_port,
            "hub_port": hub_port,
            "service_port": service_port,
            "state_directory": state,
            "groups_of_hub": " ".join(answers.groups_of_hub),
            "programs": programs.folder,
            "proxy": programs.proxy,
            "proxy_path": programs.proxy_path,
            "pages": str(Path(fgpuspawner.__file__).parent / "proxy_pages"),
            "etc": ETC,
        }

    def text(self, name: str) -> str:
        return self._environment.get_template(name).render(self._known)

    def file(
        self,
        name: str,
        path: str,
        what: str,
        mode: int = 0o644,
        *,
        of_hub: bool = False,
        restarts: tuple[str, ...] = (),
    ) -> File:
        return File(path, self.text(name), what, mode, of_hub, restarts)
