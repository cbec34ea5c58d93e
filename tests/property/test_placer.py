"""What is true of every score and of the placer, whatever the world."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from property_worlds import requests, worlds

from fgpu_scheduler.core.model import Request
from fgpu_scheduler.core.placement import Score, after, free, place, placements
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.scores import Workload, best_fit, fgd, first_fit, spread, worth
from fgpu_scheduler.testing import World

exact = settings(derandomize=True, database=None, deadline=None, max_examples=150)
NAMES = ("first_fit", "best_fit", "spread", "fgd", "worth")


def made(name: str, typical: list[Request], lab: World) -> Score:
    """Return a score of this name."""
    workload = Workload.of(typical)
    simple: dict[str, Score] = {"first_fit": first_fit, "best_fit": best_fit, "spread": spread}
    made_of = {"fgd": fgd(workload), "worth": worth(workload, lab.nodes)}
    return {**simple, **made_of}[name]


@exact
@given(worlds(), st.lists(requests(), min_size=1, max_size=20), st.sampled_from(NAMES))
def test_no_score_ever_proposes_what_does_not_fit(lab: World, asked: list[Request], name: str) -> None:
    placer = Placer(free(lab), score=made(name, asked, lab))
    left = {node.node.id: node for node in free(lab)}
    for request in asked:
        where = placer.place(request)
        if where is None:
            assert not any(True for node in left.values() for _ in placements(node, request))
        else:
            leaves = after(left[where.node_id], request, where)
            assert leaves is not None
            left[where.node_id] = leaves
    assert placer.left == tuple(left.values())


@exact
@given(worlds(), st.lists(requests(), min_size=1, max_size=20), st.sampled_from(NAMES))
def test_a_placer_decides_as_one_placement_after_the_other(
    lab: World, asked: list[Request], name: str
) -> None:
    score = made(name, asked, lab)
    left = free(lab)
    placer = Placer(left, score=score)
    for at, request in enumerate(asked):
        found = place(request, left, score=score)
        assert placer.place(request) == (found[0] if found else None)
        if found:
            left = found[1]
        if at % 5 == 4:
            # As when everything on one node was released, or somebody else took it.
            left = (free(lab)[0], *left[1:]) if left else left
            for node in left[:1]:
                placer.update(node)
