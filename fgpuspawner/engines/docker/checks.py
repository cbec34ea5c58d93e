"""What ``fgpu check`` and the Hub report of Docker daemons: safeguards, disk limits, other installations, clocks."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import docker

from fgpuspawner.engines import marks
from fgpuspawner.engines.base import EngineSilent, Held, Safeguard
from fgpuspawner.engines.docker import firewall
from fgpuspawner.engines.docker.address import Address, addresses
from fgpuspawner.engines.docker.client import FAILED, checked_rows
from fgpuspawner.engines.docker.containers import LABEL
from fgpuspawner.engines.docker.create import is_root
from fgpuspawner.engines.docker.daemon import LOOK_TIMEOUT_S, Daemon
from fgpuspawner.meter.file_system import is_counted, mount_of
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import is_elsewhere

T = TypeVar("T")
Info = Mapping[str, Any]

LINES: Mapping[Safeguard, str] = {
    Safeguard.UNPRIVILEGED: 'c.FGPUSpawner.cap_drop = ["ALL"]; c.FGPUSpawner.security_opt = ["no-new-privileges"]',
    Safeguard.FILTERED: "daemon.json without seccomp-profile",
    Safeguard.LIMITS: "an engine with control groups; a rootless one needs them in version 2",
    Safeguard.PROCESSES: "c.FGPUSpawner.pids_limit = 1024",
    Safeguard.PORTS: 'c.FGPU.firewall = "managed-elsewhere", and fgpu firewall --apply as root at every boot',
    Safeguard.COMMANDS: "daemon.json without hosts at tcp://, or with tlsverify",
    Safeguard.REMAPPED: 'daemon.json: {"userns-remap": "default"}',
    Safeguard.READ_ONLY: "c.FGPUSpawner.read_only_root = True",
}
"""The line that turns each safeguard on."""

LOOSER = {"privileged", "cap_add", "network_mode", "pid_mode", "ipc_mode", "userns_mode", "devices"}
"""Settings in ``extra_host_config`` that give a session more than our defaults."""

LIMITING_DRIVERS = ("btrfs", "zfs", "devicemapper")
MOST_APART_S = 5
"""Synchronised clocks are milliseconds apart."""


def _with_client(
    address: Address, client_kwargs: Mapping[str, Any], call: Callable[[docker.APIClient], T]
) -> T:
    """Return the result of a call with a short timeout.

    Raises:
        EngineSilent: the daemon does not answer.
    """
    daemon = Daemon(address, installation="", client_kwargs=client_kwargs)
    try:
        with closing(daemon.another_client(timeout_s=LOOK_TIMEOUT_S)) as client:
            return call(client)
    except FAILED as e:
        raise EngineSilent(str(e)) from e
    finally:
        daemon.close()


def infos(settings: FGPU, client_kwargs: Mapping[str, Any]) -> list[Info | None]:
    """Return each configured daemon's info; None for a silent one. Blocks."""

    def info(address: Address) -> Info | None:
        try:
            # The info lacks the address that we used.
            return _with_client(address, client_kwargs, lambda c: {**c.info(), "at": str(c.base_url)})
        except EngineSilent:
            return None

    return [info(address) for address in addresses(settings.nodes)]


def ports_closed(settings: FGPU) -> bool | None:
    """Return whether the machines' ports are closed to sessions, or will be when the Hub starts."""
    if settings.firewall == "managed-elsewhere":
        return True
    if any(is_elsewhere(spec) for spec in settings.nodes):
        return False
    # This process may run as another user than the Hub.
    with suppress(firewall.FirewallFailed):
        return firewall.can_apply() or None
    return None


