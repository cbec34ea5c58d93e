"""One node of ``c.FGPU.nodes``: its configuration, and what its machine reports."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import psutil

from fgpu_scheduler import MIN_MEMORY_MIB, BadAmount, BadSettings, FoundDevice, SimulatedProbe, parse_milli
from fgpuspawner.settings.traits import LARGEST_MIB, is_whole

log = logging.getLogger("fgpu")

Spec = Mapping[str, Any]
"""A node as it is configured."""
SIMULATED_MEMORY_MIB = 8192


@dataclass(frozen=True, slots=True)
class MachineFacts:
    """What a machine says of itself; ``devices`` None where it cannot say which GPUs it has.

    Of a cluster's node (``found``) also what that says: its resource ``group``, None where none is named, and whether
    it is ``closed``, and takes no new sessions.
    """

    cpu_milli: int
    memory_mib: int
    devices: tuple[FoundDevice, ...] | None = None
    trouble: str = "it was not asked"
    """Why the devices are not known."""
    coming: bool = False
    """Whether they will be known without anybody's doing."""
    group: str | None = None
    closed: bool = False
    found: bool = False


class DevicesComing(BadSettings):
    """A node's GPUs are not known yet; the Hub tries again without an administrator."""

    code = "devices_coming"


def host_of(url: str) -> str:
    """Return the host of an engine's URL as it is written: an alias of ssh's configuration may have capitals."""
    host = urlparse(url).netloc.rpartition("@")[2]
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def address_of(spec: Spec) -> str | None:
    """Return the host at which a node's containers publish their ports; None if the Hub reaches containers directly."""
    url = str(spec.get("engine", ""))
    return spec.get("address") or (host_of(url) if urlparse(url).scheme in ("tcp", "ssh") else None)


def is_elsewhere(spec: Spec) -> bool:
    """Return whether a node is another machine than the Hub's."""
    return address_of(spec) is not None


def is_declared(gpus: object) -> bool:
    """Return whether ``gpus`` of a node are described there, and not only named."""
    return isinstance(gpus, list) and bool(gpus) and all(isinstance(g, dict) for g in gpus)


def are_found_by_driver(spec: Spec) -> bool:
    """Return whether the driver of a node has to say which GPUs it has."""
    gpus = spec.get("gpus", "nvml")
    return not isinstance(gpus, dict) and not is_declared(gpus)


def as_far_as_known(
    machines: Mapping[str, MachineFacts | None], specs: Sequence[Spec], known: Collection[str]
) -> dict[str, MachineFacts | None]:
    """Return the machines, None for one with a failing driver and GPUs that are ``known`` from before.

    That one is taken as it was last: a driver that fails on one machine must not keep the Hub from starting.
    """
    found = dict(machines)
    for spec in specs:
        machine = found.get(spec["name"])
        if machine is None or machine.devices is not None or not are_found_by_driver(spec):
            continue
        if spec["name"] in known:
            log.error("Which GPUs node %s has is not known now: %s", spec["name"], machine.trouble)
            found[spec["name"]] = None
    return found


