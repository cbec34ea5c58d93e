"""Properties of every score and of the placer."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from property_worlds import requests, worlds
from reference_placement import plain_place
from simulator import World

from fgpu_scheduler.core import placer
from fgpu_scheduler.core.model import NodeState, Request
from fgpu_scheduler.core.placement import (
    NodeAmounts,
    Score,
    free,
    place,
    untouched,
)
from fgpu_scheduler.core.scores import ClusterTotals, Workload, best_fit, worth

exact = settings(derandomize=True, database=None, deadline=None, max_examples=150)
NAMES = ("best_fit", "emptiest", "worth")


def emptiest(before: NodeAmounts, after: NodeAmounts, taken: tuple[int, ...]) -> tuple[int, ...]:
    """Prefer the device and the node with the most free."""
    return -sum(before.free_milli[at] for at in taken), -sum(after.free_milli)


def made(name: str, typical: list[Request], lab: World) -> Score:
    """Return the score of this name."""
    simple: dict[str, Score] = {"best_fit": best_fit, "emptiest": emptiest}
    return simple.get(name) or worth(Workload.of(typical), ClusterTotals.of(lab.nodes))


def repeated(lab: World, times: int) -> World:
    """Return the world with copies of each node; sessions stay on the first copy."""
    nodes = [
        replace(
            n,
            id=f"{n.id}.{copy}",
            devices=tuple(replace(d, uuid=f"{d.uuid}.{copy}", node_id=f"{n.id}.{copy}") for d in n.devices),
        )
        for n in lab.nodes
        for copy in range(times)
    ]
    return replace(lab, nodes=tuple(sorted((*lab.nodes, *nodes), key=lambda n: n.id)))


@exact
@given(
    worlds(),
    st.integers(0, 5),
    st.lists(requests(), min_size=1, max_size=20),
    st.sampled_from(NAMES),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_placer_agrees_with_single_placements(
    lab: World, times: int, asked: list[Request], name: str, full_caches: bool, rng: Random
) -> None:
    lab = repeated(lab, times)
    score = made(name, asked, lab)
    left = free(lab)
    own = placer.Placer(left, score=score)
    for request in asked * 2:
        found = plain_place(request, left, score=score)
        assert place(request, left, score=score) == found
        with pytest.MonkeyPatch.context() as patched:
            if full_caches:
                patched.setattr(placer, "KEPT_CHANGES", 3)
                patched.setattr(placer, "KEPT_SHAPES", 2)
            assert own.fits(request) == (found is not None)
            assert own.place(request) == (found[0] if found else None)
        if found:
            left = found[1]
        if left and rng.random() < 0.3:
            # As if a node's shares were all freed or taken, or the node was cordoned.
            at = rng.randrange(len(left))
            node = rng.choice(
                (
                    free(lab)[at],
                    untouched(left[at].node),
                    replace(left[at], node=replace(left[at].node, state=NodeState.CORDONED)),
                    replace(left[at], node=replace(left[at].node, state=NodeState.READY)),
                )
            )
            left = (*left[:at], node, *left[at + 1 :])
            own.update(node)
    assert own.left == left
