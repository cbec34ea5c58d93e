"""The choice of a node's isolation backend, and its reason."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import BadSettings, Node
from fgpuspawner.isolation.base import Backend
from fgpuspawner.isolation.files import write_whole

AUTO = "auto"
STRONGEST_FIRST = ("mig", "driver-cgroup", "interposer")
"""The order in which `auto` tries backends on real GPUs. mps is not in it, as its sessions can end each other."""

WRITTEN = "isolation.json"
"""File in ``data_dir`` with each node's backend and reason, for the service and the command line."""

WORDS = {
    "mig": "its GPUs are MIG instances, held by the hardware; sessions that share one are held by libfgpu",
    "driver-cgroup": "the driver holds memory by cgroup, libfgpu managed memory and compute",
    "interposer": "libfgpu holds memory and compute",
    "mps": "MPS holds compute, libfgpu memory; a fault in one session can end its neighbours",
    "none": "NOTHING holds a session to its slice",
}


@dataclass(frozen=True, slots=True)
class Choice:
    """A node's backend and the reason for it. ``loud``: logged as a warning."""

    node_id: str
    backend: Backend
    reason: str
    loud: bool = False


def choose(setting: str, node: Node, backends: Mapping[str, Backend]) -> Choice:
    """Return the backend of a node under ``c.FGPU.isolation = setting``.

    Raises:
        BadSettings: the chosen backend does not work here, or none does and "none" was not set. The message names what
            would work.
    """
    if setting != AUTO:
        chosen = backends[setting]
        trouble = chosen.available(node.devices)
        if trouble is not None and node.devices:
            raise BadSettings(
                f'c.FGPU.isolation is {setting!r}, which node {node.id!r} cannot have: {trouble}; "auto" takes '
                "the strongest that it can"
            )
        return Choice(node.id, chosen, f"{WORDS[setting]} (set so)", loud=setting == "none")
    if not node.devices:
        return Choice(node.id, backends["none"], "it has no GPU")
    if all(d.simulated for d in node.devices):
        trouble = backends["interposer"].available(node.devices)
        if trouble is None:
            return Choice(node.id, backends["interposer"], f"{WORDS['interposer']}; its GPUs are simulated")
        reason = f"{WORDS['none']}, as {trouble}; its GPUs are simulated"
        return Choice(node.id, backends["none"], reason, loud=True)
    passed: list[str] = []
    for name in STRONGEST_FIRST:
        trouble = backends[name].available(node.devices)
        if trouble is None:
            return Choice(node.id, backends[name], "; ".join([WORDS[name], *passed]))
        passed.append(f"not {name}: {trouble}")
    # The last one needs the least of a machine.
    raise BadSettings(
        f"nothing isolates the sessions of node {node.id!r}: {trouble}; or set c.FGPU.isolation = 'none', knowing "
        "that nothing then holds a session to its slice"
    )


@dataclass(frozen=True, slots=True)
class StoredChoice:
    """A node's backend and reason as `write_choices` stored them. ``fixed`` says why a slice cannot change there."""

    node_id: str
    backend: str
    reason: str
    fixed: str = ""


def write_choices(data: Path, choices: Iterable[Choice]) -> None:
    found = {
        c.node_id: {"backend": c.backend.name, "reason": c.reason, "fixed": c.backend.fixed} for c in choices
    }
    write_whole(data / WRITTEN, json.dumps(found, indent=2).encode(), mode=0o644)


def read_choices(data: Path) -> tuple[StoredChoice, ...]:
    """Return each node's backend as of the Hub's last start; empty if unknown."""
    try:
        found = json.loads((data / WRITTEN).read_text())
        return tuple(
            StoredChoice(node_id, str(own["backend"]), str(own["reason"]), str(own.get("fixed", "")))
            for node_id, own in sorted(found.items())
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return ()
