"""Compute that sessions lend each other."""

from __future__ import annotations

from fgpuspawner.meter.reading import Lent, lent_on


def test_only_busy_session_borrows_from_idle_ones_and_free_capacity() -> None:
    found = lent_on({1: 25, 2: 25}, {1: 25, 2: 25}, {1: 100.0})
    assert found[1] == Lent(100.0, 75.0, 0.0)
    # Of the 75 a third was the other's, the rest nobody's.
    assert found[2] == Lent(0.0, 0.0, 25.0)


def test_nothing_is_lent_when_all_use_their_share() -> None:
    found = lent_on({1: 50, 2: 50}, {1: 50, 2: 50}, {1: 50.0, 2: 50.0})
    assert found == {1: Lent(50.0, 0.0, 0.0), 2: Lent(50.0, 0.0, 0.0)}


def test_strict_session_lends_nothing() -> None:
    found = lent_on({1: 50, 2: 25, 3: 25}, {2: 25, 3: 25}, {2: 45.0, 3: 5.0})
    assert found == {2: Lent(45.0, 20.0, 0.0), 3: Lent(5.0, 0.0, 20.0)}
