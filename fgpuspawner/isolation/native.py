"""The C parts that were built at installation, the commands for sessions, and the simulated machines."""

from __future__ import annotations

import mmap
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import Node
from fgpuspawner.isolation.files import copy_whole, link, make_empty, make_folder, write_whole

FOLDER = Path(__file__).parent.parent / "native"
CHECKOUT = Path(__file__).parents[2] / "labextension" / "jupyterlab_fgpu"

NOT_BUILT = (
    "libfgpu is not built; install a C compiler and make (apt-get install gcc make libc6-dev), "
    "then install fgpuspawner again"
)
COMMANDS = {"fgpu-smi": "smi.py", "fgpu-verify": "verify.py"}
"""The commands for sessions, by their source in the Lab extension."""
SIMULATED_COMMAND = "nvidia-smi"

LEDGER = "ledger"
WRITTEN_BY_SESSIONS = (LEDGER, "log")
IN_CONTAINERS = ("machine", "libcuda.so.1", "libcuda.so", "libnvidia-ml.so.1", LEDGER)
"""The files of a simulated machine that a container gets; it can write only the ledger."""
MOST_DEVICES = 16
SIMULATED_CONTEXT_MIB = 0
"""Size of a context on a simulated GPU."""


@dataclass(frozen=True, slots=True)
class Native:
    folder: Path

    @property
    def library(self) -> Path:
        """The library that is loaded into a session's processes."""
        return self.folder / "libfgpu.so"

    @property
    def probes(self) -> dict[str, Path]:
        return {name: self.folder / name for name in ("probe", "probe-static")}

    @property
    def simulated(self) -> dict[str, Path]:
        """The simulated driver and NVML, by the file names under which programs load them."""
        return {name: self.folder / "simulated" / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")}

    @property
    def parts(self) -> tuple[Path, ...]:
        return (self.library, *self.probes.values(), *self.simulated.values())


def find(folder: Path | None = None) -> Native | None:
    """Return the built parts, or None unless all are there."""
    native = Native(folder or FOLDER)
    return native if all(part.is_file() for part in native.parts) else None


def readable_by_all(native: Native, data: Path) -> Native:
    """Return the parts where every container user can read and run them, copied into ``data`` if necessary.

    An installation under a strict umask leaves them readable only by their owner.
    """
    if all(part.stat().st_mode & 0o005 == 0o005 for part in native.parts):
        return native
    copied = Native(make_folder(data / "native", mode=0o755))
    make_folder(copied.folder / "simulated", mode=0o755)
    for source, path in zip(native.parts, copied.parts, strict=True):
        copy_whole(source, path, mode=0o755)
    return copied


def install_commands(data: Path) -> Path:
    """Write the commands for sessions into ``data/tools`` and return that folder.

    Each command is one file that can be mounted. Its subfolder ``simulated`` also has nvidia-smi. Missing sources are
    left out.
    """
    tools = make_folder(data / "tools", mode=0o755)
    simulated = make_folder(tools / "simulated", mode=0o755)
    for name, text in command_files().items():
        _write_program(tools / name, text)
        if name == "fgpu-smi":
            _write_program(simulated / SIMULATED_COMMAND, text)
    return tools


def command_files() -> dict[str, bytes]:
    """Return the text of each command for sessions, by name; missing sources are left out."""
    found = {}
    for name, source in COMMANDS.items():
        # A checkout has the source itself; a wheel has a copy.
        for path in (CHECKOUT / source, FOLDER / "commands" / name):
            if path.is_file():
                found[name] = path.read_bytes()
                break
    return found


def _write_program(path: Path, text: bytes) -> None:
    # Replace the file rather than write it: running sessions have the old one mounted.
    if not path.is_file() or path.read_bytes() != text or path.stat().st_mode & 0o777 != 0o755:
        write_whole(path, text, mode=0o755)


def mapped_as(path: Path) -> tuple[str, int]:
    """Return device and inode of a file as /proc/PID/maps shows them; stat can show others."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        for line in Path("/proc/self/maps").read_text().splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6 and fields[5] == str(path.resolve()):
                return fields[3], int(fields[4])
    raise OSError(f"{path} cannot be mapped")


def machine_folder(data: Path, node_id: str) -> Path:
    """Return the folder of a node's simulated machine; the node's name is a safe file name."""
    return data / "simulated" / node_id


def write_machine(data: Path, node: Node, native: Native, memory: Path | None = None) -> None:
    """Write the folder of a node's simulated machine: the driver's libraries and the files that they read.

    The ledger is a link into ``memory``, so that no session can fill the disk with it. An existing ledger stays, as
    sessions that outlived the Hub use it.
    """
    make_folder(data / "simulated", mode=0o755)
    folder = make_folder(machine_folder(data, node.id), mode=0o755)
    text = "".join(
        f"gpu uuid={d.uuid} memory_mib={d.memory_mib} context_mib={SIMULATED_CONTEXT_MIB} name={d.model}\n"
        for d in node.devices
        if d.simulated
    ).encode()
    path = folder / "machine"
    if not path.is_file() or path.read_bytes() != text:
        write_whole(path, text, mode=0o444)
    for name, source in native.simulated.items():
        # Copies: in a container a link would lead nowhere.
        copy_whole(source, folder / name, mode=0o755)
    # A real driver's packages have this name too; without it Taichi uses the CPU.
    if not (folder / "libcuda.so").is_symlink():
        link(folder / "libcuda.so", Path("libcuda.so.1"))
    _ensure(folder / "log")
    if memory is None:
        _ensure(folder / LEDGER)
    else:
        make_folder(memory, mode=0o700)
        ledger = make_folder(memory / f"simulated-{node.id}", mode=0o700) / LEDGER
        _ensure(ledger)
        link(folder / LEDGER, ledger)


def _ensure(path: Path) -> None:
    if not path.is_file() or path.is_symlink():
        make_empty(path, mode=0o666)
