"""What a kernel can find out about its session, with only Python's own library of 3.6 or later.

Slice and processes come from NVML, as `fgpu-smi` shows them; sessions and queue from this
kernel's Jupyter server (kernel_socket). A part that cannot be read is a text with the reason,
never zero.
"""

import html
import json
import os
import socket
import struct
import time
from typing import Any, Dict, List, NamedTuple, Optional, Tuple, Union

SOCKET_VARIABLE = "FGPU_STATUS_SOCKET"
WITHIN_S = 6.0
"""Seconds: the server itself waits for several answers of the service, each for a few seconds at
most."""
LARGEST_BYTES = 4 * 1024 * 1024
NOT_KNOWN = "not known"


class Held(NamedTuple):
    """A process on the GPU; `memory_mib` is None where the driver does not say."""

    pid: int
    name: str
    memory_mib: Optional[int]


class Reading(NamedTuple):
    """One moment of this session. A list that could not be read is replaced by the reason."""

    at_s: int
    session_id: Optional[int]
    amount: Optional[str]
    simulated: bool
    limit_mib: Optional[int]
    used_mib: Optional[int]
    entitled_percent: Optional[int]
    sm_percent: Optional[float]
    gpus: List[str]
    processes: Union[List[Held], str]
    others: Union[List[str], str]
    queue: str
    trouble: Optional[str]


def read() -> Reading:
    """Return what is known at this moment; takes at most a few seconds."""
    amount = os.environ.get("FGPU_AMOUNT", "").strip()
    limit_mib = _number("FGPU_MEMORY_MIB")
    used, total, gpus, processes, trouble = _read_gpu()
    sm, others, queue = _read_service()
    return Reading(
        at_s=int(time.time()),
        session_id=_number("FGPU_SESSION_ID"),
        amount="{} fGPU".format(amount) if amount else None,
        simulated=os.environ.get("FGPU_SIMULATED", "") == "1",
        limit_mib=total if limit_mib is None else limit_mib,
        used_mib=used,
        entitled_percent=_number("FGPU_COMPUTE_PERCENT"),
        sm_percent=sm,
        gpus=gpus,
        processes=processes,
        others=others,
        queue=queue,
        trouble=trouble,
    )


def _number(variable: str) -> Optional[int]:
    text = os.environ.get(variable, "")
    return int(text) if text.isdigit() else None


Gpu = Tuple[Optional[int], Optional[int], List[str], Union[List[Held], str], Optional[str]]


def _read_gpu() -> Gpu:
    """Return used and total MiB, the GPUs' names, the processes, and problems."""
    from . import smi  # noqa: PLC0415 - what only wants the package must not wait for ctypes

    if not os.environ.get("FGPU_SESSION_ID"):
        # Processes of the whole machine are not shown here.
        why = "this kernel is in no fGPU session"
        return None, None, [], why, why
    try:
        found = smi.read_once(None)
    except smi.NvmlError as error:
        return None, None, [], str(error), str(error)
    used, total = [_sum(g.values["memory." + kind] for g in found.gpus) for kind in ("used", "total")]
    names = ["{}, {}".format(g.values["name"], g.values["uuid"]) for g in found.gpus]
    trouble = "; ".join(found.problems) or None
    limit_mib = _number("FGPU_MEMORY_MIB")
    is_above = total is not None and limit_mib is not None and total > limit_mib
    if is_above or not all(smi.is_own(g) for g in found.gpus):
        # Other sessions' memory would look like this session's.
        why = "not known: the driver shows the whole GPU here, and not this session's share"
        return None, None, names, why, trouble
    held = {}  # type: Dict[int, Held]
    for process in (p for g in found.gpus for p in smi.listed(g)):
        before = held.get(process.pid)
        mib = process.memory_mib if isinstance(process.memory_mib, int) else None
        if before is not None:
            known = mib is not None and before.memory_mib is not None
            mib = mib + before.memory_mib if known else None  # type: ignore[operator]
        held[process.pid] = Held(process.pid, process.name, mib)
    failed = next((g.processes.text for g in found.gpus if isinstance(g.processes, smi.Failed)), None)
    processes = sorted(held.values(), key=lambda h: (-(h.memory_mib or 0), h.pid))
    return used, total, names, failed or processes, trouble


def _sum(values: Any) -> Optional[int]:
    found = list(values)
    return sum(found) if found and all(isinstance(value, int) for value in found) else None


