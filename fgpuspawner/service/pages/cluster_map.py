"""The cluster map: every GPU with its slices, and who waits. Pure; what a viewer may know of others is decided here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler import (
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
    Unblocking,
    format_milli,
    free,
    placements,
)
from fgpuspawner.service.model import Viewer, World, groups_of, is_mine, is_visible, whose
from fgpuspawner.service.pages.bars import percent
from fgpuspawner.service.pages.sessions_view import NODE_WORDS
from fgpuspawner.text.sessions import amount_words, isolated, mib, ordinal, server_words

MOST_WAITING = 20
"""Waiting requests drawn of one resource group; of the others it is said how many there are."""
MOST_NAMED = 3
WIDEST_BLOCK_GPUS = 4
"""A request for more GPUs than these is drawn as wide as these."""
LETTERS = 22
"""What a whole GPU's drawing has room for, where it is smallest; a slice has room for its part of them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a GPU, from ``x`` on, in percent of it as ``middle`` is. ``kind`` is mine, other, free or unusable."""

    kind: str
    x: str
    width: str
    middle: str
    amount: str
    label: str
    who: str


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU and all of it in slices, from left to right."""

    name: str
    node: str
    model: str
    whole: str
    simulated: bool
    slices: tuple[Slice, ...]
    free: str
    text: str


@dataclass(frozen=True, slots=True)
class Machine:
    """One node and its GPUs. ``words`` say what is the matter with it; empty where nothing is."""

    name: str
    state: str
    words: str
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class Block:
    """One waiting request. ``width`` is in percent of the GPUs that the widest may take."""

    position: str
    amount: str
    label: str
    mine: bool
    width: str
    text: str


@dataclass(frozen=True, slots=True)
class Group:
    """One resource group: its machines, its queue, and what stands in the way of who waits."""

    name: str
    machines: tuple[Machine, ...]
    waiting: int
    blocks: tuple[Block, ...]
    more: str
    pieces: str
    unblocking: str


def cluster_map(
    world: World, viewer: Viewer, unblockings: Mapping[str, Unblocking], *, step_milli: int
) -> tuple[Group, ...]:
    """Return what the viewer sees of each resource group that they may know of."""
    left = free(world.snapshot)
    return tuple(
        _group(name, world, viewer, left, unblockings.get(name), step_milli)
        for name in groups_of(viewer, world)
    )


def _group(
    name: str, world: World, viewer: Viewer, left: Free, found: Unblocking | None, step_milli: int
) -> Group:
    own = [node for node in left if node.node.resource_group == name]
    usable = {d.device.uuid: _usable_milli(node, d, step_milli) for node in own for d in node.devices}
    waiting = world.queues.get(name, ())
    blocks = tuple(_block(f, s, viewer, own) for f, s in waiting[:MOST_WAITING])
    return Group(
        name=name,
        machines=tuple(_machine(node, world, usable, viewer) for node in own),
        waiting=len(waiting),
        blocks=blocks,
        more=_more([s for _, s in waiting[MOST_WAITING:]]),
        pieces=_pieces(own, usable),
        unblocking="" if found is None else unblocking_words(found, world, viewer),
    )


def _usable_milli(node: NodeFree, left: DeviceFree, step_milli: int) -> int:
    """Return the largest amount of fGPU that a new session could have of what is free of a GPU."""
    alone = replace(node, devices=(left,))
    most = min(left.fgpu_milli, left.device.capacity_milli) // step_milli
    for steps in range(most, 0, -1):
        asked = Request("", "", "", node.node.resource_group, steps * step_milli, 0, 0)
        if next(placements(alone, asked), None) is not None:
            return steps * step_milli
    return 0


def _machine(node: NodeFree, world: World, usable: Mapping[str, int], viewer: Viewer) -> Machine:
    gpus = tuple(
        _gpu(node.node, d, world.held.get(d.device.uuid, ()), usable[d.device.uuid], viewer)
        for d in node.devices
    )
    state = node.node.state
    return Machine(node.node.id, state.value, "" if state is NodeState.READY else NODE_WORDS[state], gpus)


def _gpu(
    node: Node, left: DeviceFree, held: Sequence[tuple[Session, Share]], usable_milli: int, viewer: Viewer
) -> Gpu:
    device = left.device
    # An administrator may have made the unit smaller since: then what is held is more than there is.
    whole_milli = max(device.capacity_milli, sum(share.fgpu_milli for _, share in held), 1)
    found: list[Slice] = []
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
            whose(session, viewer),
        )
    rest = max(0, left.fgpu_milli - usable_milli)
    if usable_milli:
        add("free", usable_milli, "free", "free")
    if rest:
        add("unusable", rest, "", _why_unusable(node, left, held))
    slices = tuple(found)
    return Gpu(
        name=f"GPU {device.index}",
        node=node.id,
        model=device.model,
        whole=f"{format_milli(device.capacity_milli)} fGPU, {mib(device.memory_mib)}",
        simulated=device.simulated,
        slices=slices,
        free=format_milli(usable_milli),
        text=f"GPU {device.index} of {node.id}: " + ", ".join(f"{s.amount} fGPU {s.who}" for s in slices),
    )


def _slice(kind: str, at: int, milli: int, whole_milli: int, label: str, who: str) -> Slice:
    room = LETTERS * milli // whole_milli
    shown = label if len(label) <= room else f"{label[: room - 1]}…" if room > 2 else ""
    middle = percent(2 * at + milli, 2 * whole_milli)
    width = percent(milli, whole_milli)
    return Slice(kind, percent(at, whole_milli), width, middle, format_milli(milli), shown, who)


def _label(session: Session, viewer: Viewer) -> str:
    """Return what there is room for on a session's drawing; empty where the viewer may not know whose it is."""
    if is_mine(session, viewer):
        return server_words(session)
    return session.request.user if is_visible(session, viewer) else ""


