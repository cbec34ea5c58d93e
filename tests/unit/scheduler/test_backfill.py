"""Who may start while the first of the queue does not fit, and what is kept for it."""

from __future__ import annotations

from dataclasses import replace

from simulator import World, decided, lasting, world

from fgpu_scheduler.core import orders
from fgpu_scheduler.core.forecast import forecast
from fgpu_scheduler.core.model import EndCause, Quota, QuotaScope, SessionState
from fgpu_scheduler.core.planner import Reservation, plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.core.reservations import ENDING_S, LAUNCH_S, LENT

HOUR_S = 3600
LONGEST_WAIT_S = 24 * HOUR_S

STRICT = Policy(GroupPolicy(strict=True))
EASY = Policy(GroupPolicy(longest_wait_s=LONGEST_WAIT_S))
LIFO = Policy(GroupPolicy(order=orders.lifo, longest_wait_s=LONGEST_WAIT_S))


def runs(lab: World, user: str, fgpu: str, *, limit_s: int | None = None, on: str | None = None) -> World:
    return lab.running(user, fgpu, on=on).having(user, time_limit_s=limit_s)


def waits(lab: World, user: str, fgpu: str, *, limit_s: int | None = None, waited_s: int = 0) -> World:
    since_s = lab.now_s - waited_s
    return lab.pending(user, fgpu).having(user, time_limit_s=limit_s, submitted_at_s=since_s)


def waited(lab: World, user: str, seconds: int) -> World:
    return lab.having(user, submitted_at_s=lab.now_s - seconds)


def reserved(lab: World, policy: Policy) -> Reservation | None:
    found = [d for d in plan(lab, policy).decisions if isinstance(d, Reservation)]
    assert len(found) <= 1
    return found[0] if found else None


def uuids(kept: Reservation) -> tuple[str, ...]:
    return tuple(share.device_uuid for share in kept.placement.shares)


def told(kept: Reservation | None) -> tuple[int, int | None, tuple[str, ...]] | None:
    return kept and (kept.session_id, kept.until_s, uuids(kept))


def words(lab: World, policy: Policy) -> list[str]:
    return decided(lab, plan(lab, policy))


def half_full() -> World:
    """Two GPUs; x has one for an hour, and a requests both."""
    return waits(runs(world(devices=2), "x", "1", limit_s=HOUR_S, on="GPU-n1-0"), "a", "2")


def test_only_a_strict_queue_waits_for_its_first_session() -> None:
    lab = waits(half_full(), "b", "1", limit_s=60)
    assert words(lab, STRICT) == ["a waits: RESOURCES", "b waits: PRIORITY"]
    assert words(lab, EASY) == ["a waits: RESERVED", "b: GPU-n1-1"]


def test_first_session_gets_a_reservation_from_the_known_ends() -> None:
    lab = half_full()
    assert told(reserved(lab, EASY)) == (2, lab.now_s + HOUR_S + ENDING_S, ("GPU-n1-0", "GPU-n1-1"))


def test_session_that_ends_in_time_may_use_the_reserved_place() -> None:
    in_time_s = HOUR_S - LAUNCH_S
    fits = waits(half_full(), "b", "1", limit_s=in_time_s)
    assert words(fits, EASY) == ["a waits: RESERVED", "b: GPU-n1-1"]
    late = waits(half_full(), "b", "1", limit_s=in_time_s + 1)
    assert words(late, EASY) == ["a waits: RESERVED", "b waits: PRIORITY"]
    assert words(waits(half_full(), "b", "1"), EASY) == ["a waits: RESERVED", "b waits: PRIORITY"]


def test_rest_of_the_reserved_node_is_free_for_others() -> None:
    lab = runs(world(devices=2), "x", "1", limit_s=HOUR_S, on="GPU-n1-0")
    lab = runs(lab, "y", "0.5", on="GPU-n1-1")
    lab = waits(waits(waits(lab, "a", "1"), "b", "0.5"), "c", "0.5")
    assert words(lab, EASY) == ["a waits: RESERVED", "b: GPU-n1-1", "c waits: RESOURCES"]


