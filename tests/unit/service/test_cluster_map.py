"""The cluster map: slices of each GPU, names for allowed viewers, and the ends that would start the head of the queue."""

from __future__ import annotations

from dataclasses import replace

from simulator import lasting

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
    outlook,
)
from fgpuspawner.service.admin.queue import queues_object
from fgpuspawner.service.api.session_objects import session_object
from fgpuspawner.service.model import Site, Viewer, World
from fgpuspawner.service.pages.cluster_map import MOST_WAITING, MapGroup, cluster_map
from fgpuspawner.spawner.progress import waiting_event

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


def beside(group: str, milli: int) -> tuple[int, int]:
    """Half a core and 512 MiB with each amount."""
    return 500, 512


def seen(
    viewer: Viewer, nodes: tuple[Node, ...], *sessions: Session, typical_length_s: int | None = None
) -> MapGroup:
    snapshot = Snapshot(1000, 7, nodes, sessions)
    ahead = outlook(snapshot, Policy(), lambda group: lasting(typical_length_s))
    world = World(snapshot, ahead.forecasts, unblockings=ahead.unblockings)
    (group,) = cluster_map(world, viewer, beside)
    return group


def told(
    viewer: Viewer, nodes: tuple[Node, ...], *sessions: Session, typical_length_s: int | None = None
) -> str:
    """Return the map's text about the first waiting request."""
    head = seen(viewer, nodes, *sessions, typical_length_s=typical_length_s).head
    assert head is not None
    return f"{head.text}. {head.sooner}".strip()


def slices(group: MapGroup, at: int = 0) -> list[tuple[str, str, str, str]]:
    (machine,) = group.machines
    return [(s.kind, s.x, s.width, s.who) for s in machine.gpus[at].slices]


def test_slices_are_to_scale_and_hide_other_users() -> None:
    one = gpu(0)
    world = ((node(one),), runs(1, "ann", 500, one, "train"), runs(2, "ben", 1000, one))
    assert slices(seen(ANN, *world)) == [
        ("mine", "0", "25.0", "your train"),
        ("other", "25.0", "50.0", "another user's"),
        ("free", "75.0", "25.0", "free"),
    ]
    assert slices(seen(ROOT, *world))[:2] == [
        ("other", "0", "25.0", "train of ann"),
        ("other", "25.0", "50.0", "Python 1 of ben"),
    ]
    assert "ben" not in repr(seen(ANN, *world))


def test_slices_of_an_overfull_gpu_add_up_to_the_gpu() -> None:
    one = gpu(0)
    small = replace(one, capacity_milli=1000)
    group = seen(ROOT, (node(small),), runs(1, "ann", 800, one), runs(2, "ben", 700, one))
    assert slices(group) == [
        ("other", "0", "53.3", "Python 1 of ann"),
        ("other", "53.3", "46.6", "Python 1 of ben"),
    ]


def test_unavailable_slices_show_their_reason() -> None:
    one = gpu(0)
    little = seen(ANN, (node(one),), runs(1, "ben", 1950, one))
    assert slices(little)[-1] == ("unusable", "97.5", "2.5", "too little for a session")
    full = seen(ANN, (node(gpu(0, max_shares=1)),), runs(1, "ben", 500, one))
    assert slices(full)[-1] == (
        "unusable",
        "25.0",
        "75.0",
        "unavailable: at most 1 sessions may share this GPU",
    )
    off = seen(ANN, (node(one, state=NodeState.CORDONED),))
    assert slices(off) == [("unusable", "0", "100.0", "unavailable: its machine takes no sessions")]
    share = replace(Share.of(one, 1000), mode=ShareMode.MEMORY)
    only = replace(runs(1, "ben", 1000, one), placement=Placement("n1", (share,)))
    assert (
        slices(seen(ANN, (node(one),), only))[-1][3] == "free for memory only, as its other sessions have it"
    )


def test_only_administrators_see_why_a_gpu_is_cordoned() -> None:
    one = replace(gpu(0), cordon_reason="the fan is broken")
    world = ((node(one, gpu(1)),), runs(1, "ben", 500, one))
    assert slices(seen(ANN, *world))[1:] == [
        ("unusable", "25.0", "75.0", "unavailable: this GPU takes no sessions")
    ]
    assert [g.cordoned for g in seen(ANN, *world).machines[0].gpus] == ["takes no sessions", ""]
    assert seen(ROOT, *world).machines[0].gpus[0].cordoned == "takes no sessions: the fan is broken"
    assert "fan" not in repr(seen(ANN, *world))


