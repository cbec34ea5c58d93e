"""What sessions lend each other: nobody lends what it uses, and nobody has what nobody lent."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpuspawner.meter.reading import Lent, lent_on


def test_who_computes_alone_has_the_rest_from_those_who_rest_and_from_what_is_free() -> None:
    found = lent_on({1: 25, 2: 25}, {1: 25, 2: 25}, {1: 100.0})
    assert found[1] == Lent(100.0, 75.0, 0.0)
    # Of the 75 a third was the other's, the rest nobody's.
    assert found[2] == Lent(0.0, 0.0, 25.0)


def test_where_everybody_has_its_share_nothing_is_lent() -> None:
    found = lent_on({1: 50, 2: 50}, {1: 50, 2: 50}, {1: 50.0, 2: 50.0})
    assert found == {1: Lent(50.0, 0.0, 0.0), 2: Lent(50.0, 0.0, 0.0)}


def test_what_a_strict_session_leaves_idle_is_lent_to_nobody() -> None:
    found = lent_on({1: 50, 2: 25, 3: 25}, {2: 25, 3: 25}, {2: 45.0, 3: 5.0})
    assert found == {2: Lent(45.0, 20.0, 0.0), 3: Lent(5.0, 0.0, 20.0)}


@given(st.lists(st.tuples(st.integers(1, 25), st.floats(0, 25)), min_size=1, max_size=4))
def test_no_more_is_lent_than_was_borrowed_nor_than_was_idle(sessions: list[tuple[int, float]]) -> None:
    shares = dict(enumerate(share for share, _ in sessions))
    computed = dict(enumerate(sm for _, sm in sessions))
    found = lent_on(shares, shares, computed)
    assert sum(one.lent for one in found.values()) <= sum(one.borrowed for one in found.values()) + 1e-9
    for number, one in found.items():
        assert 0 <= one.lent <= max(0.0, shares[number] - computed[number]) + 1e-9
        assert one.received - one.borrowed == pytest.approx(min(shares[number], computed[number]))
