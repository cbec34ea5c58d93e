"""The cluster map: what is drawn of each GPU, who is named to whom, and what would start the head of the queue."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler import (
    Device,
    Node,
    NodeState,
    Placement,
    Policy,
    Request,
    Session,
    SessionState,
    Share,
    ShareMode,
    Snapshot,
    forecast,
)
from fgpu_scheduler.core.unblocking import unblocking
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.pages.cluster_map import MOST_WAITING, Group, Slice, cluster_map

S = SessionState
ANN = Viewer("ann", groups=("default",))
ROOT = Viewer("root", admin=True, groups=("default",))


def gpu(index: int, node: str = "n1", **more: int) -> Device:
    return Device(f"GPU-{node}-{index}", node, index, "Model", 8192, 2000, True, **more)


def node(*devices: Device, name: str = "n1", state: NodeState = NodeState.READY) -> Node:
    return Node(name, "default", 64_000, 65_536, devices or (gpu(0, name),), state)


def request(user: str, milli: int, server: str = "") -> Request:
    return Request(user, server, "python", "default", milli, cpu_milli=500, memory_mib=512)


def runs(number: int, user: str, milli: int, device: Device, server: str = "") -> Session:
    place = Placement(device.node_id, (Share.of(device, milli),))
    return Session(number, request(user, milli, server), S.RUNNING, 100, placement=place, started_at_s=110)


def waits(number: int, user: str, milli: int, server: str = "") -> Session:
    return Session(number, request(user, milli, server), S.PENDING, 200 + number)


def seen(viewer: Viewer, nodes: tuple[Node, ...], *sessions: Session) -> Group:
    snapshot = Snapshot(1000, 7, nodes, sessions)
    world = World(snapshot, {f.session_id: f for f in forecast(snapshot, Policy(), typical_length_s=None)})
    found = unblocking(snapshot, Policy())
    (group,) = cluster_map(world, viewer, {} if found is None else {"default": found}, step_milli=100)
    return group


def slices(group: Group, at: int = 0) -> list[tuple[str, str, str, str]]:
    (machine,) = group.machines
    return [(s.kind, s.x, s.width, s.who) for s in machine.gpus[at].slices]


def test_slices_are_to_scale_and_others_are_anonymous_to_users() -> None:
    one = gpu(0)
    world = ((node(one),), runs(1, "ann", 500, one, "train"), runs(2, "ben", 1000, one))
    assert slices(seen(ANN, *world)) == [
        ("mine", "0", "25.0", "your train"),
        ("other", "25.0", "50.0", "somebody else's"),
        ("free", "75.0", "25.0", "free"),
    ]
    assert slices(seen(ROOT, *world))[:2] == [
        ("other", "0", "25.0", "train of ann"),
        ("other", "25.0", "50.0", "default server of ben"),
    ]
    assert "ben" not in repr(seen(ANN, *world))


def test_the_sum_of_a_gpus_slices_is_the_gpu_also_when_it_holds_more_than_its_unit() -> None:
    one = gpu(0)
    small = replace(one, capacity_milli=1000)
    group = seen(ROOT, (node(small),), runs(1, "ann", 800, one), runs(2, "ben", 700, one))
    assert slices(group) == [
        ("other", "0", "53.3", "default server of ann"),
        ("other", "53.3", "46.6", "default server of ben"),
    ]


def test_what_nobody_can_have_is_drawn_with_its_reason() -> None:
    one = gpu(0)
    little = seen(ANN, (node(one),), runs(1, "ben", 1950, one))
    assert slices(little)[-1] == ("unusable", "97.5", "2.5", "too little for a session")
    full = seen(ANN, (node(gpu(0, max_shares=1)),), runs(1, "ben", 500, one))
    assert slices(full)[-1] == (
        "unusable",
        "25.0",
        "75.0",
        "cannot be had: no more than 1 may share this GPU",
    )
    off = seen(ANN, (node(one, state=NodeState.CORDONED),))
    assert slices(off) == [("unusable", "0", "100.0", "cannot be had: its machine takes no sessions")]
    share = replace(Share.of(one, 1000), mode=ShareMode.MEMORY)
    only = replace(runs(1, "ben", 1000, one), placement=Placement("n1", (share,)))
    assert (
        slices(seen(ANN, (node(one),), only))[-1][3]
        == "can be had as memory only, as its other sessions have it"
    )


def test_the_pieces_that_are_free_are_told_with_the_largest() -> None:
    one, two = gpu(0), gpu(1)
    nodes = (node(one, two),)
    pieces = seen(ANN, nodes, runs(1, "ben", 1500, one), runs(2, "ben", 1250, two, "b")).pieces
    assert pieces == (
        "1.2 fGPU is free, in 2 pieces; the largest on one GPU is 0.7 fGPU. "
        "What is left beside that, 0.05 fGPU, nobody can have now."
    )
    assert seen(ANN, nodes, runs(1, "ben", 2000, one)).pieces == "2 fGPU is free, in one piece."
    assert seen(ANN, nodes, runs(1, "ben", 2000, one), runs(2, "cy", 1950, two)).pieces == (
        "Nothing is free: 0.05 fGPU is left that nobody can have now."
    )


def test_a_machine_that_takes_no_sessions_says_so() -> None:
    machines = seen(ANN, (node(), node(name="n2", state=NodeState.LOST))).machines
    assert [(m.name, m.state, m.words) for m in machines] == [
        ("n1", "READY", ""),
        ("n2", "LOST", "does not answer; what it runs keeps its shares"),
    ]


def test_the_queue_is_in_its_order_with_sizes_and_bounded() -> None:
    one = gpu(0)
    many = [waits(n + 10, f"user{n}", 500) for n in range(MOST_WAITING + 5)]
    group = seen(
        ANN,
        (node(one),),
        runs(1, "ben", 2000, one),
        waits(2, "cy", 4000),
        waits(3, "ann", 1000, "next"),
        *many,
    )
    assert group.waiting == MOST_WAITING + 7
    assert len(group.blocks) == MOST_WAITING
    assert group.more == "and 7 more, which ask for 3.5 fGPU"
    mine = next(block for block in group.blocks if block.mine)
    # One GPU of the four that the widest takes.
    assert (mine.amount, mine.label, mine.width) == ("1 fGPU", "next", "12.5")
    assert mine.text.startswith("your next, 1 fGPU: ")
    widest = next(block for block in group.blocks if block.amount == "4 fGPU")
    assert (widest.width, widest.text) == ("50.0", "somebody else's, 4 fGPU")
    assert "user0" not in repr(group)


def test_which_end_would_start_the_head_is_told_with_names_to_those_who_may_know_them() -> None:
    one, two = gpu(0), gpu(1)
    world = (
        (node(one, two),),
        runs(1, "ben", 1500, one, "train"),
        runs(2, "ann", 1000, two),
        runs(3, "cy", 1000, two),
        waits(4, "dora", 1000, "big"),
    )
    assert seen(ANN, *world).unblocking == (
        "The first in the queue, 1 fGPU, starts as soon as one of these ends: your default server (1 fGPU on GPU 1 of "
        "n1), or a session that holds 1 fGPU on GPU 1 of n1, or a session that holds 1.5 fGPU on GPU 0 of n1."
    )
    assert seen(ROOT, *world).unblocking == (
        "The first in the queue (big of dora), 1 fGPU, starts as soon as one of these ends: default server of ann "
        "(1 fGPU on GPU 1 of n1), or default server of cy (1 fGPU on GPU 1 of n1), or train of ben (1.5 fGPU on GPU 0 "
        "of n1)."
    )
    own = seen(Viewer("dora", groups=("default",)), *world).unblocking
    assert own.startswith(
        "Your request, 1 fGPU, starts as soon as one of these ends: a session that holds 1 fGPU"
    )


def test_of_many_who_would_start_the_head_three_are_named() -> None:
    gpus = [gpu(n) for n in range(5)]
    full = [runs(n, f"user{n}", 2000, one) for n, one in enumerate(gpus, 1)]
    waiting = waits(9, "dora", 2000)
    told = seen(ROOT, (node(*gpus),), *full, waiting).unblocking
    assert told.endswith("default server of user3 (2 fGPU on GPU 2 of n1), or one of 2 others.")
    four = seen(ROOT, (node(*gpus[:4]),), *full[:4], waiting).unblocking
    assert four.endswith("default server of user3 (2 fGPU on GPU 2 of n1), or another one.")


def test_where_no_single_end_is_enough_that_is_said() -> None:
    one, two = gpu(0), gpu(1)
    world = ((node(one, two),), runs(1, "ben", 500, one), runs(2, "cy", 500, two), waits(3, "dora", 4000))
    assert seen(ANN, *world).unblocking == (
        "The first in the queue, 4 fGPU, starts only when more than one session has ended."
    )
    closed = node(one, two, state=NodeState.CORDONED)
    assert seen(ANN, (closed,), *world[1:]).unblocking.startswith(
        "The first in the queue, 4 fGPU, waits for no session's end"
    )
    ending = replace(world[1], state=S.TERMINATING)
    assert seen(ANN, (node(one),), ending, waits(3, "dora", 2000)).unblocking == (
        "The first in the queue, 2 fGPU, starts once what is ending now has ended."
    )


def test_a_label_is_cut_to_what_its_slice_has_room_for() -> None:
    one = gpu(0)
    long = "a-very-long-name-of-a-server"
    group = seen(ANN, (node(one),), runs(1, "ann", 1000, one, long), runs(2, "ann", 100, one, "b" * 9))
    found: tuple[Slice, ...] = group.machines[0].gpus[0].slices
    assert [s.label for s in found] == ["a-very-lon…", "", "free"]
    assert found[0].who == f"your {long}"
