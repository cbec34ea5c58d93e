"""The safeguards of Docker daemons and of the containers' settings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any

from fgpuspawner.engines.base import EngineSilent, Held, Safeguard
from fgpuspawner.engines.docker import firewall
from fgpuspawner.engines.docker.address import Address, addresses
from fgpuspawner.engines.docker.daemon import LOOK_TIMEOUT_S, Daemon
from fgpuspawner.engines.docker.errors import FAILED
from fgpuspawner.engines.docker.images.image_user import is_root
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import is_elsewhere

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

Info = Mapping[str, Any]


def look(settings: FGPU, client_kwargs: Mapping[str, Any]) -> list[Info | None]:
    """Return each configured daemon's info; None for a silent one. Blocks."""
    return [_info(address, client_kwargs) for address in addresses(settings.nodes)]


def ports_closed(settings: FGPU) -> bool | None:
    """Return whether the machines' ports are closed to sessions, or will be when the Hub starts."""
    if settings.firewall == "managed-elsewhere":
        return True
    if any(is_elsewhere(spec) for spec in settings.nodes):
        return False
    # This process may run as another user than the Hub.
    return firewall.can_apply() or None


def _info(address: Address, client_kwargs: Mapping[str, Any]) -> Info | None:
    daemon = Daemon(address, installation="", client_kwargs=client_kwargs)
    try:
        with closing(daemon.another_client(timeout_s=LOOK_TIMEOUT_S)) as client:
            # The info lacks the address that we used.
            return {**client.info(), "at": str(client.base_url)}
    except (EngineSilent, *FAILED):
        return None
    finally:
        daemon.close()


def judge(
    infos: Sequence[Info | None], own: Mapping[str, Any], *, ports: bool | None
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
        Safeguard.FILTERED: _all([*(map(_filters, infos)), _no_profile_of_its_own(security)]),
        Safeguard.LIMITS: _all(_can(info, "MemoryLimit", "CpuCfsQuota") for info in infos),
        Safeguard.PROCESSES: _all(
            [
                *(_can(info, "PidsLimit") for info in infos),
                (given.get("pids_limit", own["pids_limit"]) or 0) > 0,
            ]
        ),
        Safeguard.PORTS: ports,
        Safeguard.COMMANDS: _all(map(_is_commanded_by_us, infos)),
        Safeguard.REMAPPED: _all([*(map(_remaps, infos)), given.get("userns_mode") != "host"]),
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
