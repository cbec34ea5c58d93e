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
from fgpu_scheduler.core.placement import Score, claimed_if_fits, free, place, placements, untouched
from fgpu_scheduler.core.scores import ClusterTotals, Workload, best_fit, fgd, first_fit, spread, worth

exact = settings(derandomize=True, database=None, deadline=None, max_examples=150)
NAMES = ("first_fit", "best_fit", "spread", "fgd", "worth")


def made(name: str, typical: list[Request], lab: World) -> Score:
    """Return the score of this name."""
    workload = Workload.of(typical)
    simple: dict[str, Score] = {"first_fit": first_fit, "best_fit": best_fit, "spread": spread}
    made_of = {"fgd": fgd(workload), "worth": worth(workload, ClusterTotals.of(lab.nodes))}
    return {**simple, **made_of}[name]


@exact
@given(worlds(), st.lists(requests(), min_size=1, max_size=20), st.sampled_from(NAMES))
def test_no_score_proposes_a_placement_that_does_not_fit(lab: World, asked: list[Request], name: str) -> None:
    own = placer.Placer(free(lab), score=made(name, asked, lab))
    left = {node.node.id: node for node in free(lab)}
    for request in asked:
        where = own.place(request)
        if where is None:
            assert not any(True for node in left.values() for _ in placements(node, request))
            assert plain_place(request, tuple(left.values()), score=first_fit) is None
        else:
            leaves = claimed_if_fits(left[where.node_id], request, where)
            assert leaves is not None
            left[where.node_id] = leaves
    assert own.left == tuple(left.values())


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
    st.sampled_from(((0, 1), (0, 1), (2, 1), (12, 128))),
    st.randoms(use_true_random=False),
)
def placer_agrees_with_single_placements(
    lab: World, times: int, asked: list[Request], name: str, bounds: tuple[int, int], rng: Random
) -> None:
    """Also with the column search over many nodes, which the placer would not use in worlds this small."""
    lab = repeated(lab, times)
    score = made(name, asked, lab)
    left = free(lab)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(placer, "FEW", bounds[0])
        patch.setattr(placer, "RANKED", bounds[1])
        own = placer.Placer(left, score=score)
        for request in asked * 2:
            found = plain_place(request, left, score=score)
            assert place(request, left, score=score) == found
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


def test_placer_agrees_with_single_placements_and_column_search(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks: list[int] = []
    real = placer.NodeTable.takes

    def counted(self: placer.NodeTable, *of: object) -> object:
        looks.append(1)
        return real(self, *of)  # type: ignore[arg-type]

    monkeypatch.setattr(placer.NodeTable, "takes", counted)
    placer_agrees_with_single_placements()
    # A lower bound only: hypothesis draws other examples when other modules are loaded.
    assert len(looks) > 100
