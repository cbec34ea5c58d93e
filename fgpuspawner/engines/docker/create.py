"""The arguments with which a container is created. Pure.

The session's limits override the administrator's settings, and those override the defaults.
"""

from __future__ import annotations

import copy
import posixpath
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from docker.types import DeviceRequest, HostConfig, Ulimit
from docker.utils import convert_volume_binds, version_lt

from fgpu_scheduler import Device
from fgpuspawner.engines.base import LaunchSpec, place_of
from fgpuspawner.engines.docker import handover
from fgpuspawner.isolation.base import Mount
from fgpuspawner.isolation.sealing import sealed_environment
from fgpuspawner.settings.folders import SharedFolder

SUDO_CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "SETGID", "SETUID")
"""All that `sudo` and `apt-get` need. None to mount, to trace other processes, to make devices, or for the network."""

NOT_TO_BE_SET = ("mem_limit", "cpu_quota", "nano_cpus", "auto_remove", "network_mode")
"""Settings that ``extra_host_config`` cannot override: limits come from the request, the network is the user's, and a
container must stay until its end was seen.
"""

CPU_PERIOD_US = 100_000
INTERPRETERS = ("bash", "sh", "dash", "ash", "python", "python3")
"""Default commands of framework images: no servers, they would end at once."""
CDI_KIND = "nvidia.com/gpu="
UNNAMED = "fgpu.unnamed"
"""Label of the anonymous volumes that images ask for with ``VOLUME``: each container has its own."""
NO_NAME_SERVER = "127.0.0.1"
"""The container's own loopback, where nothing listens."""


@dataclass(frozen=True, slots=True)
class ContainerOptions:
    """The settings of ``c.FGPUSpawner`` and ``c.DockerSpawner`` for one session's container.

    ``create`` and ``host`` are ``extra_create_kwargs`` and ``extra_host_config``, evaluated and with their templates
    filled in; ``volumes`` are docker-py's binds.
    """

    create: Mapping[str, Any] = field(default_factory=dict)
    host: Mapping[str, Any] = field(default_factory=dict)
    volumes: Mapping[str, Any] = field(default_factory=dict)
    mounts: Sequence[Any] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    pids_limit: int = 1024
    ulimits: Mapping[str, int] = field(default_factory=dict)
    cap_drop: Sequence[str] = ("ALL",)
    security_opt: Sequence[str] = ("no-new-privileges",)
    log_config: Mapping[str, Any] = field(default_factory=dict)
    container_user: str = "1000:1000"
    read_only_root: bool = False
    writable_in_memory: Mapping[str, str] = field(default_factory=dict)
    gives_gpus: bool = True
    internal_ip: bool = True
    host_ip: str = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class CreateContext:
    """The container's name, labels and network, and facts of the daemon that creates it.

    ``publish_at`` is the address at which its machine publishes the server's port, None if the Hub reaches the
    container directly. ``gpus`` is the request for its real GPUs. ``api_version`` is the daemon's.
    """

    name: str
    labels: Mapping[str, str]
    network: str
    api_version: str
    publish_at: str | None = None
    gpus: DeviceRequest | None = None
    installation: str = ""
    disk_mib: int = 0
    """Limit on the container's own files that the daemon enforces; 0: none."""
    closed: bool = False
    """Whether everything beyond the machine is unreachable."""


def arguments(
    spec: LaunchSpec,
    options: ContainerOptions,
    context: CreateContext,
    image: Mapping[str, Any],
    *,
    as_root: bool = False,
) -> tuple[dict[str, Any], list[str]]:
    """Return docker-py's arguments for ``create_container``, and the paths of conflicting mounts that were left out.

    ``image`` is the daemon's description of it; ``as_root``: its user has another name but root's number.
    """
    config = image.get("Config") or {}
    given = copy.deepcopy(dict(options.create))
    if as_root or is_root(str(config.get("User") or "")):
        given.setdefault("user", options.container_user)
    # By id: the user accepted this image, and its name may belong to another since.
    reference = image["Id"] if spec.image.owner else spec.image.reference
    made: dict[str, Any] = {
        "environment": dict(spec.environment),
        "volumes": sorted(bind["bind"] for bind in options.volumes.values()),
        "command": [*(spec.command or own_command(config)), *spec.arguments],
        "ports": {f"{spec.port}/tcp": None},
    }
    _merge(made, given)
    made |= {
        "image": reference,
        "name": context.name,
        "labels": {**(made.get("labels") or {}), **context.labels},
    }
    host = HostConfig(context.api_version, **_host(spec, options, context))
    prepared = spec.prepared
    mounts = list(host.get("Mounts") or [])
    taken = [*map(_bind_target, host.get("Binds") or []), *(host.get("Tmpfs") or {})]
    taken += [str(mount.get("Target", "")) for mount in mounts]
    host["Mounts"] = [*mounts, *unnamed_volumes(config, taken, context.installation)]
    given_host = {**made.get("host_config", {}), **host}
    own, displaced = sealed_mounts(given_host, prepared.mounts, prepared.in_memory)
    # Only the session's own GPUs, however the configuration asks for all of them.
    own["DeviceRequests"] = [] if context.gpus is None else [context.gpus]
    gpus = [device for device in own.get("Devices") or () if device["PathOnHost"].startswith("/dev/nvidia")]
    own["Devices"] = [device for device in own.get("Devices") or () if device not in gpus]
    displaced += [device["PathOnHost"] for device in gpus]
    own["Mounts"] += _shared(spec.shared, context.api_version)
    made["host_config"] = own
    # Nor an anonymous volume over one of our mounts.
    ours = _targets(prepared.mounts, prepared.in_memory)
    made["volumes"] = [path for path in made["volumes"] if not _is_in(path, ours)]
    made["environment"] = sealed_environment(
        parse_environment(made["environment"]),
        spec.slice_environment,
        prepared,
        image={k: v for k, v in parse_environment(config.get("Env")).items() if v is not None},
    )
    return made, displaced


