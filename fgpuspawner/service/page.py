"""What the first page shows, in words and lengths of bars. Pure: from the API's objects, so both always agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from urllib.parse import quote

from fgpu_scheduler import format_milli, parse_milli
from fgpuspawner.service.view import Json, Viewer
from fgpuspawner.words import hours_minutes

STATE_WORDS = {
    "PENDING": "waiting in the queue",
    "SCHEDULED": "about to start",
    "PREPARING": "starting",
    "PULLING": "fetching its image",
    "RUNNING": "running",
    "TERMINATING": "ending",
    "TERMINATED": "ended",
    "ERROR": "failed",
    "CANCELLED": "cancelled",
}
END_WORDS = {
    "USER": "ended by its owner or an administrator",
    "EXITED": "its server ended by itself",
    "IDLE": "ended because it was idle",
    "TIME_LIMIT": "reached its time limit",
    "QUEUE_TIMEOUT": "waited longer than the queue allows",
    "PREEMPTED": "ended for a session of higher priority",
    "NODE_LOST": "its node was lost",
    "PULL_FAILED": "its image could not be fetched",
    "LAUNCH_FAILED": "it could not be started",
    "OOM": "it ran out of memory",
    "ISOLATION_FAILED": "its GPU limit could not be put in force",
}
LAUNCHING = ("SCHEDULED", "PREPARING", "PULLING")


@dataclass(frozen=True, slots=True)
class Instant:
    """A point in time: for machines, and in UTC for readers without scripts."""

    machine: str
    text: str


@dataclass(frozen=True, slots=True)
class Row:
    """One session in the table."""

    id: int
    name: str
    user: str
    mine: bool
    image: str
    amount: str
    gpu_memory: str
    state: str
    state_words: str
    why: str
    position: str
    expected: Instant | None
    basis: str
    unexpected: str
    waits_for: str
    pull: str
    submitted: Instant | None
    started: Instant | None
    warning: str
    ends: Instant | None
    can_keep: bool
    can_save: bool
    saving: str
    time_limit: str
    open_url: str | None
    wait_url: str | None
    power: str | None
    simulated: bool


@dataclass(frozen=True, slots=True)
class Past:
    """One session that has ended."""

    id: int
    name: str
    user: str
    amount: str
    image: str
    state: str
    why: str
    ended: Instant | None


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: the viewer's own of what is theirs or could be. ``percent`` is its length, to a tenth."""

    label: str
    text: str
    percent: str


@dataclass(frozen=True, slots=True)
class Gauge:
    """Upper and lower bar of one resource (product C2, C3), and what everybody uses in the group (C1)."""

    name: str
    upper: Bar
    lower: Bar
    everybody: str


@dataclass(frozen=True, slots=True)
class Machine:
    """A node, for administrators: its state, and what holds its sessions to their slices."""

    name: str
    state: str
    words: str
    isolation: str


