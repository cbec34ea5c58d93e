"""How long a session goes on, from those that ran for at least as long."""

from __future__ import annotations

import pytest

from fgpu_scheduler.core.run_lengths import LEAST, LengthSource, PastRun, RunLengths

HOUR = 3600


def runs(*lengths_s: int, user: str = "ann", image: str = "python", group: str = "lab") -> list[PastRun]:
    return [PastRun(group, user, image, length_s) for length_s in lengths_s]


def test_too_few_past_runs_give_no_estimate() -> None:
    lengths = RunLengths("lab", runs(*[HOUR] * (LEAST - 1)))
    assert not lengths
    assert lengths.rest("ann", "python", 0) is None


@pytest.mark.parametrize(
    ("user", "image", "source"),
    [
        ("ann", "python", LengthSource.USER_IMAGE),
        ("ann", "torch", LengthSource.USER),
        ("bob", "python", LengthSource.IMAGE),
        ("bob", "torch", LengthSource.GROUP),
    ],
)
def test_the_narrowest_source_with_enough_runs_counts(user: str, image: str, source: LengthSource) -> None:
    lengths = RunLengths("lab", runs(*[HOUR] * LEAST))
    found = lengths.rest(user, image, 0)
    assert found is not None
    assert found.source is source
    assert found.at_s([0.5]) == [HOUR]


def test_group_without_runs_uses_those_of_all_groups() -> None:
    found = RunLengths("new", runs(*[HOUR] * LEAST)).rest("ann", "python", 0)
    assert found is not None
    assert found.source is LengthSource.ALL


def test_source_with_too_few_long_runs_gives_way_to_a_wider_one() -> None:
    own, others = runs(*[600] * 50), runs(*[3 * HOUR] * LEAST, user="bob")
    found = RunLengths("lab", [*own, *others]).rest("ann", "python", HOUR)
    assert found is not None
    assert found.source is LengthSource.IMAGE
    assert found.at_s([0.5]) == [2 * HOUR]


def test_remaining_time_is_that_of_runs_at_least_as_long() -> None:
    lengths = RunLengths("lab", runs(*range(600, 6600, 600)))
    new, old = lengths.rest("ann", "python", 0), lengths.rest("ann", "python", 3000)
    assert new is not None
    assert old is not None
    assert new.at_s((0, 0.5, 0.99)) == [600, 3600, 6000]
    assert old.at_s((0, 0.5, 0.99)) == [0, 1800, 3000]


def test_session_older_than_all_runs_is_estimated_by_its_age() -> None:
    lengths = RunLengths("lab", runs(*[HOUR] * 20))
    found = [lengths.rest("ann", "python", hours * HOUR) for hours in (2, 10)]
    assert all(one is not None and one.source is LengthSource.AGE for one in found)
    young, old = (one.at_s([0.5])[0] for one in found if one is not None)
    assert old == pytest.approx(5 * young, rel=0.01)
    assert young == pytest.approx(0.414 * 2 * HOUR, rel=0.01)


def test_impossibly_old_session_is_a_fault_of_the_clock() -> None:
    lengths = RunLengths("lab", runs(*[600] * LEAST))
    for ran_s in (30 * HOUR, 10 * 365 * 24 * HOUR):
        found = lengths.rest("ann", "python", ran_s)
        assert found is not None
        assert 0 < found.at_s([0.5])[0] < 600
