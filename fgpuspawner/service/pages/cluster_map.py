"""The cluster map: every GPU with its slices, and the queue. It decides what a viewer may know of others."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from fgpu_scheduler import (
    MIN_CPU_MILLI,
    MIN_MEMORY_MIB,
    Device,
    DeviceFree,
    Forecast,
    Free,
    Node,
    NodeFree,
    NodeState,
    Request,
    Session,
    Share,
    ShareMode,
    StoreUnavailable,
    SystemClock,
    accepts_model,
    claimed,
    format_milli,
    free,
    placements,
)
from fgpuspawner.service.api.session_objects import start_words
from fgpuspawner.service.model import (
    NODE_WORDS,
    Viewer,
    World,
    groups_of,
    is_mine,
    is_visible,
    session_label,
)
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.pages.session_rows import percent
from fgpuspawner.text.sessions import about_words, amount_words, isolated, mib, ordinal, session_name

Beside = Callable[[str, int], tuple[int, int]]
"""For a resource group and fGPU x 1000: the CPU x 1000 and memory in MiB that go with them."""

MOST_WAITING = 20
"""Waiting requests drawn of one resource group; the rest are counted."""
MINUTE_S = 60
WIDEST_BLOCK_GPUS = 4
"""A request for more GPUs than these is drawn as wide as these."""
LETTERS = 22
"""Letters that fit a whole GPU's drawing at its smallest; a slice fits its part of them."""


@dataclass(frozen=True, slots=True)
class GpuSlice:
    """A part of a GPU; ``x``, ``width`` and ``middle`` are in percent of it.

    ``kind`` is mine, other, free, blocked (its machine lacks the CPU or memory that goes with it) or unusable.
    """

    kind: str
    x: str
    width: str
    middle: str
    amount: str
    label: str
    who: str


@dataclass(frozen=True, slots=True)
class MapGpu:
    """One GPU in slices, from left to right. ``cordoned`` is the reason, for administrators, or empty."""

    name: str
    node: str
    model: str
    whole: str
    simulated: bool
    cordoned: str
    slices: tuple[GpuSlice, ...]
    free: str
    text: str


@dataclass(frozen=True, slots=True)
class MapMachine:
    """One node and its GPUs. ``words`` describe its problem, or are empty."""

    name: str
    state: str
    words: str
    gpus: tuple[MapGpu, ...]


@dataclass(frozen=True, slots=True)
class QueueBlock:
    """One waiting request. ``width`` is in percent of the GPUs that the widest may take."""

    position: str
    amount: str
    label: str
    mine: bool
    width: str
    text: str


@dataclass(frozen=True, slots=True)
class QueueHead:
    """The first waiting request: the ends with which it starts, the time (about, or at the latest), and single ends
    that suffice.
    """

    text: str
    expected_at_s: int | None
    sooner: str
    about: str


@dataclass(frozen=True, slots=True)
class MapGroup:
    """One resource group: its machines, its queue, and what blocks it."""

    name: str
    machines: tuple[MapMachine, ...]
    waiting: int
    blocks: tuple[QueueBlock, ...]
    more: str
    pieces: str
    head: QueueHead | None


def cluster_map(world: World, viewer: Viewer, beside: Beside) -> tuple[MapGroup, ...]:
    """Return what the viewer sees of each resource group that they may know of."""
    left, beside = free(world.snapshot), cache(beside)
    return tuple(_group(name, world, viewer, left, beside) for name in groups_of(viewer, world))


def _group(name: str, world: World, viewer: Viewer, left: Free, beside: Beside) -> MapGroup:
    own = [node for node in left if node.node.resource_group == name]
    usable = {uuid: each for node in own for uuid, each in _usable(node, world.step_milli, beside).items()}
    waiting = world.queues.get(name, ())
    blocks = tuple(_queue_block(f, s, viewer, own) for f, s in waiting[:MOST_WAITING])
    return MapGroup(
        name=name,
        machines=tuple(_machine(node, world, usable, viewer) for node in own),
        waiting=len(waiting),
        blocks=blocks,
        more=_more([s for _, s in waiting[MOST_WAITING:]]),
        pieces=_pieces(own, usable),
        head=_queue_head(name, world, viewer),
    )


@dataclass(frozen=True, slots=True)
class _UsablePart:
    """Of a GPU's free part: what new sessions could have, and what a lack of the machine's CPU or memory blocks."""

    milli: int
    blocked_milli: int
    why_blocked: str = ""