def test_free_pieces_are_counted_with_the_largest() -> None:
    one, two = gpu(0), gpu(1)
    nodes = (node(one, two),)
    pieces = seen(ANN, nodes, runs(1, "ben", 1500, one), runs(2, "ben", 1250, two, "b")).pieces
    assert pieces == (
        "1.2 fGPU is free, in 2 pieces; the largest on one GPU is 0.7 fGPU. 0.05 fGPU is unavailable."
    )
    assert seen(ANN, nodes, runs(1, "ben", 2000, one)).pieces == "2 fGPU is free, in one piece."
    assert seen(ANN, nodes, runs(1, "ben", 2000, one), runs(2, "cy", 1950, two)).pieces == (
        "Nothing is free. 0.05 fGPU is unavailable."
    )


def test_lost_machine_shows_its_state() -> None:
    machines = seen(ANN, (node(), node(name="n2", state=NodeState.LOST))).machines
    assert [(m.name, m.state, m.words) for m in machines] == [
        ("n1", "READY", ""),
        ("n2", "LOST", "does not answer; what it runs keeps its shares"),
    ]


def test_queue_blocks_are_ordered_sized_and_limited() -> None:
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
    assert group.more == "and 7 more, for 3.5 fGPU together"
    mine = next(block for block in group.blocks if block.mine)
    # One GPU of the four that the widest takes.
    assert (mine.amount, mine.label, mine.width) == ("1 fGPU", "next", "12.5")
    assert mine.text.startswith("your next, 1 fGPU: ")
    widest = next(block for block in group.blocks if block.amount == "4 fGPU")
    assert (widest.width, widest.text) == ("50.0", "another user's, 4 fGPU")
    assert "user0" not in repr(group)


def test_ends_that_start_the_head_are_named_only_to_allowed_viewers() -> None:
    one, two = gpu(0), gpu(1)
    world = (
        (node(one, two),),
        runs(1, "ben", 1500, one, "train"),
        runs(2, "ann", 1000, two),
        runs(3, "cy", 1000, two),
        waits(4, "dora", 1000, "big"),
    )
    assert told(ANN, *world) == (
        "The first in the queue, 1 fGPU, starts at once if one of these ends: your Python 1 (1 fGPU on GPU 1 of "
        "n1), or a session with 1 fGPU on GPU 1 of n1, or a session with 1.5 fGPU on GPU 0 of n1."
    )
    assert told(ROOT, *world) == (
        "The first in the queue (big of dora), 1 fGPU, starts at once if one of these ends: Python 1 of ann "
        "(1 fGPU on GPU 1 of n1), or Python 1 of cy (1 fGPU on GPU 1 of n1), or train of ben (1.5 fGPU on GPU 0 "
        "of n1)."
    )
    own = told(Viewer("dora", groups=("default",)), *world)
    assert own.startswith("Your request, 1 fGPU, starts at once if one of these ends: a session with 1 fGPU")


def test_expected_end_comes_before_other_sufficient_ends() -> None:
    one, two = gpu(0), gpu(1)
    ann, cy = runs(1, "ann", 1500, one), runs(2, "cy", 1500, two)
    dora = waits(4, "dora", 1000, "big")
    first = "The first in the queue (big of dora), 1 fGPU"
    expected = f"{first}, starts when 1 session ends (1.5 fGPU: Python 1 of ann)."
    assert told(ROOT, (node(one),), ann, dora, typical_length_s=7200) == expected
    assert told(ROOT, (node(one, two),), ann, cy, dora, typical_length_s=7200) == (
        f"{expected} It starts at once if this ends: Python 1 of cy (1.5 fGPU on GPU 1 of n1)."
    )


def test_at_most_three_sufficient_ends_are_named() -> None:
    gpus = [gpu(n) for n in range(5)]
    full = [runs(n, f"user{n}", 2000, one) for n, one in enumerate(gpus, 1)]
    waiting = waits(9, "dora", 2000)
    many = told(ROOT, (node(*gpus),), *full, waiting)
    assert many.endswith("Python 1 of user3 (2 fGPU on GPU 2 of n1), or one of 2 others.")
    four = told(ROOT, (node(*gpus[:4]),), *full[:4], waiting)
    assert four.endswith("Python 1 of user3 (2 fGPU on GPU 2 of n1), or another one.")