def test_an_end_that_its_owner_can_avert_promises_nothing() -> None:
    lab = waits(runs(world(devices=1), "x", "1"), "a", "1")
    ends_at_s = lab.now_s + 300
    sure = lab.having("x", ends_at_s=ends_at_s, ends_cause=EndCause.PREEMPTED)
    idle = lab.having("x", ends_at_s=ends_at_s, ends_cause=EndCause.IDLE)
    kept = reserved(sure, EASY)
    assert kept is not None
    assert kept.until_s == ends_at_s + ENDING_S
    assert reserved(idle, EASY) is None


def test_a_session_that_still_launches_has_its_whole_limit_before_it() -> None:
    lab = runs(world(), "x", "1", limit_s=HOUR_S)
    lab = waits(lab.having("x", state=SessionState.PULLING, started_at_s=None), "a", "1")
    kept = reserved(lab, EASY)
    assert kept is not None
    assert kept.until_s == lab.now_s + LAUNCH_S + HOUR_S + ENDING_S


def test_without_limits_others_start_until_the_first_session_is_aged() -> None:
    lab = waits(waits(runs(world(devices=2), "x", "1", on="GPU-n1-0"), "a", "2"), "b", "1")
    assert words(lab, EASY) == ["a waits: RESOURCES", "b: GPU-n1-1"]
    aged = waited(lab, "a", LONGEST_WAIT_S)
    assert words(aged, EASY) == ["a waits: RESERVED", "b waits: PRIORITY"]
    assert told(reserved(aged, EASY)) == (2, None, ("GPU-n1-0", "GPU-n1-1"))


def test_aged_session_comes_first_in_every_order() -> None:
    lab = waits(waits(waits(world(devices=2), "a", "2", waited_s=LONGEST_WAIT_S), "b", "2"), "c", "1")
    assert words(lab, LIFO)[0] == "a: GPU-n1-0 + GPU-n1-1"
    assert words(waited(lab, "a", 60), LIFO)[0] == "c: GPU-n1-0"


def test_requeued_session_does_not_count_its_running_time_as_waiting() -> None:
    lab = runs(world(devices=4), "z", "1", on="GPU-n1-0")
    lab = waits(waits(lab, "ran", "4", waited_s=4 * LONGEST_WAIT_S), "waits", "2", waited_s=LONGEST_WAIT_S)
    assert words(lab, EASY)[-1] == "waits waits: PRIORITY"
    again = lab.having("ran", queued_at_s=lab.now_s - 60)
    assert words(again, EASY)[0].startswith("waits: GPU-n1-")