def _read_service() -> Tuple[Optional[float], Union[List[str], str], str]:
    """Return the compute in use, my other sessions in words, and the queue in words."""
    name = os.environ.get(SOCKET_VARIABLE, "").strip()
    if not name:
        why = "not known in this kernel: see the side panel"
        return None, why, why
    try:
        status = _ask(name)
        if status["hub"] not in ("ok", "unreachable") or status["as_of_s"] is None:
            why = "not known: {}".format(status["hub_message"])
            return None, why, why
        late = ""
        if status["hub"] != "ok":
            late = " ({} s ago: {})".format(status["as_of_s"], status["hub_message"])
        meter = (status["session"] or {}).get("meter") or {}
        others = [_session_words(other) + late for other in status["others"]]
        length = status["queue"]["length"]
        if length is None:
            queue = "not known: {}".format(status["queue"]["reason"])
        else:
            queue = _queue_words(length) + late
        return (None if late else meter.get("sm_percent")), others, queue
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = "not known: this kernel's Jupyter server did not tell ({})".format(type(error).__name__)
        return None, why, why


def _ask(name: str) -> Dict[str, Any]:
    """Return the status that the server gives to its own user; raises OSError, ValueError."""
    deadline = time.monotonic() + WITHIN_S
    received = b""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(WITHIN_S)
        connection.connect("\0" + name)
        if peer_uid(connection) != os.geteuid():
            # The server has ended, and another program has taken its name.
            raise ConnectionRefusedError
        while len(received) <= LARGEST_BYTES:
            connection.settimeout(max(0.001, deadline - time.monotonic()))
            part = connection.recv(65536)
            if not part:
                break
            received += part
    found = json.loads(received.decode("utf-8"))
    if not isinstance(found, dict):
        raise ValueError("not an object")
    return found


def peer_uid(connection: socket.socket) -> int:
    """Return the user of the process at the other end of a Unix socket (unix(7))."""
    size = struct.calcsize("iII")
    given = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
    return int(struct.unpack("iII", given)[1])


def _queue_words(length: int) -> str:
    if not length:
        return "no request is waiting"
    return "1 request is waiting" if length == 1 else "{} requests are waiting".format(length)


def _session_words(session: Dict[str, Any]) -> str:
    words = "{}: {}, {}".format(
        session.get("display_name") or session["server_name"],
        session.get("amount"),
        session["state"],
    )
    position = session.get("position")
    return words if position is None else "{}, number {} in the queue".format(words, position)


# ---- in words ------------------------------------------------------------------------------------


def rows(reading: Reading) -> List[Tuple[str, List[str]]]:
    """Return the rows: labels, each with one or more lines."""
    amount = reading.amount or NOT_KNOWN
    memory = "{} / {} MiB".format(
        NOT_KNOWN if reading.used_mib is None else reading.used_mib,
        NOT_KNOWN if reading.limit_mib is None else reading.limit_mib,
    )
    compute = []
    if reading.sm_percent is not None:
        compute.append("{:.0f} % of the GPU in use".format(reading.sm_percent))
    if reading.entitled_percent is not None:
        compute.append("your share is {} %".format(reading.entitled_percent))
    found = [
        ("Amount", [amount + (" (simulated: there is no real GPU)" if reading.simulated else "")]),
        ("GPU memory", [memory]),
        ("Compute", [", ".join(compute) or NOT_KNOWN]),
        ("GPU", reading.gpus or [NOT_KNOWN]),
        ("Processes", _process_words(reading.processes)),
        ("Other sessions", _lines(reading.others)),
        ("Queue", [reading.queue]),
    ]
    if reading.trouble:
        found.append(("Trouble", [reading.trouble]))
    return found


def _process_words(processes: Union[List[Held], str]) -> List[str]:
    if isinstance(processes, str):
        return [processes]
    lines = []
    for held in processes:
        own = " (this kernel)" if held.pid == os.getpid() else ""
        memory = NOT_KNOWN if held.memory_mib is None else "{} MiB".format(held.memory_mib)
        lines.append("{}: {}{} {}".format(memory, held.pid, own, held.name[:60]))
    return lines or ["none"]


def _lines(found: Union[List[str], str]) -> List[str]:
    return [found] if isinstance(found, str) else found or ["none"]


def as_text(reading: Reading) -> str:
    """Return it as lines of text; nothing in a name acts on a terminal."""
    width = max(len(label) for label, _ in rows(reading)) + 1
    lines = []
    for label, values in rows(reading):
        for index, value in enumerate(values):
            shown = "".join(c if c.isprintable() else "?" for c in value)
            lines.append("{:{}}  {}".format("" if index else label + ":", width, shown))
    return "\n".join(lines)


def as_html(reading: Reading) -> str:
    """Return it as a table without scripts: for a notebook that is saved or exported."""
    left = 'style="text-align: left"'
    cells = "".join(
        '<tr><th scope="row" {}>{}</th><td {}>{}</td></tr>'.format(
            left, html.escape(label), left, "<br>".join(html.escape(value) for value in values)
        )
        for label, values in rows(reading)
    )
    at = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(reading.at_s))
    return "<table><caption>GPU share at {}</caption>{}</table>".format(at, cells)
