"""The nodes of ``c.FGPU.nodes``: what may be said of one, and what other machines say of themselves."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlparse

import psutil

from fgpu_scheduler import BadAmount, BadSettings, FoundDevice, parse_milli

log = logging.getLogger("fgpu")

NODE_KEYS = ("name", "group", "cpu", "memory_mib", "gpus", "engine", "tls", "address")
ENGINES = ("unix", "ssh", "tcp")
SIMULATED_MEMORY_MIB = 8192
MIN_MEMORY_MIB = 128
"""Below this admission refuses a session."""
LARGEST_MIB = 2**31
"""Two PiB: more is a typing mistake."""


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine says of itself; ``devices`` None where it cannot say which GPUs it has."""

    cpu_milli: int
    memory_mib: int
    devices: tuple[FoundDevice, ...] | None = None
    trouble: str = "it was not asked"
    """Why the devices are not known."""


def address_of(spec: Mapping[str, Any]) -> str | None:
    """Return where the Hub reaches the ports that a node's containers publish; None where it reaches themselves."""
    url = urlparse(str(spec.get("engine", "")))
    return spec.get("address") or (url.hostname if url.scheme in ("tcp", "ssh") else None)


def is_declared(gpus: object) -> bool:
    """Return whether ``gpus`` of a node are described there, and not only named."""
    return isinstance(gpus, list) and bool(gpus) and all(isinstance(g, dict) for g in gpus)


def are_found_by_driver(spec: Mapping[str, Any]) -> bool:
    """Return whether the driver of a node has to say which GPUs it has."""
    gpus = spec.get("gpus", "nvml")
    return not isinstance(gpus, dict) and not is_declared(gpus)


def is_elsewhere(spec: Mapping[str, Any]) -> bool:
    """Return whether a node is another machine than the Hub's."""
    return address_of(spec) is not None


