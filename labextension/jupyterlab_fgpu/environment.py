"""What the spawner told this session through its environment.

The environment is for information only: the limits file is in force, and the service knows better
if it answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import urlsplit


@dataclass(frozen=True)
class Service:
    """Where the service `fgpu` is, and the token that this server shows it."""

    url: str
    token: str = field(repr=False)


@dataclass(frozen=True)
class NoService:
    """Why no service can be asked; `reason` is safe to show."""

    reason: str


@dataclass(frozen=True)
class Slice:
    """This session's share as its environment states it; None where the value is unusable."""

    session_id: int | None
    server_name: str | None
    fgpu: str | None
    memory_mib: int | None
    compute_percent: int | None
    simulated: bool
    uuids: tuple[str, ...]


def read_service(env: Mapping[str, str], token: str = "") -> Service | NoService:
    """Return the service to ask; the reason names a missing or unusable variable.

    ``token`` is the one that the server itself uses; the environment is read only without it.
    """
    url = env.get("FGPU_SERVICE_URL", "").strip()
    token = token or env.get("JUPYTERHUB_API_TOKEN", "").strip()
    if not url:
        return NoService("This server was not started by a Hub with fGPU.")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        return NoService("FGPU_SERVICE_URL is not an http or https address.")
    if not token:
        return NoService("This server has no token for the Hub (JUPYTERHUB_API_TOKEN is not set).")
    return Service(url=url.rstrip("/") + "/", token=token)


def read_slice(env: Mapping[str, str]) -> Slice | None:
    """Return the share that the environment states, or None outside a session."""
    fgpu = env.get("FGPU_AMOUNT", "").strip() or None
    session_id = _whole(env.get("FGPU_SESSION_ID"))
    if fgpu is None and session_id is None:
        return None
    return Slice(
        session_id=session_id,
        server_name=env.get("JUPYTERHUB_SERVER_NAME"),
        fgpu=fgpu,
        memory_mib=_whole(env.get("FGPU_MEMORY_MIB")),
        compute_percent=_whole(env.get("FGPU_COMPUTE_PERCENT")),
        simulated=env.get("FGPU_SIMULATED", "").strip() == "1",
        uuids=_uuids(env.get("NVIDIA_VISIBLE_DEVICES", "")),
    )


def _whole(text: str | None) -> int | None:
    text = (text or "").strip()
    return int(text) if text.isascii() and text.isdigit() else None


def _uuids(text: str) -> tuple[str, ...]:
    # The variable may also hold "all", "none" or indices, which name no device.
    names = (name.strip() for name in text.split(","))
    return tuple(name for name in names if name.startswith(("GPU-", "MIG-")))
