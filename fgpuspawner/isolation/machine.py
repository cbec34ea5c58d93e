"""Simulated machines: for each node with simulated GPUs the folder from which the simulated driver is loaded."""

from __future__ import annotations

from pathlib import Path

from fgpu_scheduler import Node
from fgpuspawner.isolation.files import link, make_empty, make_folder, write_whole
from fgpuspawner.isolation.native import Native, install_machine_libraries

LEDGER = "ledger"
WRITTEN_BY_SESSIONS = (LEDGER, "log")
IN_CONTAINERS = ("machine", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", LEDGER)
"""The files that a container gets; it can write only the ledger."""
MOST_DEVICES = 16
CONTEXT_MIB = 0
"""Size of a context on a simulated GPU."""


def folder_of(data: Path, node_id: str) -> Path:
    """Return the folder of a node's simulated machine; the node's name is a safe file name."""
    return data / "simulated" / node_id


def render(node: Node) -> str:
    """Return the text of the file ``machine``: one simulated device in each line."""
    return "".join(
        f"gpu uuid={d.uuid} memory_mib={d.memory_mib} context_mib={CONTEXT_MIB} name={d.model}\n"
        for d in node.devices
        if d.simulated
    )


def write(data: Path, node: Node, native: Native, memory: Path | None = None) -> Path:
    """Write a node's simulated machine and return its folder.

    The ledger is a link into ``memory``, so that no session can fill the disk with it. An existing ledger stays, as
    sessions that outlived the Hub use it.
    """
    make_folder(data / "simulated", mode=0o755)
    folder = make_folder(folder_of(data, node.id), mode=0o755)
    text = render(node).encode()
    path = folder / "machine"
    if not path.is_file() or path.read_bytes() != text:
        write_whole(path, text, mode=0o444)
    install_machine_libraries(native, folder)
    _ensure(folder / "log")
    if memory is None:
        _ensure(folder / LEDGER)
    else:
        make_folder(memory, mode=0o700)
        ledger = _ensure(make_folder(memory / f"simulated-{node.id}", mode=0o700) / LEDGER)
        link(folder / LEDGER, ledger)
    return folder


def _ensure(path: Path) -> Path:
    if not path.is_file() or path.is_symlink():
        make_empty(path, mode=0o666)
    return path