def this_machine(devices: tuple[FoundDevice, ...] | None = None) -> MachineFacts:
    """Return what the Hub's own machine has."""
    return MachineFacts(1000 * (os.cpu_count() or 1), psutil.virtual_memory().total // 2**20, devices)


def gpus_of(spec: Spec, machine: MachineFacts | None) -> Sequence[FoundDevice]:
    """Return the GPUs of a node: those that are simulated or declared, or those that its machine's driver reports."""
    gpus, name = spec.get("gpus", "nvml"), spec["name"]
    if isinstance(gpus, dict):
        return SimulatedProbe(gpus["simulated"], gpus.get("memory_mib", SIMULATED_MEMORY_MIB), name).devices()
    if is_declared(gpus):
        return [FoundDevice(g["uuid"], n, g.get("model", "GPU"), g["memory_mib"]) for n, g in enumerate(gpus)]
    if machine is None:
        return ()
    if machine.devices is None and machine.coming:
        raise DevicesComing(f"which GPUs node {name!r} has is not known yet: {machine.trouble}")
    if machine.devices is None and machine.found:
        raise BadSettings(f"which GPUs node {name!r} has is not known: {machine.trouble}")
    if machine.devices is None:
        raise BadSettings(
            f"c.FGPU.nodes: which GPUs node {name!r} has is not known ({machine.trouble}); install the NVIDIA "
            "container toolkit there, declare them ('gpus': [{'uuid': ..., 'memory_mib': ...}]), or simulate some "
            "('gpus': {'simulated': 2})"
        )
    if gpus == "nvml":
        return machine.devices
    by_uuid = {d.uuid: d for d in machine.devices}
    for uuid in gpus:
        if uuid not in by_uuid:
            there = ", ".join(by_uuid) or "none"
            raise BadSettings(
                f"c.FGPU.nodes: node {name!r} names GPU {uuid}, which NVML does not report; it has {there}"
            )
    return [by_uuid[uuid] for uuid in gpus]


def check_node(spec: Spec, where: str, *, elsewhere: bool = False) -> None:
    """Look at what is said of one node; ``where`` begins the line that refuses it. ``elsewhere``: an engine finds it."""
    gpus = spec.get("gpus", "nvml")
    simulated = isinstance(gpus, dict)
    named = gpus == "nvml" or (isinstance(gpus, list) and all(isinstance(uuid, str) for uuid in gpus))
    for key, is_good, remedy in (
        ("engine", isinstance(spec.get("engine", ""), str), "it must be text"),
        ("address", isinstance(spec.get("address", ""), str), "it must be text"),
        ("cpu", _is_cpu(spec.get("cpu", 1)), "it must be a number above 0"),
        ("memory_mib", is_whole(spec.get("memory_mib", 1), 1, LARGEST_MIB), "use whole MiB such as 65536"),
        ("gpus", not simulated or _can_be_simulated(gpus), "use {'simulated': 2, 'memory_mib': 8192}"),
        ("gpus", simulated or named or is_declared(gpus), "use 'nvml', a list of UUIDs, or {'simulated': 2}"),
    ):
        if not is_good:
            raise BadSettings(f"{where} has {key} {spec[key]!r}; {remedy}")
    if spec.get("engine"):
        _check_engine(spec, where)
    elif "tls" in spec or "address" in spec:
        key = "tls" if "tls" in spec else "address"
        raise BadSettings(f"{where} has {key}, and no engine; name the engine that it is for")
    elif is_declared(gpus) and not elsewhere:
        raise BadSettings(f"{where} declares its GPUs; this machine's own are those that NVML reports")
    for gpu in gpus if is_declared(gpus) else ():
        text = all(isinstance(gpu.get(key, ""), str) for key in ("uuid", "model"))
        known = {"uuid"} <= gpu.keys() <= {"uuid", "memory_mib", "model"}
        if not known or not text or not _is_gpu_memory(gpu.get("memory_mib")):
            raise BadSettings(
                f"{where} has a GPU {gpu!r}; use {{'uuid': 'GPU-1f...', 'model': 'NVIDIA A100', 'memory_mib': 40960}}"
            )


def _is_cpu(value: object) -> bool:
    try:
        return type(value) in (int, float) and parse_milli(str(value), field="cpu") > 0
    except BadAmount:
        return False


def _is_gpu_memory(value: object) -> bool:
    return is_whole(value, MIN_MEMORY_MIB, LARGEST_MIB)


def _can_be_simulated(gpus: Mapping[str, object]) -> bool:
    known = gpus.keys() <= {"simulated", "memory_mib"} and is_whole(gpus.get("simulated"), 0, LARGEST_MIB)
    return known and _is_gpu_memory(gpus.get("memory_mib", SIMULATED_MEMORY_MIB))


def _check_engine(spec: Spec, where: str) -> None:
    url, tls, address = spec["engine"], spec.get("tls"), spec.get("address", "")
    # The port of what a container publishes is asked for by IPv4 only.
    if ":" in address:
        raise BadSettings(f"{where} has address {address!r}; use a name or an IPv4 address, without a port")
    scheme, host = _scheme_and_host(url, where)
    if ":" in host and not address:
        raise BadSettings(
            f"{where} has engine {url!r}, and sessions are not reached by IPv6; add 'address', a name or an IPv4 address"
        )
    if scheme != "tcp" and tls is not None:
        raise BadSettings(f"{where} has tls, which is for engines at tcp:// only")
    if scheme != "tcp" or tls is False:
        return
    if not isinstance(tls, dict) or tls.keys() != {"ca", "cert", "key"}:
        raise BadSettings(
            f"{where} is at {url}, where anybody who reaches it is root, so tls is needed: {{'ca': PATH, 'cert': PATH, "
            "'key': PATH}; or False, where nobody else can reach it"
        )
    for key, path in tls.items():
        if not isinstance(path, str) or not os.access(path, os.R_OK):
            raise BadSettings(f"{where} has tls {key} {path!r}, a file that the Hub cannot read")


def _scheme_and_host(url: str, where: str) -> tuple[str, str]:
    try:
        parsed = urlparse(url)
        # Reading the port says whether there can be one of that number.
        scheme, host, _ = parsed.scheme, parsed.hostname or "", parsed.port
    except ValueError:
        scheme, host = "", ""
    if scheme not in ("tcp", "ssh", "unix") or not (host or (scheme == "unix" and parsed.path)):
        raise BadSettings(
            f"{where} has engine {url!r}; use 'tcp://HOST:2376' with tls, 'ssh://USER@HOST', or 'unix:///PATH'"
        )
    return scheme, host