def _why_unusable(node: Node, left: DeviceFree, held: Sequence[tuple[Session, Share]]) -> str:
    if node.state is not NodeState.READY:
        return "cannot be had: its machine takes no sessions"
    if left.shares <= 0:
        return f"cannot be had: no more than {left.device.max_shares} may share this GPU"
    if left.mode is ShareMode.MEMORY:
        return "can be had as memory only, as its other sessions have it"
    return "too little for a session"


def _pieces(nodes: Sequence[NodeFree], usable: Mapping[str, int]) -> str:
    """Return how what is free is cut up: the largest piece against the sum."""
    pieces = [milli for milli in usable.values() if milli]
    lost = sum(max(0, d.fgpu_milli - usable[d.device.uuid]) for n in nodes for d in n.devices)
    besides = f" What is left beside that, {format_milli(lost)} fGPU, nobody can have now." if lost else ""
    if not pieces and lost:
        return f"Nothing is free: {format_milli(lost)} fGPU is left that nobody can have now."
    if not pieces:
        return "Nothing is free."
    total, largest = format_milli(sum(pieces)), format_milli(max(pieces))
    if len(pieces) == 1:
        return f"{total} fGPU is free, in one piece." + besides
    return (
        f"{total} fGPU is free, in {len(pieces)} pieces; the largest on one GPU is {largest} fGPU." + besides
    )


def _block(found: Forecast, session: Session, viewer: Viewer, nodes: Sequence[NodeFree]) -> Block:
    share = _gpus_of(session.request, [d.device for n in nodes for d in n.devices])
    amount = amount_words(session.request)
    # Why somebody else waits can name their quota.
    why = f": {found.text}" if is_visible(session, viewer) else ""
    return Block(
        position="next pass" if found.position == 0 else ordinal(found.position),
        amount=amount,
        label=_label(session, viewer),
        mine=is_mine(session, viewer),
        width=percent(min(share, WIDEST_BLOCK_GPUS * 1000), WIDEST_BLOCK_GPUS * 1000),
        text=f"{whose(session, viewer)}, {amount}{why}",
    )


def _gpus_of(asked: Request, devices: Sequence[Device]) -> int:
    """Return how many GPUs x 1000 a request comes to, on the first of those that it may have."""
    device = next((d for d in devices if asked.gpu_model in (None, d.model)), None)
    if device is None:
        return 1000
    if asked.gpu_memory_mib is not None:
        return asked.gpu_memory_mib * 1000 // device.memory_mib
    return asked.fgpu_milli * 1000 // device.capacity_milli


def _more(rest: Sequence[Session]) -> str:
    if not rest:
        return ""
    return f"and {len(rest)} more, which ask for {format_milli(sum(s.request.fgpu_milli for s in rest))} fGPU"


def unblocking_words(found: Unblocking, world: World, viewer: Viewer) -> str:
    """Return which single ending would start the head of the queue: "your gpu-2, or one session of ..."."""
    head = world.session(found.head_id)
    if head is None:
        return ""
    who = "Your request" if is_mine(head, viewer) else "The first in the queue"
    if is_visible(head, viewer) and not is_mine(head, viewer):
        who += f" ({whose(head, viewer)})"
    begins = f"{who}, {amount_words(head.request)},"
    if found.by_itself:
        return f"{begins} starts once what is ending now has ended."
    ends = [s for i in found.ids if (s := world.session(i)) is not None]
    if not ends and found.untried:
        return f"{begins} waits for the end of larger sessions, or of more than one."
    if found.never:
        why = world.forecasts.get(head.id)
        return f"{begins} waits for no session's end" + (f": {isolated(why.text)}." if why else ".")
    if not ends:
        return f"{begins} starts only when more than one session has ended."
    # One's own first: that is what somebody can do something about.
    ends.sort(key=lambda s: not is_mine(s, viewer))
    told = [_ending_words(s, world, viewer) for s in ends[:MOST_NAMED]]
    others = len(ends) - len(told)
    which = "this" if len(told) + others == 1 else "one of these"
    if others:
        told.append("another one" if others == 1 else f"one of {others} others")
    listed = ", or ".join(told)
    return f"{begins} starts as soon as {which} ends: {listed}."


def _ending_words(session: Session, world: World, viewer: Viewer) -> str:
    shares = session.placement.shares if session.placement else ()
    places = [f"GPU {d.index} of {d.node_id}" for s in shares if (d := world.devices.get(s.device_uuid))]
    where = f" on {', '.join(places[:MOST_NAMED])}" if places else ""
    holds = f"{format_milli(sum(s.fgpu_milli for s in shares))} fGPU{where}"
    if is_visible(session, viewer):
        return f"{whose(session, viewer)} ({holds})"
    return f"a session that holds {holds}"
