"""What the first page shows: which sessions, in which order, and the bars of resources. Pure: from the API's objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import quote, urlencode

from fgpu_scheduler import NodeState, parse_milli
from fgpuspawner.service.model import NODE_WORDS, Viewer
from fgpuspawner.service.objects import Amounts, Capacity, CapacityForAdmins, Group, NodeIsolation, Session
from fgpuspawner.service.pages.session_rows import (
    LAUNCHING,
    SessionRow,
    StackedBar,
    part_of,
    row,
    stacked_bar,
    whole,
)
from fgpuspawner.service.problems import bad_argument
from fgpuspawner.text.sessions import end_words

STATES = {
    "running": ("RUNNING", "RESUMING"),
    "parked": ("PARKED",),
    "waiting": ("PENDING",),
    "starting": LAUNCHING,
    "ending": ("TERMINATING",),
}
"""Choices of the status filter, with the states that each means."""

_ORDER = ("RUNNING", "RESUMING", "PARKED", "PULLING", "PREPARING", "SCHEDULED", "PENDING", "TERMINATING")
LONGEST_TEXT = 200

Key = tuple[float | str, ...] | None
"""The sort key of a session; None sorts last in both directions."""


def _used(session: Session) -> Key:
    used = None if session.meter is None else session.meter.memory_used_mib
    return None if used is None else (used,)


def _amount(session: Session) -> Key:
    if session.fgpu is not None:
        return 0, parse_milli(session.fgpu, field="fgpu")
    # The fGPU of an exact amount is known once it is placed.
    return 1, session.gpu_memory_mib or 0, session.amount


SORTS: Mapping[str, Callable[[Session], Key]] = {
    "name": lambda s: (s.display_name.casefold(),),
    "user": lambda s: (s.user.casefold(),),
    "status": lambda s: (_ORDER.index(s.state), s.position or 0),
    "image": lambda s: (s.image_name.casefold(),),
    "amount": _amount,
    "use": _used,
    "started": lambda s: None if s.started_at_s is None else (s.started_at_s,),
    "cpu": lambda s: (parse_milli(s.cpu, field="cpu"),),
    "memory": lambda s: (s.memory_mib,),
    "elapsed": lambda s: None if s.started_at_s is None else (-s.started_at_s,),
    "left": lambda s: None if s.ends_at_s is None else (s.ends_at_s,),
}
"""Sortable columns."""


@dataclass(frozen=True, slots=True)
class SessionFilter:
    """The filters and order of a list. Without ``sort`` the order is that of submission."""

    sort: str = ""
    descending: bool = False
    state: str = ""
    user: str = ""
    text: str = ""

    @property
    def narrows(self) -> bool:
        return bool(self.state or self.user or self.text)

    def query(self, **changes: str | bool) -> str:
        """Return an address's query for this choice, with changes; empty without a choice."""
        made = replace(self, **changes)  # type: ignore[arg-type]
        given = {"sort": made.sort, "state": made.state, "user": made.user, "q": made.text}
        if made.sort and made.descending:
            given["order"] = "descending"
        return urlencode({name: value for name, value in given.items() if value})

    def direction(self, name: str) -> str:
        """Return a column's ``aria-sort``."""
        if name != self.sort:
            return "none"
        return "descending" if self.descending else "ascending"

    def turned(self, name: str) -> str:
        """Return the query of a column's title: ascending first, then descending, then as submitted."""
        if name != self.sort:
            return self.query(sort=name, descending=False)
        return self.query(sort="", descending=False) if self.descending else self.query(descending=True)


def read_filter(argument: Callable[[str], str], *, admin: bool) -> SessionFilter:
    """Return the choice of an address, read with ``argument``."""
    for name, known in (
        ("sort", tuple(SORTS)),
        ("state", tuple(STATES)),
        ("order", ("ascending", "descending")),
    ):
        value = argument(name)
        if value and value not in known:
            raise bad_argument(name, f"must be one of {', '.join(known)}")
    for name in ("q", "user"):
        if len(argument(name)) > LONGEST_TEXT:
            raise bad_argument(name, f"must have at most {LONGEST_TEXT} characters")
    return SessionFilter(
        sort=argument("sort"),
        descending=argument("order") == "descending",
        state=argument("state"),
        user=argument("user") if admin else "",
        text=argument("q").strip(),
    )


def filtered(sessions: Sequence[Session], choice: SessionFilter) -> list[Session]:
    """Return the sessions that match a filter, in its order; equal ones in order of submission."""
    found = [s for s in sessions if _shown(s, choice)]
    if not choice.sort:
        return found
    key = SORTS[choice.sort]
    known = [(own, s) for s in found if (own := key(s)) is not None]
    rest = [s for s in found if key(s) is None]
    known.sort(key=lambda pair: pair[0], reverse=choice.descending)
    return [s for _, s in known] + rest


def _shown(session: Session, choice: SessionFilter) -> bool:
    if choice.state and session.state not in STATES[choice.state]:
        return False
    if choice.user and session.user != choice.user:
        return False
    return not choice.text or any(choice.text.casefold() in text for text in _texts(session))


def _texts(session: Session) -> tuple[str, ...]:
    texts = (
        session.display_name,
        session.user,
        session.image_name,
        session.amount,
        session.state,
        session.message or "",
    )
    return tuple(text.casefold() for text in texts)


MOST_ROWS = 1000
"""Most rows of the table; filters find the others."""


@dataclass(frozen=True, slots=True)
class Gauge:
    """One resource: in the group, and in all groups where there are several."""

    name: str
    levels: tuple[StackedBar, ...]


@dataclass(frozen=True, slots=True)
class SessionsView:
    rows: tuple[SessionRow, ...]
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


def sessions_view(
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
    choice: SessionFilter | None = None,
) -> SessionsView:
    """Return the page for a viewer, with the bars of ``group``, or of their first one.

    ``hub_host`` is the host of sessions' own paths, if it is not the page's.
    """
    groups = tuple(g.name for g in capacity.groups)
    own = group if group is not None and group in groups else next(iter(groups), "")
    here = next((g for g in capacity.groups if g.name == own), None)
    found = filtered(sessions, choice or SessionFilter())
    nodes = capacity.nodes if isinstance(capacity, CapacityForAdmins) else ()
    return SessionsView(
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
        machines=tuple((node, NODE_WORDS[NodeState(node.state)]) for node in nodes),
        lost="" if here is None else lost_nodes_text(here.nodes, here.nodes_lost),
    )


def lost_nodes_text(nodes: int, lost: int) -> str:
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
) -> StackedBar:
    total, used, free = (sum(whole(group[of][key]) for group in groups) for of in ("total", "used", "free"))
    mine, allocatable = (whole(amounts[key]) for amounts in viewers)
    rest = ("unavailable", "unavailable", total - used - free)
    if everybody:
        return stacked_bar(
            label, [("used", "in use", used), ("free", "free", free), rest], total, key, unit, None
        )
    can = mine + allocatable
    own = part_of(mine, can, key, unit) if can else ""
    amounts = [("mine", "yours", mine), ("others", "others'", used - mine), ("free", "free", free), rest]
    return stacked_bar(label, amounts, total, key, unit, own)
