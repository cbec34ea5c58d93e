"""A request that did not fit rules out others: they do not fit either, on any devices with any free capacity."""

from __future__ import annotations

from dataclasses import replace
from operator import attrgetter

from hypothesis import given
from hypothesis import strategies as st

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.model import Device, Node, Request, Session, SessionState, Snapshot
from fgpu_scheduler.core.pending_queue import UnschedulableRequests
from fgpu_scheduler.core.placement import best_fit

SHAPE = attrgetter("fgpu_milli", "cpu_milli", "memory_mib", "gpu_memory_mib", "compute_percent", "gpu_models")
AMOUNTS = st.sampled_from((0, 1, 10, 100, 300, 500, 700, 1000, 1500, 2000, 3000, 4000))


@st.composite
def requests(draw: st.DrawFn) -> Request:
    exact = draw(st.integers(0, 5)) == 0
    return Request(
        user="a",
        server_name="",
        image="i",
        resource_group="default",
        fgpu_milli=0 if exact else draw(AMOUNTS),
        cpu_milli=draw(st.sampled_from((100, 1000, 4000))),
        memory_mib=draw(st.sampled_from((128, 1024, 8192))),
        gpu_memory_mib=draw(st.sampled_from((128, 1024))) if exact else None,
        compute_percent=draw(st.sampled_from((None, 5, 50))) if exact else None,
        gpu_models=draw(st.sampled_from(((), (), ("A",), ("B",), ("A", "B"), ("B", "A")))),
    )


@st.composite
def worlds(draw: st.DrawFn) -> Snapshot:
    """Nodes with all kinds of devices, and sessions that hold some of them."""
    nodes = []
    for n in range(draw(st.integers(1, 3))):
        devices = tuple(
            Device(
                f"{n}-{i}",
                f"n{n}",
                i,
                draw(st.sampled_from(("A", "B"))),
                draw(st.sampled_from((100, 1024, 8192))),
                draw(st.sampled_from((500, 1000, 2000))),
                max_shares=draw(st.integers(1, 3)),
            )
            for i in range(draw(st.integers(1, 3)))
        )
        nodes.append(Node(f"n{n}", "default", 8000, 16384, devices))
    found = Snapshot(0, 1, tuple(nodes))
    for number in range(draw(st.integers(0, 10))):
        asked = draw(requests())
        where = placement.place(asked, placement.free(found), score=best_fit)
        if where is not None:
            runs = replace(Session(number, asked, SessionState.RUNNING, 0), placement=where[0])
            found = found.with_sessions((*found.sessions, runs))
    return found


def kinds_of(left: placement.Free) -> set[tuple[int, int]]:
    return {(d.device.capacity_milli, d.device.memory_mib) for n in left for d in n.devices}


@given(worlds(), st.lists(requests(), min_size=6, max_size=16))
def test_request_ruled_out_by_a_failed_one_does_not_fit(world: Snapshot, tried: list[Request]) -> None:
    left = placement.free(world)
    misfits = UnschedulableRequests(kinds_of(left))
    for asked in tried:
        if placement.place(asked, left, score=best_fit) is None:
            misfits.add(SHAPE(asked))
    for asked in tried:
        if misfits.rule_out(SHAPE(asked)):
            assert placement.place(asked, left, score=best_fit) is None, asked


def test_smaller_failed_request_rules_out_larger_ones_only() -> None:
    node = Node("n", "default", 8000, 16384, (Device("d", "n", 0, "A", 8192, 2000),))
    misfits = UnschedulableRequests(kinds_of(placement.free(Snapshot(0, 1, (node,)))))
    misfits.add((500, 1000, 1024, None, None, ()))
    assert misfits.rule_out((500, 1000, 1024, None, None, ("A",)))
    assert misfits.rule_out((2000, 4000, 1024, None, None, ()))
    for other in (
        (400, 1000, 1024, None, None, ()),
        (1000, 900, 2048, None, None, ()),
        (1000, 2000, 512, None, None, ()),
        (0, 1000, 1024, 8192, None, ()),
    ):
        assert not misfits.rule_out(other)
    # A failed request for one model rules out none for any model or another model.
    misfits = UnschedulableRequests(kinds_of(placement.free(Snapshot(0, 1, (node,)))))
    misfits.add((500, 1000, 1024, None, None, ("B",)))
    assert misfits.rule_out((500, 1000, 1024, None, None, ("B",)))
    assert not misfits.rule_out((500, 1000, 1024, None, None, ()))
    assert not misfits.rule_out((500, 1000, 1024, None, None, ("A",)))
    # A failed request for several models rules out each of them, and all of them in any order.
    misfits = UnschedulableRequests(kinds_of(placement.free(Snapshot(0, 1, (node,)))))
    misfits.add((500, 1000, 1024, None, None, ("B", "C")))
    for models in (("B",), ("C",), ("C", "B")):
        assert misfits.rule_out((500, 1000, 1024, None, None, models))
    for models in ((), ("A",), ("A", "B"), ("A", "B", "C")):
        assert not misfits.rule_out((500, 1000, 1024, None, None, models))
    # A request so small that it gets no memory fits nowhere, and rules out no other.
    misfits = UnschedulableRequests(kinds_of(placement.free(Snapshot(0, 1, (node,)))))
    misfits.add((1, 100, 128, None, None, ()))
    assert not misfits.rule_out((500, 1000, 1024, None, None, ()))