def unnamed_volumes(
    config: Mapping[str, Any], taken: Collection[str], installation: str
) -> list[dict[str, Any]]:
    """Return mounts for the volumes in an image's configuration, except where something is mounted. Pure."""
    used = {posixpath.normpath(path) for path in taken}
    return [
        {"Type": "volume", "Target": path, "VolumeOptions": {"Labels": {UNNAMED: installation}}}
        for path in sorted(config.get("Volumes") or {})
        if posixpath.normpath(path) not in used
    ]


def _shared(folders: Sequence[SharedFolder], api_version: str) -> list[dict[str, Any]]:
    """Return mounts of shared folders. The engine refuses a missing one, where it would make that of a bind.

    What is mounted below a read-only folder is read-only too; engines before 25 cannot do that, and leave it out.
    """
    below = {"NonRecursive": True} if version_lt(api_version, "1.44") else {"ReadOnlyForceRecursive": True}
    return [
        {
            "Type": "bind",
            "Source": folder.path,
            "Target": place_of(folder),
            "ReadOnly": folder.read_only,
            "BindOptions": {"Propagation": "rprivate", **(below if folder.read_only else {})},
        }
        for folder in folders
    ]


def _host(spec: LaunchSpec, options: ContainerOptions, context: CreateContext) -> dict[str, Any]:
    """Return the arguments of ``HostConfig``: defaults, the administrator's settings over them, and our limits over
    both.
    """
    security = list(options.security_opt)
    if spec.sudo:
        # sudo is a set-user-id program, which does nothing under no-new-privileges.
        security = [option for option in security if not option.startswith("no-new-privileges")]
    ulimits = sorted(options.ulimits.items())
    ours: dict[str, Any] = {
        "ulimits": [Ulimit(name=name, soft=most, hard=most) for name, most in ulimits],
        "security_opt": security,
        "cap_drop": list(options.cap_drop),
        "pids_limit": options.pids_limit,
        "log_config": dict(options.log_config),
    }
    if spec.shared_memory_mib:
        ours["shm_size"] = spec.shared_memory_mib * 2**20
    if spec.sudo:
        ours["cap_add"] = list(SUDO_CAPABILITIES)
    if context.closed:
        # Docker's resolver would forward queries from the host's side of the firewall.
        ours["dns"] = [NO_NAME_SERVER]
    if options.read_only_root:
        ours |= {"read_only": True, "tmpfs": dict(options.writable_in_memory)}
    added: dict[str, Any] = {
        "binds": dict(options.volumes),
        "links": dict(options.links),
        "mounts": list(options.mounts),
        "network_mode": context.network,
    }
    if context.publish_at is not None:
        added["port_bindings"] = {spec.port: (context.publish_at,)}
    given = {k: v for k, v in copy.deepcopy(dict(options.host)).items() if k not in NOT_TO_BE_SET}
    if isinstance(given.get("binds"), list | tuple):
        # A list replaces the whole setting, so add the volumes.
        volumes: Any = dict(options.volumes)
        given["binds"] = [*given["binds"], *convert_volume_binds(volumes)]
    period_us = given.get("cpu_period", CPU_PERIOD_US)
    memory = spec.session.request.memory_mib * 2**20
    limits: dict[str, Any] = {
        "mem_limit": memory,
        # Without this a container may use as much swap again.
        "memswap_limit": memory,
        "cpu_period": period_us,
        "cpu_quota": spec.session.request.cpu_milli * period_us // 1000,
    }
    if context.disk_mib:
        limits["storage_opt"] = {"size": f"{context.disk_mib}m"}
    if spec.prepared.hosts_ipc:
        limits["ipc_mode"] = "host"
    return _merge(added, {**ours, **given, **limits})