def test_map_says_when_no_single_end_is_enough() -> None:
    one, two = gpu(0), gpu(1)
    world = ((node(one, two),), runs(1, "ben", 500, one), runs(2, "cy", 500, two), waits(3, "dora", 4000))
    assert told(ANN, *world) == (
        "The first in the queue, 4 fGPU, starts only when more than one session has ended."
    )
    assert told(ANN, *world, typical_length_s=7200) == (
        "The first in the queue, 4 fGPU, starts when 2 sessions end (1 fGPU)."
    )
    closed = node(one, two, state=NodeState.CORDONED)
    assert told(ANN, (closed,), *world[1:]).startswith("The first in the queue, 4 fGPU, can't start yet")
    ending = replace(world[1], state=S.TERMINATING)
    assert told(ANN, (node(one),), ending, waits(3, "dora", 2000)) == (
        "The first in the queue, 2 fGPU, starts when 1 session ends (0.5 fGPU)."
    )


def test_map_queue_sessions_and_waiting_page_agree() -> None:
    """All pages name the same sessions that must end, and the same time."""
    one, two = gpu(0), gpu(1)
    limited = [
        replace(s, request=replace(s.request, time_limit_s=limit_s))
        for s, limit_s in (
            (runs(1, "ben", 1000, one), 3600),
            (runs(2, "carla", 1000, one), 4000),
            (runs(3, "ivy", 2000, two), 9000),
        )
    ]
    snapshot = Snapshot(1000, 7, (node(one, two),), (*limited, waits(4, "dora", 2000)))
    ahead = outlook(snapshot, Policy(), lambda group: lasting(None))
    world = World(snapshot, ahead.forecasts, unblockings=ahead.unblockings)
    (group,) = cluster_map(world, ROOT, beside)
    (queue,) = queues_object(world, ROOT, Site())["queues"]
    (entry,) = queue["entries"]
    own = waiting_event(snapshot.sessions[3], world, simulated=True)["fgpu"]
    session = session_object(snapshot.sessions[3], world, ROOT, Site())
    assert group.head is not None
    text = "starts when 2 sessions end (2 fGPU: Python 1 of ben, Python 1 of carla)"
    sooner = "starts at once if this ends: Python 1 of ivy (2 fGPU on GPU 1 of n1)"
    assert entry["waits_for"]["text"] == session["waits_for"]["text"] == text
    assert (group.head.text, group.head.sooner) == (
        f"The first in the queue (Python 1 of dora), 2 fGPU, {text}",
        f"It {sooner}.",
    )
    assert entry["sooner"] == session["sooner"] == sooner
    # Its owner may not know the others.
    assert (own["waits_for"], own["sooner"]) == (
        "starts when 2 sessions end (2 fGPU)",
        "starts at once if this ends: a session with 2 fGPU on GPU 1 of n1",
    )
    assert group.head.about == "at the latest", "only time limits tell of it"
    assert entry["expected_start_at_s"] == session["expected_start_at_s"] == 110 + 4000
    assert group.head.expected_at_s == 4080, "the same minute"


def test_gpu_parts_without_cpu_or_memory_are_blocked() -> None:
    one, two = gpu(0), gpu(1)
    greedy = replace(runs(1, "ben", 500, one), request=replace(request("ben", 500), cpu_milli=64_000))
    group = seen(ANN, (node(one, two),), greedy)
    why = "blocked: its machine has no CPU or memory left"
    assert [slices(group, at)[-1] for at in (0, 1)] == [
        ("blocked", "25.0", "75.0", why),
        ("blocked", "0", "100.0", why),
    ]
    assert group.pieces == "Nothing is free. 3.5 fGPU is blocked: its machine is short of CPU or memory."
    # What is left is enough for one more session, not for one on each GPU.
    most = replace(greedy, request=replace(greedy.request, cpu_milli=63_300))
    group = seen(ANN, (node(one, two),), most)
    assert slices(group, 1) == [("free", "0", "100.0", "free")]
    assert slices(group, 0)[-1][::3] == ("blocked", "blocked: for sessions with less CPU or memory")
    assert group.pieces == (
        "2 fGPU is free, in one piece. 1.5 fGPU is blocked: its machine is short of CPU or memory."
    )


def test_labels_fit_their_slices() -> None:
    one = gpu(0)
    long = "a-very-long-name-of-a-server"

    def labels(viewer: Viewer, user: str) -> list[str]:
        world = (
            runs(1, user, 1000, one, long),
            runs(2, user, 100, one, "b" * 9),
            runs(3, user, 500, one, "train"),
        )
        (machine,) = seen(viewer, (node(one),), *world).machines
        assert any(long in s.who for s in machine.gpus[0].slices)
        return [s.label for s in machine.gpus[0].slices]

    assert labels(ANN, "ann") == ["1", "", "train", "free"]
    name = "somebody-with-a-long-name"
    assert labels(ROOT, name) == ["somebody-w…", "", "some…", "free"]