def test_no_session_uses_the_place_of_an_aged_request() -> None:
    """Sessions mostly end before their time limits: x may end much sooner than in an hour."""
    lab = waits(half_full(), "b", "1", limit_s=60)
    assert words(lab, EASY) == ["a waits: RESERVED", "b: GPU-n1-1"]
    aged = waited(lab, "a", LONGEST_WAIT_S // 2)
    assert words(aged, EASY) == ["a waits: RESERVED", "b waits: PRIORITY"]
    assert told(reserved(aged, EASY)) == (2, aged.now_s + HOUR_S + ENDING_S, ("GPU-n1-0", "GPU-n1-1"))


def test_reservation_without_known_ends_is_where_least_is_missing() -> None:
    lab = world(devices=2).node("n2", devices=2)
    lab = runs(runs(lab, "x", "1", on="GPU-n1-0"), "y", "1", on="GPU-n1-1")
    lab = waits(runs(lab, "z", "0.3", on="GPU-n2-0"), "a", "2", waited_s=LONGEST_WAIT_S)
    kept = reserved(lab, EASY)
    assert kept is not None
    assert (kept.placement.node_id, kept.until_s) == ("n2", None)


def promised_in(lab: World, user: str, in_s: int) -> World:
    return lab.having(user, promised_at_s=lab.now_s + in_s)


def test_others_use_only_the_lent_part_of_the_time_until_a_promised_start() -> None:
    """Both GPUs are free already, and a could start at once."""
    lab = promised_in(waits(world(devices=2), "a", "2"), "a", LENT * HOUR_S)
    in_time_s = HOUR_S - LAUNCH_S - ENDING_S
    ahead = waits(lab, "b", "2", limit_s=in_time_s)
    assert words(ahead, LIFO) == ["b: GPU-n1-0 + GPU-n1-1", "a waits: RESERVED"]
    late = waits(lab, "b", "2", limit_s=in_time_s + 1)
    for other in (late, waits(lab, "b", "2")):
        assert words(other, LIFO) == ["b waits: RESOURCES", "a: GPU-n1-0 + GPU-n1-1"]


def test_promised_start_does_not_change() -> None:
    lab = promised_in(waits(half_full(), "b", "0.1"), "a", 2 * HOUR_S)
    assert told(reserved(lab, LIFO)) == (2, lab.now_s + 2 * HOUR_S, ("GPU-n1-0", "GPU-n1-1"))


def test_equal_request_ahead_does_not_take_the_promised_place() -> None:
    lab = waits(promised_in(waits(world(devices=1), "a", "1"), "a", HOUR_S), "b", "1")
    assert words(lab, LIFO) == ["b waits: RESOURCES", "a: GPU-n1-0"]


def test_rest_of_a_promised_place_goes_to_sessions_ahead_first() -> None:
    lab = waits(waits(promised_in(waits(world(devices=3), "a", "2"), "a", HOUR_S), "c", "1"), "b", "1")
    assert words(lab, LIFO) == [
        "b: GPU-n1-2",
        "c waits: RESOURCES",
        "a: GPU-n1-0 + GPU-n1-1",
    ]


def test_higher_priority_goes_ahead_of_a_promised_start() -> None:
    lab = waits(promised_in(waits(world(devices=1), "a", "1"), "a", HOUR_S), "b", "1")
    assert words(lab.having("b", priority=1), LIFO)[0] == "b: GPU-n1-0"


def test_promised_start_of_higher_priority_is_reserved_first() -> None:
    """The newest request comes first in its priority, and would take the place of the later promise."""
    lab = promised_in(waits(world(devices=2), "lower", "2"), "lower", HOUR_S)
    lab = waits(promised_in(waits(lab, "higher", "2"), "higher", 2 * HOUR_S), "newest", "2")
    lab = lab.having("higher", priority=1).having("newest", priority=1)
    starts = ["newest waits: RESOURCES", "higher: GPU-n1-0 + GPU-n1-1", "lower waits: RESOURCES"]
    assert words(lab, LIFO) == starts


def test_reservation_of_higher_priority_comes_before_a_promised_one() -> None:
    """Three sessions at a time: x, the place of b, and c. A place kept for a as well would be a fourth."""
    lab = runs(world(devices=3), "x", "1", limit_s=HOUR_S, on="GPU-n1-0")
    lab = waits(promised_in(waits(lab, "a", "3"), "a", HOUR_S), "b", "3").having("b", priority=1)
    lab = waits(lab, "c", "1", limit_s=60)
    lab = replace(lab, quotas=(Quota(QuotaScope.ALL, "*", max_sessions=3),))
    assert words(lab, LIFO) == ["b waits: RESERVED", "c: GPU-n1-1", "a waits: QUOTA"]


def test_session_over_a_quota_gets_no_reservation_and_the_next_does() -> None:
    lab = waits(half_full(), "c", "2")
    assert words(lab, EASY) == ["a waits: RESERVED", "c waits: RESOURCES"]
    lab = replace(lab, quotas=(Quota(QuotaScope.USER, "a", max_sessions=0),))
    assert words(lab, EASY) == ["a waits: QUOTA", "c waits: RESERVED"]


def test_other_sessions_of_the_owner_leave_the_quota_of_the_reservation() -> None:
    lab = waits(half_full(), "a", "0.1", limit_s=60)
    one = replace(lab, quotas=(Quota(QuotaScope.USER, "a", max_sessions=1),))
    assert words(one, EASY) == ["a waits: RESERVED", "a waits: QUOTA"]
    two = replace(lab, quotas=(Quota(QuotaScope.USER, "a", max_sessions=2),))
    assert words(two, EASY) == ["a waits: RESERVED", "a: GPU-n1-1"]


def test_quota_of_a_reservation_is_there_when_it_starts() -> None:
    lab = replace(half_full(), quotas=(Quota(QuotaScope.USER, "a", max_sessions=1),))
    (told,) = forecast(lab, EASY, lasting(HOUR_S))
    assert told.expected_start_at_s is not None


def test_explicit_memory_can_be_reserved() -> None:
    lab = runs(world(), "x", "1", limit_s=HOUR_S)
    lab = lab.pending("a", "0").having("a", gpu_memory_mib=4096, compute_percent=50)
    kept = reserved(lab, EASY)
    assert kept is not None
    assert uuids(kept) == ("GPU-n1-0",)
