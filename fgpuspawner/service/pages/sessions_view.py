"""What the first page shows, in words and lengths of bars. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import quote

from fgpuspawner.service.model import Viewer
from fgpuspawner.service.objects import Amounts, Capacity, CapacityForAdmins, Group, NodeIsolation, Session
from fgpuspawner.service.pages.bars import Stack, part_of, stack, whole
from fgpuspawner.service.pages.session_filter import Choice, chosen
from fgpuspawner.service.pages.session_rows import Row, row
from fgpuspawner.text.sessions import end_words

MOST_ROWS = 1000
"""Most rows of the table; filters find the others."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One resource: in the group, and in all groups where there are several."""

    name: str
    levels: tuple[Stack, ...]


@dataclass(frozen=True, slots=True)
class Page:
    rows: tuple[Row, ...]
    total: int
    """Number of sessions; ``found`` counts those that the filters chose. The first of these are shown."""
    found: int
    users: tuple[str, ...]
    past: tuple[tuple[Session, str], ...]
    """Recently ended sessions, and why."""
    gauges: tuple[Gauge, ...]
    group: str
    groups: tuple[str, ...]
    waiting: int
    largest_now: str | None
    everybody: bool
    simulated: bool
    read_at_s: int
    new_url: str | None
    machines: tuple[tuple[NodeIsolation, str], ...]
    """The nodes, for administrators, with their states in words."""
    lost: str
    """Text about machines in the group that do not answer; empty if all do."""


def page(
    *,
    sessions: Sequence[Session],
    ended: Sequence[Session],
    capacity: Capacity,
    group: str | None,
    viewer: Viewer,
    everybody: bool,
    base_url: str,
    read_at_s: int,
    hub_host: str = "",
    choice: Choice | None = None,
) -> Page:
    """Return the page for a viewer, with the bars of ``group``, or of their first one.

    ``hub_host`` is the host of sessions' own paths, if it is not the page's.
    """
    groups = tuple(g.name for g in capacity.groups)
    own = group if group is not None and group in groups else next(iter(groups), "")
    here = next((g for g in capacity.groups if g.name == own), None)
    found = chosen(sessions, choice or Choice())
    nodes = capacity.nodes if isinstance(capacity, CapacityForAdmins) else ()
    return Page(
        rows=tuple(row(s, hub_host) for s in found[:MOST_ROWS]),
        total=len(sessions),
        found=len(found),
        users=tuple(sorted({s.user for s in sessions})) if everybody else (),
        past=tuple((s, end_words(s.end_cause, s.message)) for s in ended),
        gauges=() if here is None else gauges(here, capacity, everybody=everybody),
        group=own,
        groups=groups,
        waiting=0 if here is None else here.waiting,
        largest_now=None if here is None else here.largest_fgpu_now,
        everybody=everybody,
        simulated=capacity.simulated or any(s.simulated for s in sessions),
        read_at_s=read_at_s,
        new_url=new_session_url(sessions, viewer, base_url),
        machines=tuple((node, NODE_WORDS[node.state]) for node in nodes),
        lost="" if here is None else lost_words(here.nodes, here.nodes_lost),
    )


NODE_WORDS = {
    "READY": "takes sessions",
    "CORDONED": "takes no new sessions: it was taken out of use",
    "LOST": "does not answer; what it runs keeps its shares",
    "GONE": "is gone, an administrator said; its sessions are being ended",
}


def lost_words(nodes: int, lost: int) -> str:
    """Return the text for all users about machines that do not answer."""
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


def new_session_url(sessions: Sequence[Session], viewer: Viewer, base_url: str) -> str | None:
    """Return the Hub's address for a new session: the default server if it is unused, else a named one."""
    if viewer.user is None:
        return None
    # A server may be started again while its last session is still ending.
    used = {s.server_name for s in sessions if s.mine and s.state != "TERMINATING"}
    if "" not in used:
        return f"{base_url}hub/spawn"
    number = next(n for n in range(1, len(used) + 2) if f"gpu-{n}" not in used)
    return f"{base_url}hub/spawn/{quote(viewer.user, safe='@~')}/gpu-{number}"


RESOURCES = (("GPU", "fgpu", "fGPU"), ("CPU", "cpu", "cores"), ("Memory", "memory_mib", "GiB"))


def gauges(here: Group, capacity: Capacity, *, everybody: bool) -> tuple[Gauge, ...]:
    """Return the gauges of fGPU, CPU and memory for one group, and for all."""
    groups, found = capacity.groups, []
    own, overall = (here.mine, here.allocatable), (capacity.mine_overall, capacity.allocatable_overall)
    for name, key, unit in RESOURCES:
        levels = [_level(f"In {here.name}" if len(groups) > 1 else "", [here], own, key, unit, everybody)]
        if len(groups) > 1:
            levels.append(_level("In all groups", groups, overall, key, unit, everybody))
        found.append(Gauge(name, tuple(levels)))
    return tuple(found)


def _level(
    label: str,
    groups: Sequence[Group],
    viewers: tuple[Amounts, Amounts],
    key: str,
    unit: str,
    everybody: bool,
) -> Stack:
    """Return one bar over these groups; ``viewers`` is what the viewer holds and could get there."""
    total, used, free = (sum(whole(group[of][key]) for group in groups) for of in ("total", "used", "free"))
    mine, allocatable = (whole(amounts[key]) for amounts in viewers)
    rest = ("unavailable", "unavailable", total - used - free)
    if everybody:
        return stack(label, [("used", "in use", used), ("free", "free", free), rest], total, key, unit, None)
    can = mine + allocatable
    own = part_of(mine, can, key, unit) if can else ""
    amounts = [("mine", "yours", mine), ("others", "others'", used - mine), ("free", "free", free), rest]
    return stack(label, amounts, total, key, unit, own)