def judge(
    daemons: Sequence[Info | None], own: Mapping[str, Any], *, ports: bool | None
) -> dict[Safeguard, Held]:
    """Return the state of each safeguard. ``own`` are the containers' settings with their defaults."""
    host = own["extra_host_config"]
    opaque = (
        callable(host) or callable(own["extra_create_kwargs"]) or "host_config" in own["extra_create_kwargs"]
    )
    given: Mapping[str, Any] = {} if opaque else host
    security: Sequence[str] = given.get("security_opt", own["security_opt"]) or ()
    met: dict[Safeguard, bool | None] = {
        Safeguard.UNPRIVILEGED: (
            "ALL" in (given.get("cap_drop", own["cap_drop"]) or ())
            and any(o in ("no-new-privileges", "no-new-privileges:true") for o in security)
            and not is_root(own["container_user"])
            and LOOSER.isdisjoint(k for k, v in given.items() if v)
        ),
        Safeguard.FILTERED: _all([*(map(_filters, daemons)), _no_profile_of_its_own(security)]),
        Safeguard.LIMITS: _all(_can(info, "MemoryLimit", "CpuCfsQuota") for info in daemons),
        Safeguard.PROCESSES: _all(
            [
                *(_can(info, "PidsLimit") for info in daemons),
                (given.get("pids_limit", own["pids_limit"]) or 0) > 0,
            ]
        ),
        Safeguard.PORTS: ports,
        Safeguard.COMMANDS: _all(map(_is_commanded_by_us, daemons)),
        Safeguard.REMAPPED: _all([*(map(_remaps, daemons)), given.get("userns_mode") != "host"]),
        Safeguard.READ_ONLY: bool(given.get("read_only", own["read_only_root"])),
    }
    if opaque:
        # A function's result for each session is unknown now.
        own_words = {Safeguard.PORTS, Safeguard.COMMANDS, Safeguard.LIMITS}
        met = {guard: found if guard in own_words or not found else None for guard, found in met.items()}
    return {guard: Held(found, LINES[guard]) for guard, found in met.items()}


def _all(found: Iterable[bool | None]) -> bool | None:
    """Return True if all are met, False if one is not, otherwise None."""
    each = list(found)
    return False if False in each else None if None in each else True


def _options(info: Info) -> list[dict[str, str]]:
    """Return the daemon's security options, such as ``name=seccomp,profile=default``, as dicts."""
    said = info.get("SecurityOptions") or ()
    return [dict(part.partition("=")[::2] for part in option.split(",")) for option in said]


def _can(info: Info | None, *limits: str) -> bool | None:
    """Return whether the daemon can enforce these limits: without control groups it ignores them."""
    return None if info is None else all(info.get(limit) for limit in limits)


def _remaps(info: Info | None) -> bool | None:
    return None if info is None else any(o.get("name") in ("userns", "rootless") for o in _options(info))


def _filters(info: Info | None) -> bool | None:
    if info is None:
        return None
    profiles = [o.get("profile", "") for o in _options(info) if o.get("name") == "seccomp"]
    if not profiles or "unconfined" in profiles:
        return False
    # What the administrator's own profile refuses is unknown here.
    return True if profiles[0] in ("default", "builtin") else None


def _no_profile_of_its_own(security: Sequence[str]) -> bool | None:
    profiles = [o.partition("=")[2] for o in security if o.startswith("seccomp=")]
    return False if "unconfined" in profiles else None if profiles else True


def _is_commanded_by_us(info: Info | None) -> bool | None:
    if info is None:
        return None
    open_to_all = any("without encryption" in warning for warning in info.get("Warnings") or ())
    return not open_to_all and not str(info["at"]).startswith("http://")


