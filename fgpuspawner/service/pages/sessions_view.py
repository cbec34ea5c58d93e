"""What the first page shows, in words and lengths of bars. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fgpuspawner.service.model import Json, Viewer
from fgpuspawner.service.pages.bars import Bar, part_of, percent, whole
from fgpuspawner.service.pages.session_filter import Choice, chosen
from fgpuspawner.service.pages.session_rows import Row, end_words, row

MOST_ROWS = 1000
"""Lines of the table at most; whoever has more narrows what is shown."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """Upper and lower bar of one resource (product C2, C3), and what everybody uses in the group (C1)."""

    name: str
    upper: Bar
    lower: Bar
    everybody: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that the first page shows."""

    rows: tuple[Row, ...]
    total: int
    """Of the sessions that there are; ``found`` of those that were chosen, of which the first are shown."""
    found: int
    users: tuple[str, ...]
    past: tuple[tuple[Json, str], ...]
    """What has ended lately, and why."""
    gauges: tuple[Gauge, ...]
    group: str
    groups: tuple[str, ...]
    waiting: int
    largest_now: str | None
    everybody: bool
    simulated: bool
    read_at_s: int
    new_url: str | None
    machines: tuple[tuple[Json, str], ...]
    """The nodes, for administrators, and what their states mean."""
    lost: str
    """What the viewer is told of machines in the group that do not answer; empty if all do."""


def page(
    *,
    sessions: Sequence[Json],
    ended: Sequence[Json],
    capacity: Json,
    group: str | None,
    viewer: Viewer,
    everybody: bool,
    base_url: str,
    read_at_s: int,
    hub_host: str = "",
    choice: Choice | None = None,
) -> Page:
    """Return the page for a viewer, with the bars of ``group``, or of their first one.

    ``hub_host`` is what sessions' own paths are on, if that is not where the page is.
    """
    groups = tuple(g["name"] for g in capacity["groups"])
    own = group if group is not None and group in groups else next(iter(groups), "")
    here = next((g for g in capacity["groups"] if g["name"] == own), None)
    found = chosen(sessions, choice or Choice())
    return Page(
        rows=tuple(row(s, hub_host) for s in found[:MOST_ROWS]),
        total=len(sessions),
        found=len(found),
        users=tuple(sorted({s["user"] for s in sessions})) if everybody else (),
        past=tuple((s, end_words(s["end_cause"], s["message"])) for s in ended),
        gauges=() if here is None else gauges(here, capacity),
        group=own,
        groups=groups,
        waiting=0 if here is None else here["waiting"],
        largest_now=None if here is None else here["largest_fgpu_now"],
        everybody=everybody,
        simulated=capacity["simulated"] or any(s["simulated"] for s in sessions),
        read_at_s=read_at_s,
        new_url=new_session_url(sessions, viewer, base_url),
        machines=tuple((node, NODE_WORDS[node["state"]]) for node in capacity.get("nodes", ())),
        lost="" if here is None else lost_words(here["nodes"], here["nodes_lost"]),
    )


NODE_WORDS = {
    "READY": "takes sessions",
    "CORDONED": "takes no new sessions: an administrator said so",
    "LOST": "does not answer; what it runs keeps its shares",
    "GONE": "is gone, an administrator said; its sessions are being ended",
}


def lost_words(nodes: int, lost: int) -> str:
    """Return what everybody is told of machines that do not answer."""
    if not lost:
        return ""
    who = (
        "The machine of this group does" if nodes == 1 else f"{lost} of the {nodes} machines of this group do"
    )
    if nodes > 1 and lost == 1:
        who += "es"
    return (
        f"{who} not answer. What runs there keeps its share; what waits starts elsewhere, or when it is back."
    )


def new_session_url(sessions: Sequence[Json], viewer: Viewer, base_url: str) -> str | None:
    """Return where the Hub asks for a new session: the default server if it is unused, else a named one."""
    if viewer.user is None:
        return None
    # A server whose last session still ends may be asked for again.
    used = {s["server_name"] for s in sessions if s["mine"] and s["state"] != "TERMINATING"}
    if "" not in used:
        return f"{base_url}hub/spawn"
    number = next(n for n in range(1, len(used) + 2) if f"gpu-{n}" not in used)
    return f"{base_url}hub/spawn/{quote(viewer.user, safe='@~')}/gpu-{number}"


def gauges(here: Json, capacity: Json) -> tuple[Gauge, ...]:
    """Return the gauges of fGPU, CPU and memory for one group."""
    return tuple(
        Gauge(
            name=name,
            upper=_bar(f"In group {here['name']}", here["mine"], here["allocatable"], key, unit),
            lower=_bar("Overall", capacity["mine_overall"], capacity["allocatable_overall"], key, unit),
            everybody=part_of(whole(here["used"][key]), whole(here["total"][key]), key, unit),
        )
        for name, key, unit in (
            ("GPU", "fgpu", "fGPU"),
            ("CPU", "cpu", "cores"),
            ("Memory", "memory_mib", "MiB"),
        )
    )


def _bar(label: str, mine: Json, allocatable: Json, key: str, unit: str) -> Bar:
    own = whole(mine[key])
    both = own + whole(allocatable[key])
    return Bar(label, part_of(own, both, key, unit), percent(own, both))
