"""What ``fgpu top`` shows, as lines of a terminal of a given size. Pure.

What the API does not tell is "?", and never 0. Columns go from the least needed on where a terminal is narrow.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fgpu_scheduler import memory_words
from fgpuspawner.text.tables import printable
from fgpuspawner.text.times import duration, instant

Json = Mapping[str, Any]

GAP = "  "
BAR = 10
UNKNOWN = "?"


@dataclass(frozen=True, slots=True)
class View:
    """How it is to be shown: which order, which sessions, from which line on."""

    sort: str = "session"
    words: str = ""
    first: int = 0
    typing: bool = False


@dataclass(frozen=True, slots=True)
class Line:
    """One line, and what it is: "title", "heading", "warning", or "" of all else."""

    text: str
    kind: str = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column; of two that do not fit the one with the higher ``rank`` goes."""

    name: str
    rank: int
    cell: Callable[[Json], str]
    right: bool = False
    most: int = 30


def frame(found: Json, view: View, *, width: int, height: int | None) -> list[Line]:
    """Return the whole screen; without a height all there is, for a file."""
    top = [*_head(found), Line(""), *_gpus(found, width)]
    rest = [Line(""), *_sessions(found, view, width), Line(""), *_queues(found, view, width)]
    if height is not None:
        room = max(height - len(top) - 1, 3)
        first = min(view.first, max(len(rest) - room, 0))
        top, rest = top[: max(height - 4, 1)], rest[first : first + room]
        rest += [Line("")] * (height - len(top) - len(rest) - 1)
        rest.append(Line(_keys(view), "title"))
    return [Line(_cut(line.text, width), line.kind) for line in [*top, *rest]]


def _head(found: Json) -> Iterator[Line]:
    me = found["me"]
    who = printable(me["user"] or "a service")
    simulated = "; GPUs are simulated" if found["capacity"]["simulated"] else ""
    yield Line(f"fgpu top{GAP}{who}{GAP}{instant(found['at_s'])}{simulated}", "title")
    if me["banner"]:
        yield Line(printable(me["banner"]["text"]), "warning")
    if found.get("trouble"):
        yield Line(f"{printable(found['trouble'])}; asking again", "warning")
    for group in found["capacity"]["groups"]:
        lost = f", {group['nodes_lost']} machines do not answer" if group["nodes_lost"] else ""
        largest = group["largest_fgpu_now"]
        text = (
            f"{printable(group['name'])}: {group['used']['fgpu']} of {group['total']['fgpu']} fGPU in use, "
            f"{group['waiting']} waiting{lost}; {f'{largest} fGPU' if largest else 'nothing'} would start now"
        )
        yield Line(text, "warning" if lost else "")


# -- GPUs ---------------------------------------------------------------------------------------------


def _gpus(found: Json, width: int) -> list[Line]:
    devices = [d for group in found["capacity"]["groups"] for d in group["devices"]]
    had = _had_of_each_gpu(found)
    none: dict[str, Any] = {"entitled": 0, "received": 0, "memory": 0, "shared": False}

    def of(name: str, unit: str) -> Callable[[Json], str]:
        def cell(device: Json) -> str:
            own = had.get(device["uuid"], none)
            about = "~" if own["shared"] and name != "entitled" else ""
            return UNKNOWN if own[name] is None else f"{about}{own[name]:.0f}{unit}"

        return cell

    everybodys = "" if found["all"] else "yours "
    columns = (
        Column("GPU", 0, lambda d: str(d["index"]), right=True),
        Column("machine", 2, lambda d: printable(d["node"]), most=16),
        Column("model", 6, lambda d: printable(d["model"]), most=24),
        Column("fGPU in use", 1, _bar, most=40),
        Column(f"{everybodys}entitled", 4, of("entitled", " %"), right=True),
        Column("received", 3, of("received", " %"), right=True),
        Column("memory", 3, of("memory", " MiB"), right=True),
        Column("of", 5, lambda d: memory_words(d["memory_mib"]), right=True),
        Column("", 7, lambda d: "CORDONED" if d["cordoned"] else ""),
    )
    return _table(columns, devices, width, none="no GPU")


def _bar(device: Json) -> str:
    used, total = float(device["fgpu_used"]), float(device["fgpu_total"])
    full = round(BAR * used / total) if total else 0
    return f"[{'#' * full}{'-' * (BAR - full)}] {device['fgpu_used']}/{device['fgpu_total']}"


def _had_of_each_gpu(found: Json) -> dict[str, dict[str, Any]]:
    """Return of each GPU what the shown sessions are entitled to, receive, and hold.

    A session's meter is the sum over its GPUs: of one with several it is divided as its shares are, and marked so.
    """
    had: dict[str, dict[str, Any]] = {}
    for session in found["sessions"]:
        meter = found["meters"].get(str(session["id"]))
        shares = session["gpus"]
        whole = sum(share["compute_percent"] or 0 for share in shares)
        for share in shares:
            of_gpu = {"entitled": 0.0, "received": 0.0, "memory": 0.0, "shared": False}
            own = had.setdefault(share["uuid"], of_gpu)
            own["entitled"] += share["compute_percent"] or 0
            own["shared"] |= len(shares) > 1
            part = share["compute_percent"] / whole if whole else 1 / len(shares)
            for name, key in (("received", "compute_received_percent"), ("memory", "memory_used_mib")):
                more = meter[key] if meter else None
                own[name] = None if more is None or own[name] is None else own[name] + part * more
    return had


# -- Sessions and the queue ---------------------------------------------------------------------------


def _meter(found: Json, session: Json, name: str) -> Any:
    return (found["meters"].get(str(session["id"])) or {}).get(name)