@dataclass(frozen=True, slots=True)
class Page:
    """All that the first page shows."""

    rows: tuple[Row, ...]
    past: tuple[Past, ...]
    gauges: tuple[Gauge, ...]
    group: str
    groups: tuple[str, ...]
    waiting: int
    largest_now: str | None
    everybody: bool
    simulated: bool
    as_of: Instant
    new_url: str | None
    machines: tuple[Machine, ...]
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
) -> Page:
    """Return the page for a viewer, with the bars of ``group``, or of their first one.

    ``hub_host`` is what sessions' own paths are on, if that is not where the page is.
    """
    groups = tuple(g["name"] for g in capacity["groups"])
    chosen = group if group is not None and group in groups else next(iter(groups), "")
    here = next((g for g in capacity["groups"] if g["name"] == chosen), None)
    return Page(
        rows=tuple(_row(s, hub_host) for s in sessions),
        past=tuple(_past(s) for s in ended),
        gauges=() if here is None else gauges(here, capacity),
        group=chosen,
        groups=groups,
        waiting=0 if here is None else here["waiting"],
        largest_now=None if here is None else here["largest_fgpu_now"],
        everybody=everybody,
        simulated=capacity["simulated"] or any(s["simulated"] for s in sessions),
        as_of=instant(read_at_s),
        new_url=new_session_url(sessions, viewer, base_url),
        machines=tuple(_machine(node) for node in capacity.get("nodes", ())),
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


def _machine(node: Json) -> Machine:
    held = "" if node["isolation"] is None else f"isolation {node['isolation']}: {node['reason']}"
    return Machine(node["name"], node["state"], NODE_WORDS[node["state"]], held)


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


def instant(at_s: int) -> Instant:
    """Return an instant for machines and readers."""
    at = datetime.fromtimestamp(at_s, UTC)
    return Instant(at.strftime("%Y-%m-%dT%H:%M:%SZ"), at.strftime("%Y-%m-%d %H:%M UTC"))


def _row(session: Json, hub_host: str) -> Row:
    state, position = session["state"], session["position"]
    running = state == "RUNNING"
    waits = state == "PENDING"
    expected, started = session["expected_start_at_s"], session["started_at_s"]
    limit_s = session["time_limit_s"]
    words = STATE_WORDS[state]
    return Row(
        id=session["id"],
        name=session["display_name"],
        user=session["user"],
        mine=session["mine"],
        image=session["image_name"],
        amount=session["amount"],
        gpu_memory="" if session["gpu_memory_mib"] is None else mib(session["gpu_memory_mib"]),
        state=state,
        state_words=words,
        # A message of a session that runs is a warning to its owner.
        why=(session["message"] or (session["wait_text"] if waits else "") or "")
        if waits or running
        else words,
        position=position_words(position, session["ahead"]) if position else "",
        expected=instant(expected) if waits and expected is not None else None,
        basis=session["forecast_basis"] or "",
        waits_for=session["waits_for"]["text"] if session["waits_for"] else "",
        pull=session["pull"]["text"] if session["pull"] else "",
        unexpected=(session["forecast_basis"] or "") if waits and expected is None else "",
        submitted=instant(session["submitted_at_s"]),
        started=instant(started) if started is not None else None,
        warning=session["warning"] or "",
        ends=instant(session["ends_at_s"]) if session["ends_at_s"] is not None else None,
        can_keep=session["can_keep"],
        can_save=session["can_save"] and session["saving"] is None,
        saving=saving_words(session["saving"]),
        time_limit="" if limit_s is None else hours_minutes(limit_s),
        # Others' servers are not for an administrator to walk into from here.
        open_url=hub_host + session["url"] if running and session["mine"] else None,
        wait_url=hub_host + session["pending_url"]
        if (waits or state in LAUNCHING) and session["mine"]
        else None,
        power=None if state == "TERMINATING" else ("Cancel" if waits else "End"),
        simulated=session["simulated"],
    )


def _past(session: Json) -> Past:
    why = END_WORDS.get(session["end_cause"] or "", "")
    message = session["message"] or ""
    return Past(
        id=session["id"],
        name=session["display_name"],
        user=session["user"],
        amount=session["amount"],
        image=session["image_name"],
        state=session["state"],
        why=f"{why}: {message}" if why and message else (why or message),
        ended=instant(session["ended_at_s"]) if session["ended_at_s"] is not None else None,
    )


def saving_words(saving: Json | None) -> str:
    """Return how far the image is that a session is being saved as; empty where it is not."""
    if saving is None:
        return ""
    how_far = saving["message"] or "it waits for its turn"
    return f"being saved as {saving['name']}: {how_far}"


def position_words(position: int, ahead: int) -> str:
    """Return a place in the queue in words: "1st in the queue, nobody is ahead"."""
    if ahead == 0:
        return "1st in the queue, nobody is ahead"
    return f"{ordinal(position)} in the queue, {ahead} {'is' if ahead == 1 else 'are'} ahead"


def ordinal(number: int) -> str:
    """Return "1st", "2nd", "3rd", "4th", "11th", "21st"."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def mib(amount: int) -> str:
    """Return memory exactly: in GiB where three decimals hold it, else in MiB."""
    return f"{_gib(amount)} GiB" if _is_gib(amount) else f"{amount} MiB"


def _is_gib(amount: int) -> bool:
    # 1/8 GiB is 128 MiB: the finest that three decimals hold.
    return amount % 128 == 0 and amount >= 512


def _gib(amount: int) -> str:
    return format_milli(amount * 1000 // 1024)


def gauges(here: Json, capacity: Json) -> tuple[Gauge, ...]:
    """Return the gauges of fGPU, CPU and memory for one group."""
    return tuple(
        Gauge(
            name=name,
            upper=_bar(f"In group {here['name']}", here["mine"], here["allocatable"], key, unit),
            lower=_bar("Overall", capacity["mine_overall"], capacity["allocatable_overall"], key, unit),
            everybody=_of(_whole(here["used"][key]), _whole(here["total"][key]), key, unit),
        )
        for name, key, unit in (
            ("GPU", "fgpu", "fGPU"),
            ("CPU", "cpu", "cores"),
            ("Memory", "memory_mib", "MiB"),
        )
    )


def _bar(label: str, mine: Json, allocatable: Json, key: str, unit: str) -> Bar:
    own = _whole(mine[key])
    both = own + _whole(allocatable[key])
    return Bar(label, _of(own, both, key, unit), percent(own, both))


def percent(part: int, whole: int) -> str:
    """Return a bar's length in percent, rounded down to a tenth; "0" where there is nothing at all."""
    if whole <= 0 or part <= 0:
        return "0"
    tenths = min(1000, part * 1000 // whole)
    return f"{tenths // 10}.{tenths % 10}"


def _of(part: int, whole: int, key: str, unit: str) -> str:
    if key != "memory_mib":
        return f"{format_milli(part)} of {format_milli(whole)} {unit}"
    if all(amount == 0 or _is_gib(amount) for amount in (part, whole)):
        return f"{_gib(part)} of {_gib(whole)} GiB"
    return f"{part} of {whole} {unit}"


def _whole(amount: str | int) -> int:
    """Return an amount of the API in thousandths, or memory in MiB: sums stay exact."""
    return amount if isinstance(amount, int) else parse_milli(amount, field="amount")