def enforcement(info: Info, settings: FGPU) -> list[str]:
    """Return how this machine enforces the disk limits, and whether its daemon ends sessions. Blocks.

    ``info`` is the daemon's.
    """
    root, driver = Path(str(info.get("DockerRootDir") or "/")), info.get("Driver")
    session, home = settings.session_disk_mib, settings.home_disk_mib
    every = f"looked at every {settings.disk_every_s} s, then {'ended' if settings.disk_over == 'end' else 'warned'}"
    lines = []
    if session:
        _, mount = mount_of(str(root)) or ("", "")
        quotas = mount.startswith("xfs ") and not {"prjquota", "pquota"}.isdisjoint(re.split("[ ,]", mount))
        held = driver in LIMITING_DRIVERS or (driver == "overlay2" and quotas)
        without = f"{every} ({driver} here has no quotas: use XFS mounted with pquota)"
        lines.append(f"disk: sessions: {session} MiB, {'held by the engine' if held else without}")
    can_look = os.geteuid() == 0 and os.access(root, os.R_OK | os.X_OK)
    if home:
        how = every if can_look else "NOT held: the Hub is not root, so it cannot look into homes"
        lines.append(f"disk: homes: {home} MiB, {how}")
    if session and not can_look:
        lines.append(
            "disk: files of a session are not counted, nor blocks behind a file's end: the Hub is not root. Removed "
            f"files are {'found in the file system as a whole' if is_counted() else 'not seen'}"
        )
    if _same_disk(root, settings.data_path()):
        lines.append(
            f"disk: WARNING: what sessions write ({root}) is on the disk of the Hub's data ({settings.data_path()}): "
            "together they can fill it; give one of them a disk of its own"
        )
    if not info.get("LiveRestoreEnabled"):
        lines.append(
            "WARNING: a restart of Docker (as by an upgrade of its package) ends all sessions: write "
            '{"live-restore": true} into /etc/docker/daemon.json, and restart it once while none run'
        )
    return lines


def _same_disk(one: Path, other: Path) -> bool:
    there = next((folder for folder in (other, *other.parents) if folder.is_dir()), other)
    try:
        return one.stat().st_dev == there.stat().st_dev
    except OSError:
        return False


def sessions_of_others(client: docker.APIClient, address: Address, installation: str) -> list[str]:
    """Return a line for each other installation with sessions on an engine. Blocks."""
    try:
        listed = checked_rows(client.containers(filters={"label": f"{LABEL}.session"}))
    except FAILED as e:
        raise EngineSilent(str(e)) from e
    names = [(entry.get("Names") or ["/"])[0].removeprefix("/") for entry in listed]
    labels = [(entry.get("Labels") or {}).get(f"{LABEL}.installation", "") for entry in listed]
    found = marks.of_others(zip(names, labels, strict=True), installation)
    return [
        f"Sessions of another installation, {other}, run on {address} ({count}): what they hold is not counted here. "
        "If they are this Hub's, of another database: set c.FGPU.db_url back to go on with them; else end them: "
        f"docker rm -f $(docker ps -q --filter label={LABEL}.installation={other})"
        for other, count in found.items()
    ]


def wrong_time(client: docker.APIClient, address: Address) -> list[str]:
    """Return a line if an engine's clock differs from this machine's. Blocks."""
    before = datetime.now(UTC)
    said = str(client.info().get("SystemTime", ""))
    after = datetime.now(UTC)
    try:
        there = datetime.fromisoformat(said)
        ahead_s = max((there - after).total_seconds(), 0) or min((there - before).total_seconds(), 0)
    except (ValueError, TypeError):
        return [f"the time of {address} is not known: it says {said[:40]!r}"]
    if abs(ahead_s) <= MOST_APART_S:
        return []
    which = "ahead of" if ahead_s > 0 else "behind"
    return [
        f"the clock of {address} is {abs(ahead_s):.0f} s {which} the Hub's: logs and ages of files do not fit "
        "together; install chrony on both machines, and look again: timedatectl"
    ]


def problems(settings: FGPU, client_kwargs: Mapping[str, Any], installation: str) -> Sequence[str]:
    """Return the problems on each engine of the configured nodes. Blocks."""
    found: list[str] = []
    for address in addresses(settings.nodes):

        def look(client: docker.APIClient, address: Address = address) -> list[str]:
            lines = sessions_of_others(client, address, installation)
            return lines + (wrong_time(client, address) if address.is_elsewhere else [])

        try:
            found += _with_client(address, client_kwargs, look)
        except EngineSilent:
            found.append(
                f"FAIL: {address} does not answer: no session can start there; is c.FGPU.nodes right?"
            )
    return found