def is_root(user: str) -> bool:
    """Return whether an image's ``USER`` (name or number, perhaps with a group) is root or missing."""
    name = user.split(":")[0]
    try:
        return int(name) == 0  # The engine also parses 00 as a number.
    except ValueError:
        return name in ("", "root")


def own_command(config: Mapping[str, Any]) -> list[str]:
    own = list(config.get("Cmd") or [])
    if not own or (len(own) == 1 and posixpath.basename(own[0]) in INTERPRETERS):
        return [handover.SERVER]
    return own


def parse_environment(entries: Sequence[str] | Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return an environment as a dict; the engine's API also has lists of ``NAME=value``."""
    if entries is None:
        return {}
    if isinstance(entries, Mapping):
        return dict(entries)
    pairs = (entry.partition("=") for entry in entries)
    return {name: value if equals else None for name, equals, value in pairs}


def sealed_mounts(
    host_config: Mapping[str, Any], mounts: Sequence[Mount], in_memory: Mapping[str, str] | None = None
) -> tuple[dict[str, Any], list[str]]:
    """Return a container's HostConfig (of the engine's API) with our mounts, and the mounts left out for them.

    Mounts at or below one of ours are left out. Mounts above stay, because the engine mounts by depth.
    """
    ours = _targets(mounts, in_memory)
    displaced: list[str] = []

    def stays(target: str) -> bool:
        if _is_in(target, ours):
            displaced.append(_absolute(target))
            return False
        return True

    found = dict(host_config)
    found["Binds"] = [bind for bind in found.get("Binds") or [] if stays(_bind_target(bind))]
    given = [mount for mount in found.get("Mounts") or [] if stays(str(mount.get("Target", "")))]
    given_in_memory = {p: options for p, options in (found.get("Tmpfs") or {}).items() if stays(p)}
    if found.get("Tmpfs") or in_memory:
        found["Tmpfs"] = {**given_in_memory, **(in_memory or {})}
    found["Mounts"] = given + [
        {"Type": "bind", "Source": str(m.source), "Target": m.target, "ReadOnly": m.read_only} for m in mounts
    ]
    return found, displaced


def _targets(mounts: Sequence[Mount], in_memory: Mapping[str, str] | None) -> set[str]:
    return {posixpath.normpath(path) for path in (*(mount.target for mount in mounts), *(in_memory or ()))}


def _absolute(target: str) -> str:
    return posixpath.normpath("/" + target.lstrip("/"))


def _is_in(target: str, ours: Collection[str]) -> bool:
    path = _absolute(target)
    return any(path == own or path.startswith(f"{own}/") for own in ours)


def _bind_target(bind: str) -> str:
    """Return the path in the container of ``source:target[:options]``, or of ``target`` alone."""
    return bind.split(":")[:2][-1]


def _merge(into: dict[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Merge ``given`` into ``into``, dicts key by key, as DockerSpawner does."""
    for key, value in given.items():
        own = into.get(key)
        into[key] = _merge(own, value) if isinstance(own, dict) and isinstance(value, Mapping) else value
    return into


# --- Requests for GPUs: through the NVIDIA runtime, or CDI ---


def all_gpus(info: Mapping[str, Any]) -> DeviceRequest | None:
    """Return a request for all GPUs of an engine, for monitoring only; None if it has none."""
    if _has_nvidia(info):
        return DeviceRequest(driver="nvidia", count=-1, capabilities=[["gpu", "utility"]])
    ids = cdi_devices(info)
    whole = [i for i in ids if i == f"{CDI_KIND}all"]
    return DeviceRequest(driver="cdi", device_ids=whole or ids) if ids else None


def some_gpus(info: Mapping[str, Any], devices: Sequence[Device]) -> DeviceRequest | None:
    """Return a request for these devices; None if the engine does not know all of them.

    CDI names a device by its UUID or its index, depending on its configuration.
    """
    if _has_nvidia(info):
        uuids = [device.uuid for device in devices]
        return DeviceRequest(driver="nvidia", device_ids=uuids, capabilities=[["gpu", "compute", "utility"]])
    known = cdi_devices(info)
    names = ((f"{CDI_KIND}{d.uuid}", f"{CDI_KIND}{d.index}") for d in devices)
    found = [next((n for n in either if n in known), "") for either in names]
    return DeviceRequest(driver="cdi", device_ids=found) if found and all(found) else None


def cdi_devices(info: Mapping[str, Any]) -> list[str]:
    """Return an engine's NVIDIA devices in CDI, as ``docker info`` lists them since Docker 28.2."""
    found = [str(d.get("ID", "")) for d in info.get("DiscoveredDevices") or () if d.get("Source") == "cdi"]
    return sorted(i for i in found if i.startswith(CDI_KIND))


def _has_nvidia(info: Mapping[str, Any]) -> bool:
    return "nvidia" in (info.get("Runtimes") or {})
