"""Who is above a limit of the disk, and what is said of it."""

from __future__ import annotations

import pytest

from fgpuspawner.meter.disk import (
    DiskHistory,
    DiskLimit,
    DiskLimits,
    DiskUse,
    FolderUse,
    above_words,
    amounts,
    judged,
)

GIB = 2**30
LIMITS = DiskLimits(DiskLimit(20 * 1024, 1000), DiskLimit(50 * 1024, 1000), grace_s=600)


def use(session_gib: float = 0, home_gib: float = 0, files: int = 1) -> DiskUse:
    return DiskUse(FolderUse(int(session_gib * GIB), files), FolderUse(int(home_gib * GIB), 1))


def looks(*seen: tuple[float, DiskUse], limits: DiskLimits = LIMITS) -> list[bool]:
    """Return after which checks the session must end."""
    history: DiskHistory | None = None
    ends = []
    for at_s, one in seen:
        history, end = judged(history, one, limits, at_s)
        ends.append(end)
    return ends


def test_session_above_its_limit_ends_after_the_warning() -> None:
    assert looks((0, use(19)), (60, use(21)), (300, use(21)), (659, use(21)), (660, use(21))) == [
        False,
        False,
        False,
        False,
        True,
    ]


def test_a_session_that_takes_a_quarter_more_than_its_limit_is_ended_before_the_time_is_over() -> None:
    assert looks((0, use(1)), (60, use(21)), (120, use(25)), (180, use(26))) == [False, False, False, True]


@pytest.mark.parametrize("many", [use(200), use(1, 500)], ids=["session", "home"])
def test_large_jump_ends_the_session_at_the_check_after_the_warning(many: DiskUse) -> None:
    assert looks((0, use(1)), (60, many), (120, many)) == [False, False, True]


def test_a_session_has_no_time_for_what_it_wrote_before_the_first_look() -> None:
    assert looks((0, use(200)), (60, use(200))) == [False, True]


def test_a_home_that_was_above_at_the_start_leaves_time_to_make_room_in_it() -> None:
    assert not any(looks((0, use(0, 90)), (60, use(0, 91)), (599, use(0, 60))))
    assert looks((0, use(0, 90)), (60, use(0, 110)))[-1], "it may not grow on"


def test_files_count_as_well_and_what_is_unknown_or_has_no_limit_does_not() -> None:
    assert looks((0, use(0, files=1001)), (600, use(0, files=1001)))[-1]
    assert not any(looks((0, DiskUse()), (600, DiskUse())))
    none = DiskLimits(DiskLimit(), DiskLimit(), 600)
    assert not any(looks((0, use(900, 900, 10**9)), (600, use(900, 900, 10**9)), limits=none))
    only_warned = DiskLimits(LIMITS.session, LIMITS.home, None)
    assert not any(looks((0, use(21)), (10**6, use(900)), limits=only_warned))


def test_uncountable_use_is_slightly_above_the_limit() -> None:
    hidden = DiskUse(FolderUse(GIB, 1, uncounted="folders in it are moved while they are counted"))
    assert looks((0, hidden), (599, hidden), (600, hidden)) == [False, False, True]
    assert not any(looks((0, hidden), (600, hidden), limits=DiskLimits(DiskLimit(), DiskLimit(), 600)))
    assert above_words(hidden, LIMITS) == (
        "this session takes at least 1 of 20 GiB (it cannot be counted: folders in it are moved while they are counted)"
    )


def test_the_owner_is_told_what_takes_the_room() -> None:
    found = DiskUse(
        FolderUse(int(21.5 * GIB), 5, (("/opt/env", 11 * GIB), ("/tmp", 10))),
        FolderUse(12 * GIB, 5, (("/home/x", 9 * GIB),)),
    )
    assert (
        amounts(found, LIMITS)
        == "21.5 of 20 GiB; home 12 of 50 GiB; most in /opt/env (11 GiB), /home/x (9 GiB)"
    )
    assert above_words(found, LIMITS) == (
        "this session takes 21.5 of 20 GiB, most in /opt/env (11 GiB), /home/x (9 GiB)"
    )
    assert "1001 of 1000 files" in above_words(use(0, files=1001), LIMITS)