def _pair(has: Any, of: Any, unit: str) -> str:
    if of is None:
        return "" if has is None else f"{has:.0f}{unit}"
    return f"{UNKNOWN if has is None else f'{has:.0f}'}/{of:.0f}{unit}"


def sorts(found: Json) -> dict[str, Callable[[Json], Any]]:
    """Return the orders of sessions by name: greatest first of what is measured."""
    return {
        "session": lambda s: s["id"],
        "user": lambda s: (s["user"], s["id"]),
        "state": lambda s: (s["state"], s["id"]),
        "memory": lambda s: -(_meter(found, s, "memory_used_mib") or 0),
        "received": lambda s: -(_meter(found, s, "compute_received_percent") or 0),
    }


def _matches(words: str, *texts: object) -> bool:
    return words.lower() in " ".join(map(str, texts)).lower()


def _sessions(found: Json, view: View, width: int) -> list[Line]:
    shown = [
        s
        for s in found["sessions"]
        if s["state"] != "PENDING"
        and _matches(
            view.words, s["id"], s["user"], s["server_name"], s["image"], s["state"], s["node"] or ""
        )
    ]
    shown.sort(key=sorts(found)[view.sort])

    def memory(s: Json) -> str:
        return _pair(_meter(found, s, "memory_used_mib"), s["gpu_memory_mib"], " MiB")

    def received(s: Json) -> str:
        return _pair(_meter(found, s, "compute_received_percent"), s["compute_percent"], " %")

    columns = (
        Column("session", 0, lambda s: str(s["id"]), right=True),
        *((Column("user", 2, lambda s: printable(s["user"]), most=16),) if found["all"] else ()),
        Column("server", 4, lambda s: printable(s["display_name"]), most=20),
        Column("image", 6, lambda s: printable(s["image"]), most=20),
        Column("amount", 3, lambda s: s["amount"], right=True),
        Column("GPU memory", 1, memory, right=True),
        Column("received", 1, received, right=True),
        Column("machine", 7, lambda s: printable(s["node"] or ""), most=16),
        Column("since", 5, lambda s: _ago(found, s["started_at_s"] or s["submitted_at_s"]), right=True),
        Column("state", 0, lambda s: s["state"]),
        Column("", 8, lambda s: printable(s["warning"] or s["message"] or ""), most=80),
    )
    warned = {s["id"] for s in shown if s["warning"] or s["message"]}
    return _table(columns, shown, width, none="no session", warns=lambda s: s["id"] in warned)


def _queues(found: Json, view: View, width: int) -> list[Line]:
    waiting = [
        {**entry, "group": queue["group"]}
        for queue in found["queues"]
        for entry in queue["entries"]
        if _matches(view.words, entry["id"] or "", entry["user"] or "", queue["group"], "PENDING")
    ]
    columns = (
        Column("position", 0, lambda e: str(e["position"]), right=True),
        Column("group", 4, lambda e: printable(e["group"]), most=16),
        Column("session", 3, lambda e: str(e["id"] or ""), right=True),
        Column("user", 2, lambda e: printable(e["user"] or "somebody"), most=16),
        Column("amount", 1, lambda e: e["amount"], right=True),
        Column("waits", 5, lambda e: _ago(found, e["submitted_at_s"]), right=True),
        Column("expected start", 1, _expected),
        Column("why", 6, lambda e: str(e["wait_reason"] or "")),
    )
    return _table(columns, waiting, width, none="nobody waits")


def _expected(entry: Json) -> str:
    if entry["expected_start_at_s"] is None:
        return UNKNOWN
    early, late = entry["early_start_at_s"], entry["late_start_at_s"]
    if early is None or late is None or early == late:
        return instant(entry["expected_start_at_s"], seconds=False)
    return f"{instant(early, seconds=False)[:-1]} to {instant(late, seconds=False)[11:]}"


def _ago(found: Json, at_s: int) -> str:
    return duration(max(found["at_s"] - at_s, 0))


# -- Lines --------------------------------------------------------------------------------------------


def _table(
    columns: Sequence[Column],
    rows: Sequence[Json],
    width: int,
    *,
    none: str,
    warns: Callable[[Json], bool] = lambda _: False,
) -> list[Line]:
    if not rows:
        return [Line(none)]
    cells = {c: [_cut(c.cell(row), c.most) for row in rows] for c in columns}
    wide = {c: max(map(_width, (c.name, *cells[c]))) for c in columns}
    kept = [c for c in columns if any(cells[c])]
    while len(kept) > 1 and sum(wide[c] + len(GAP) for c in kept) - len(GAP) > width:
        kept.remove(max(kept, key=lambda c: c.rank))

    def line(texts: Sequence[str]) -> str:
        padded = []
        for column, text in zip(kept, texts, strict=True):
            space = " " * (wide[column] - _width(text))
            padded.append(space + text if column.right else text + space)
        return GAP.join(padded).rstrip()

    heading = Line(line([c.name for c in kept]), "heading")
    return [
        heading,
        *(
            Line(line([cells[c][n] for c in kept]), "warning" if warns(row) else "")
            for n, row in enumerate(rows)
        ),
    ]


def _keys(view: View) -> str:
    if view.typing:
        return f"filter: {printable(view.words)}_   Enter: keep it   Esc: without"
    filtered = f" ({printable(view.words)})" if view.words else ""
    return f"q: quit   s: sort ({view.sort})   /: filter{filtered}   arrows: scroll"


def _width(text: str) -> int:
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def _cut(text: str, most: int) -> str:
    if _width(text) <= most:
        return text
    while text and _width(text) > most - 1:
        text = text[:-1]
    return f"{text}~" if most > 0 else ""