def as_far_as_known(
    machines: Mapping[str, Machine | None], specs: Sequence[Mapping[str, Any]], known: Collection[str]
) -> dict[str, Machine | None]:
    """Return the machines, None for one whose driver fails now and whose GPUs are ``known`` from before.

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


def this_machine() -> Machine:
    return Machine(1000 * (os.cpu_count() or 1), psutil.virtual_memory().total // 2**20)


def found_elsewhere(gpus: str | list[Any], machine: Machine | None, node: str) -> Sequence[FoundDevice]:
    """Return the GPUs of a node on another engine: those that are declared, or that its driver reports."""
    if is_declared(gpus):
        return [
            FoundDevice(g["uuid"], index, g.get("model", "GPU"), g["memory_mib"])
            for index, g in enumerate(gpus)
        ]
    if machine is None:
        return ()
    if machine.devices is None:
        raise BadSettings(
            f"c.FGPU.nodes: which GPUs node {node!r} has is not known ({machine.trouble}); install the NVIDIA container "
            "toolkit there, declare them ('gpus': [{'uuid': ..., 'memory_mib': ...}]), or simulate some ('gpus': "
            "{'simulated': 2})"
        )
    return machine.devices if isinstance(gpus, str) and gpus == "nvml" else named(gpus, machine.devices, node)


def check_node(name: str, spec: dict[str, Any]) -> None:
    _check_engine(name, spec)
    cpu, node_memory_mib = spec.get("cpu", 1), spec.get("memory_mib", MIN_MEMORY_MIB)
    if not _is_cpu(cpu):
        raise BadSettings(f"c.FGPU.nodes: node {name!r} has cpu {cpu!r}; it must be a number above 0")
    if not is_whole(node_memory_mib, 1):
        raise BadSettings(
            f"c.FGPU.nodes: node {name!r} has memory_mib {node_memory_mib!r}; it must be a number above 0"
        )
    gpus = spec.get("gpus", "nvml")
    if isinstance(gpus, dict):
        count, memory = gpus.get("simulated"), gpus.get("memory_mib", SIMULATED_MEMORY_MIB)
        known = set(gpus) <= {"simulated", "memory_mib"}
        if not known or not is_whole(count, 0) or not is_whole(memory, 128):
            raise BadSettings(
                f"c.FGPU.nodes: node {name!r} has gpus {gpus!r}; use {{'simulated': 2, 'memory_mib': 8192}}"
            )
    elif is_declared(gpus):
        _check_declared(name, spec, gpus)
    elif gpus != "nvml" and not (isinstance(gpus, list) and all(isinstance(u, str) for u in gpus)):
        raise BadSettings(
            f"c.FGPU.nodes: node {name!r} has gpus {gpus!r}; use 'nvml', a list of UUIDs, or {{'simulated': 2}}"
        )


def _check_engine(name: str, spec: dict[str, Any]) -> None:
    url, tls = spec.get("engine", ""), spec.get("tls")
    where = f"c.FGPU.nodes: node {name!r}"
    for key in ("engine", "address"):
        if not isinstance(spec.get(key, ""), str):
            raise BadSettings(f"{where} has {key} {spec[key]!r}; it must be text")
    if not url:
        for key in ("tls", "address"):
            if key in spec:
                raise BadSettings(f"{where} has {key}, and no engine; name the engine that it is for")
        return
    parsed = urlparse(url)
    if parsed.scheme not in ENGINES or not (parsed.hostname or (parsed.scheme == "unix" and parsed.path)):
        raise BadSettings(
            f"{where} has engine {url!r}; use 'tcp://HOST:2376' with tls, 'ssh://USER@HOST', or 'unix:///PATH'"
        )
    if parsed.scheme != "tcp":
        if tls is not None:
            raise BadSettings(f"{where} has tls, which is for engines at tcp:// only")
        return
    if tls is False:
        return
    if not isinstance(tls, dict) or set(tls) != {"ca", "cert", "key"}:
        raise BadSettings(
            f"{where} is at {url}, where whoever reaches it is root, so tls is needed: {{'ca': PATH, 'cert': PATH, "
            "'key': PATH}; or False, where nobody else can reach it"
        )
    for key, path in tls.items():
        if not isinstance(path, str) or not os.access(path, os.R_OK):
            raise BadSettings(f"{where} has tls {key} {path!r}, a file that the Hub cannot read")


def _check_declared(name: str, spec: dict[str, Any], gpus: list[dict[str, Any]]) -> None:
    where = f"c.FGPU.nodes: node {name!r}"
    if not spec.get("engine"):
        raise BadSettings(f"{where} declares its GPUs; this machine's own are those that NVML reports")
    for gpu in gpus:
        known = {"uuid", "memory_mib"} <= set(gpu) <= {"uuid", "memory_mib", "model"}
        text = all(isinstance(gpu.get(key, ""), str) for key in ("uuid", "model"))
        if not known or not text or not is_whole(gpu["memory_mib"], 128):
            raise BadSettings(
                f"{where} has a GPU {gpu!r}; use {{'uuid': 'GPU-1f...', 'model': 'NVIDIA A100', 'memory_mib': 40960}}"
            )


def _is_cpu(value: object) -> bool:
    """Return whether this is a number of cores above 0, with at most three decimals."""
    try:
        return type(value) in (int, float) and parse_milli(str(value), field="cpu") > 0
    except BadAmount:
        return False


def is_whole(value: object, least: int) -> bool:
    return type(value) is int and least <= value <= LARGEST_MIB


def named(uuids: Sequence[str], found: Sequence[FoundDevice], node: str) -> Sequence[FoundDevice]:
    by_uuid = {d.uuid: d for d in found}
    for uuid in uuids:
        if uuid not in by_uuid:
            there = ", ".join(by_uuid) or "none"
            raise BadSettings(
                f"c.FGPU.nodes: node {node!r} names GPU {uuid}, which NVML does not report; it has {there}"
            )
    return tuple(by_uuid[uuid] for uuid in uuids)