def _usable(left: NodeFree, step_milli: int, beside: Beside) -> dict[str, _UsablePart]:
    """Return what new sessions could have of each GPU of a node, all at the same time.

    The largest piece comes first, so that it is the largest slice that starts here.
    """
    found, group = {}, left.node.resource_group
    for device in sorted(left.devices, key=lambda d: (-d.fgpu_milli, d.device.index)):
        alone = _largest(left, device, step_milli, lambda _: (0, 0))
        most = _largest(left, device, step_milli, lambda milli: beside(group, milli))
        own = 0 if most is None else most[0]
        blocked = (0 if alone is None else alone[0]) - own
        least = _largest(left, device, step_milli, lambda _: (MIN_CPU_MILLI, MIN_MEMORY_MIB))
        why = (
            "its machine has no CPU or memory left"
            if least is None
            else "for sessions with less CPU or memory"
        )
        found[device.device.uuid] = _UsablePart(own, blocked, why if blocked else "")
        left = left if most is None else most[1]
    return found


def _largest(
    left: NodeFree, device: DeviceFree, step_milli: int, beside: Callable[[int], tuple[int, int]]
) -> tuple[int, NodeFree] | None:
    """Return the largest fGPU x 1000 that a new session could have of a GPU, and what then remains."""
    alone = replace(left, devices=(device,))
    for steps in range(min(device.fgpu_milli, device.device.capacity_milli) // step_milli, 0, -1):
        cpu_milli, memory_mib = beside(steps * step_milli)
        asked = Request("", "", "", left.node.resource_group, steps * step_milli, cpu_milli, memory_mib)
        placed = next(placements(alone, asked), None)
        if placed is not None:
            return steps * step_milli, claimed(left, asked, placed[0])
    return None


def _machine(node: NodeFree, world: World, usable: Mapping[str, _UsablePart], viewer: Viewer) -> MapMachine:
    gpus = tuple(
        _gpu(node.node, d, world.held.get(d.device.uuid, ()), usable[d.device.uuid], viewer)
        for d in sorted(node.devices, key=lambda d: d.device.index)
    )
    state = node.node.state
    return MapMachine(node.node.id, state.value, "" if state is NodeState.READY else NODE_WORDS[state], gpus)


def _gpu(
    node: Node, left: DeviceFree, held: Sequence[tuple[Session, Share]], usable: _UsablePart, viewer: Viewer
) -> MapGpu:
    device = left.device
    # After an administrator made the unit smaller, more can be held than there is.
    whole_milli = max(device.capacity_milli, sum(share.fgpu_milli for _, share in held), 1)
    found: list[GpuSlice] = []
    at = 0

    def add(kind: str, milli: int, label: str, who: str) -> None:
        nonlocal at
        found.append(_slice(kind, at, milli, whole_milli, label, who))
        at += milli

    for session, share in held:
        kind = "mine" if is_mine(session, viewer) else "other"
        add(
            kind,
            share.fgpu_milli,
            _label(session, viewer) or format_milli(share.fgpu_milli),
            session_label(session, viewer),
        )
    rest = max(0, left.fgpu_milli - usable.milli - usable.blocked_milli)
    if usable.milli:
        add("free", usable.milli, "free", "free")
    if usable.blocked_milli:
        add("blocked", usable.blocked_milli, "", f"blocked: {usable.why_blocked}")
    if rest:
        add("unusable", rest, "", _why_unusable(node, left, held))
    slices = tuple(found)
    return MapGpu(
        name=f"GPU {device.index}",
        node=node.id,
        model=device.model,
        whole=f"{format_milli(device.capacity_milli)} fGPU, {mib(device.memory_mib)}",
        simulated=device.simulated,
        cordoned=_cordon_words(device, viewer),
        slices=slices,
        free=format_milli(usable.milli),
        text=f"GPU {device.index} of {node.id}: " + ", ".join(f"{s.amount} fGPU {s.who}" for s in slices),
    )


def _slice(kind: str, at: int, milli: int, whole_milli: int, label: str, who: str) -> GpuSlice:
    room = LETTERS * milli // whole_milli
    if kind == "mine" and len(label) > room:
        # Its colour already shows that it is the viewer's own.
        label = format_milli(milli)
    shown = label if len(label) <= room else f"{label[: room - 1]}…" if room > 2 else ""
    middle = percent(2 * at + milli, 2 * whole_milli)
    width = percent(milli, whole_milli)
    return GpuSlice(kind, percent(at, whole_milli), width, middle, format_milli(milli), shown, who)


def _label(session: Session, viewer: Viewer) -> str:
    """Return the text that fits a session's slice; empty if the viewer may not know the owner."""
    if is_mine(session, viewer):
        return session_name(session.request)
    return session.request.user if is_visible(session, viewer) else ""


def _cordon_words(device: Device, viewer: Viewer) -> str:
    if not device.cordoned:
        return ""
    reason = f": {isolated(device.cordon_reason)}" if viewer.admin and device.cordon_reason else ""
    return f"takes no sessions{reason}"


def _why_unusable(node: Node, left: DeviceFree, held: Sequence[tuple[Session, Share]]) -> str:
    if node.state is not NodeState.READY:
        return "unavailable: its machine takes no sessions"
    if left.device.cordoned:
        return "unavailable: this GPU takes no sessions"
    if left.shares <= 0:
        return f"unavailable: at most {left.device.max_shares} sessions may share this GPU"
    if left.mode is ShareMode.MEMORY:
        return "free for memory only, as its other sessions have it"
    return "too little for a session"


def _pieces(nodes: Sequence[NodeFree], usable: Mapping[str, _UsablePart]) -> str:
    pieces = [own.milli for own in usable.values() if own.milli]
    blocked = sum(own.blocked_milli for own in usable.values())
    left = sum(max(0, d.fgpu_milli) for n in nodes for d in n.devices)
    lost = left - sum(pieces) - blocked
    if not pieces:
        found = ["Nothing is free."]
    elif len(pieces) == 1:
        found = [f"{format_milli(pieces[0])} fGPU is free, in one piece."]
    else:
        total, largest = format_milli(sum(pieces)), format_milli(max(pieces))
        found = [f"{total} fGPU is free, in {len(pieces)} pieces; the largest on one GPU is {largest} fGPU."]
    if blocked:
        found.append(f"{format_milli(blocked)} fGPU is blocked: its machine is short of CPU or memory.")
    if lost:
        found.append(f"{format_milli(lost)} fGPU is unavailable.")
    return " ".join(found)


def _queue_block(found: Forecast, session: Session, viewer: Viewer, nodes: Sequence[NodeFree]) -> QueueBlock:
    share = _gpus_of(session.request, [d.device for n in nodes for d in n.devices])
    amount = amount_words(session.request)
    # The reason why another user's request waits can name their quota.
    why = f": {found.text}" if is_visible(session, viewer) else ""
    return QueueBlock(
        position="next pass" if found.position == 0 else ordinal(found.position),
        amount=amount,
        label=_label(session, viewer),
        mine=is_mine(session, viewer),
        width=percent(min(share, WIDEST_BLOCK_GPUS * 1000), WIDEST_BLOCK_GPUS * 1000),
        text=f"{session_label(session, viewer)}, {amount}{why}",
    )


def _gpus_of(asked: Request, devices: Sequence[Device]) -> int:
    """Return the GPUs x 1000 that a request comes to, by the first GPU that it may have."""
    device = next((d for d in devices if accepts_model(asked, d.model)), None)
    if device is None:
        return 1000
    if asked.gpu_memory_mib is not None:
        return asked.gpu_memory_mib * 1000 // device.memory_mib
    return asked.fgpu_milli * 1000 // device.capacity_milli


def _more(rest: Sequence[Session]) -> str:
    if not rest:
        return ""
    return f"and {len(rest)} more, for {format_milli(sum(s.request.fgpu_milli for s in rest))} fGPU together"


def _queue_head(group: str, world: World, viewer: Viewer) -> QueueHead | None:
    found = world.unblockings.get(group)
    head = None if found is None else world.session(found.head_id)
    if head is None:
        return None
    who = "Your request" if is_mine(head, viewer) else "The first in the queue"
    if is_visible(head, viewer) and not is_mine(head, viewer):
        who += f" ({session_label(head, viewer)})"
    expected = world.forecasts.get(head.id)
    begins, sooner = start_words(head, world, viewer)
    at_s = None if expected is None else expected.expected_start_at_s
    return QueueHead(
        f"{who}, {amount_words(head.request)}, {begins}",
        # To the minute: it moves with the clock, and the map should not be redrawn for that.
        None if at_s is None else at_s - at_s % MINUTE_S,
        f"It {sooner}." if sooner else "",
        about_words(expected.basis if expected else ""),
    )


PARTS = ("drawing", "words", "read")


class MapPage(PageHandler):
    """Every GPU with its slices, and the queue; from the last good reading, with its age, if none is possible now."""

    async def get(self) -> None:
        reader, trouble = self.service.reader, None
        try:
            world = await (reader.world() if self.wants_part else reader.recent_world())
        except StoreUnavailable as e:
            last = reader.last_world
            if last is None:
                raise
            trouble, world = self.problem_of(503, e), last
            self.set_status(503)
        more = {
            "groups": cluster_map(world, self.viewer, reader.cpu_and_memory_of(world)),
            "trouble": trouble,
            "age_s": SystemClock().now_s() - world.snapshot.now_s,
            "read_at_s": world.snapshot.now_s,
            "xsrf": self.xsrf,
        }
        if not self.wants_part:
            self.render("map.html", **more)
            return
        parts = {name: self.render_string(f"map_{name}.html", **more).decode() for name in PARTS}
        self.send_parts({"parts": parts})
