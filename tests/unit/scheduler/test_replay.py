"""Replaying a history: the real planner, what becomes of each job, and the figures."""

from __future__ import annotations

import pytest
from simulator import world
from simulator.world import request

from fgpu_scheduler.core.model import Node, Quota, QuotaScope
from fgpu_scheduler.core.orders import ORDERS, lifo
from fgpu_scheduler.core.policies import DAY_S, LONGEST_WAIT_S, GroupPolicy, Policy, group_policy
from fgpu_scheduler.core.replay import Job, Outcome, jain, replay, summary

POLICY = Policy()


def lab(devices: int = 1) -> tuple[Node, ...]:
    return world(devices=devices).nodes


def job(
    user: str, fgpu: str = "1", *, at_s: int = 0, length_s: int = 100, patience_s: int | None = None
) -> Job:
    return Job(request(user, fgpu), at_s, length_s, patience_s)


def told(outcomes: tuple[Outcome, ...]) -> list[str]:
    """Say what became of each: ``"a 0-100"``, ``"b gave up at 30"``, ``"c refused"``."""
    return [
        f"{o.job.request.user} refused"
        if o.refused
        else f"{o.job.request.user} gave up at {o.left_at_s}"
        if o.placed_at_s is None
        else f"{o.job.request.user} {o.placed_at_s}-{o.left_at_s}"
        for o in outcomes
    ]


def test_second_job_starts_when_the_first_has_ended() -> None:
    found = replay([job("a"), job("b", at_s=10, length_s=50)], lab(), POLICY)
    assert told(found) == ["a 0-100", "b 100-150"]
    assert [o.waited_s for o in found] == [0, 90]


def test_end_frees_its_shares_for_a_job_of_the_same_instant() -> None:
    assert told(replay([job("a"), job("b", at_s=100)], lab(), POLICY)) == ["a 0-100", "b 100-200"]


@pytest.mark.parametrize("order", sorted(ORDERS))
def test_small_requests_do_not_starve_one_for_all_gpus_until_it_times_out(order: str) -> None:
    """Two days of requests for one GPU that fill all four, and one for all of them."""
    small = [job(f"u{n % 8}", at_s=900 * n, length_s=3600, patience_s=DAY_S) for n in range(192)]
    all_gpus = job("z", "4", at_s=7200, length_s=3600, patience_s=DAY_S)
    found = replay([*small, all_gpus], lab(devices=4), Policy(group_policy(order=order)))
    (waited_s,) = (o.waited_s for o in found if o.job is all_gpus and o.placed_at_s is not None)
    # It is aged after a quarter of the longest wait; then the sessions that run end within an hour.
    assert waited_s <= LONGEST_WAIT_S / 4 + 3600


def test_cancelled_job_never_starts_and_blocks_no_other() -> None:
    jobs = [job("a"), job("b", at_s=5, patience_s=30), job("c", at_s=6)]
    found = replay(jobs, lab(), POLICY)
    assert told(found) == ["a 0-100", "b gave up at 35", "c 100-200"]
    assert found[1].waited_s == 30


def test_started_job_is_not_cancelled() -> None:
    assert told(replay([job("a", patience_s=30)], lab(), POLICY)) == ["a 0-100"]


def test_job_that_no_node_could_hold_is_refused() -> None:
    assert told(replay([job("a", "2"), job("b")], lab(), POLICY)) == ["a refused", "b 0-100"]


def test_job_that_exceeds_a_quota_is_refused() -> None:
    quotas = [Quota(QuotaScope.USER, "a", max_fgpu_milli=1000)]
    jobs = [job("a", "2"), job("b", "2"), job("a"), job("a")]
    found = replay(jobs, lab(4), POLICY, quotas=quotas)
    assert told(found) == ["a refused", "b 0-100", "a 0-100", "a 100-200"]


def test_a_node_out_of_use_takes_sessions_in_a_replay() -> None:
    nodes = world().cordoned("n1").nodes
    assert told(replay([job("a")], nodes, POLICY)) == ["a 0-100"]


def test_the_policy_decides() -> None:
    jobs = [job("a"), job("b", at_s=1), job("c", at_s=2)]
    last_first = Policy(GroupPolicy(order=lifo))
    assert told(replay(jobs, lab(), last_first)) == ["a 0-100", "b 200-300", "c 100-200"]


def test_the_figures_of_a_history() -> None:
    jobs = [
        job("a"),
        job("b"),
        job("c", at_s=10, patience_s=20),
        job("d", "2"),
    ]
    found = summary(replay(jobs, lab(), POLICY), capacity_milli=1000, from_s=0, until_s=250)
    assert (found.sessions, found.started, found.never_started, found.refused) == (4, 2, 1, 1)
    # Waits: a 0, b 100, c 20.
    assert (found.mean_wait_s, found.median_wait_s) == (40, 20)
    assert (found.p95_wait_s, found.longest_wait_s) == (100, 100)
    assert found.utilisation == pytest.approx(200 / 250)
    # Of their time: a all, b half, c none.
    assert found.fairness == pytest.approx(1.5**2 / (3 * 1.25))


def test_figures_count_the_jobs_of_the_window() -> None:
    jobs = [job("a", length_s=300), job("b", at_s=200)]
    found = summary(replay(jobs, lab(), POLICY), capacity_milli=1000, from_s=200, until_s=400)
    assert (found.sessions, found.mean_wait_s) == (1, 100)
    # What came earlier and still held something is counted in the devices' use.
    assert found.utilisation == 1


@pytest.mark.parametrize(
    ("amounts", "index"), [([1, 1, 1], 1), ([1, 0, 0, 0], 0.25), ([], 1), ([0, 0], 1), ([3, 1], 0.8)]
)
def test_jains_index(amounts: list[float], index: float) -> None:
    assert jain(amounts) == pytest.approx(index)
