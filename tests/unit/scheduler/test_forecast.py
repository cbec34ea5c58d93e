"""What is told to those who wait, and to those who are about to ask."""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

import pytest
from simulator import NOW_S, World, lasting, world
from simulator.world import request
from test_returning import parked

from fgpu_scheduler.core.admission import Caps, amounts_that_fit
from fgpu_scheduler.core.expected_starts import (
    BASIS_LIMITS,
    BASIS_NO_NODE,
    BASIS_NOW,
    BASIS_TYPICAL,
    BASIS_UNKNOWN,
    WORLD_STARTS,
    BlockingSessions,
)
from fgpu_scheduler.core.forecast import Forecast, forecast, forecast_new, outlook
from fgpu_scheduler.core.forecast_accuracy import Calibration, ForecastHistory, StartRange
from fgpu_scheduler.core.free_capacity import PlanCache
from fgpu_scheduler.core.model import (
    MAX_SHARES,
    EndCause,
    Quota,
    QuotaScope,
    Request,
    Session,
    SessionState,
    WaitReason,
)
from fgpu_scheduler.core.placement import free
from fgpu_scheduler.core.planner import Policy
from fgpu_scheduler.core.policies import GroupPolicy
from fgpu_scheduler.core.request_forecast import RequestForecast, forecast_request
from fgpu_scheduler.core.run_lengths import PastRun, RunLengths
from fgpu_scheduler.core.shortage import shortage

CAPS = Caps(fgpu_step_milli=100)
MEMORY_ONLY = replace(request("mia", "0"), gpu_memory_mib=2048)
HOUR = 3600


def told(lab: World, typical_length_s: int | None = HOUR) -> dict[str, Forecast]:
    users = {s.id: s.request.user for s in lab.sessions}
    return {users[f.session_id]: f for f in forecast(lab, Policy(), lasting(typical_length_s))}


def starts(lab: World, typical_length_s: int | None = HOUR) -> dict[str, int | None]:
    """Return how long each who waits is expected to wait on."""
    found = told(lab, typical_length_s)
    return {
        user: None if f.expected_start_at_s is None else f.expected_start_at_s - NOW_S
        for user, f in found.items()
    }


def asks(
    lab: World,
    fgpu: str,
    count: int = 1,
    typical: int | None = HOUR,
    *,
    caps: Caps = CAPS,
    cpu: int | str = 1,
    memory_mib: int = 1024,
) -> RequestForecast:
    asked = request("new", fgpu, cpu=cpu, memory_mib=memory_mib)
    return forecast_request(asked, count, lab, Policy(), lasting(typical), others(lab, asked, caps=caps))


def others(lab: World, asked: Request, *, caps: Caps = CAPS, cores_per_gpu: int = 0) -> list[Request]:
    """Return the request with every amount, beside its own CPU or a number of cores for each whole GPU."""
    return [
        replace(asked, fgpu_milli=amount, cpu_milli=cores_per_gpu * amount or asked.cpu_milli)
        for amount in amounts_that_fit(lab.nodes, caps)
    ]


def test_a_whole_forecast_in_words() -> None:
    lab = world().running("a", "1", started_ago_s=600).pending("b", "0.5")
    assert forecast(lab, Policy(), lasting(HOUR)) == (
        Forecast(
            lab.of("b").id,
            1,
            WaitReason.RESOURCES,
            "all GPUs are busy",
            NOW_S + HOUR - 600,
            BASIS_TYPICAL,
            ahead=BlockingSessions(1, 1000, (lab.of("a").id,)),
            early_at_s=NOW_S + HOUR - 600,
            late_at_s=NOW_S + HOUR - 600,
            planned=StartRange(NOW_S + HOUR - 600, NOW_S + HOUR - 600, NOW_S + HOUR - 600),
        ),
    )


def test_position_zero_starts_now_and_the_rest_count_from_one() -> None:
    lab = world().pending("a", "0.6").pending("b", "0.6").pending("c", "0.3").pending("d", "0.6")
    found = told(lab)
    assert {user: (f.position, f.text) for user, f in found.items()} == {
        "a": (0, "starts now"),
        "b": (1, "0.6 fGPU is not free, only 0.1 is"),
        "c": (0, "starts now"),
        "d": (2, "0.6 fGPU is not free, only 0.1 is"),
    }
    assert found["a"].basis == found["c"].basis == BASIS_NOW
    assert found["a"].expected_start_at_s == NOW_S


@pytest.mark.parametrize(
    ("lab", "typical_length_s", "basis"),
    [
        (world().running("a", "1").pending("b", "1"), None, BASIS_UNKNOWN),
        (world(devices=2).node("n2", devices=1).pending("b", "2").cordoned("n1"), HOUR, BASIS_NO_NODE),
        (world().running("a", "1").pending("b", "1").cordoned("n1"), None, BASIS_NO_NODE),
    ],
    ids=["too few sessions have ended", "no ready node could hold it", "no node takes sessions"],
)
def test_a_start_is_unknown_for_a_reason(lab: World, typical_length_s: int | None, basis: str) -> None:
    found = told(lab, typical_length_s)["b"]
    assert (found.position, found.expected_start_at_s, found.basis) == (1, None, basis)


def test_held_session_is_forecast_as_if_it_was_resumed() -> None:
    lab = world().running("x", "1", started_ago_s=600).pending("a", "1", held=True).pending("b", "1")
    assert starts(lab) == {"a": HOUR - 600, "b": 2 * HOUR - 600}
    held = told(lab)["a"]
    assert (held.position, held.reason) == (1, WaitReason.HELD)
    assert held.text == "the Hub has restarted, and resumes this request soon"


@pytest.mark.parametrize(
    ("lab", "asked", "words"),
    [
        (world().running("a", "1"), "0.5", "all GPUs are busy"),
        (world().running("a", "0.8"), "0.5", "0.5 fGPU is not free, only 0.2 is"),
        (
            world(devices=2).running("a", "0.7", on="GPU-n1-0").running("b", "0.6", on="GPU-n1-1"),
            "0.5",
            "no GPU has 0.5 fGPU free: 0.7 fGPU is free in all, but at most 0.4 on one GPU",
        ),
        (
            world(devices=3).running("a", "0.1", on="GPU-n1-0").running("b", "0.1", on="GPU-n1-1"),
            "2",
            "2 fGPU needs 2 free GPUs on one machine: at most 1 is free on one",
        ),
        (
            # Two are free, but not on one node.
            world(devices=0)
            .node("n1", devices=2)
            .node("n2", devices=2)
            .running("a", "0.1", on="GPU-n1-0")
            .running("b", "0.1", on="GPU-n2-0"),
            "2",
            "2 fGPU needs 2 free GPUs on one machine: at most 1 is free on one",
        ),
        (
            world(devices=2, cpu=4),
            request(fgpu="2", cpu=5),
            "2 fGPU is free, but not with 5 CPU and 1 GiB of memory on the same machine",
        ),
        (
            world(cpu=4).running("a", "0.1", cpu=3),
            request(fgpu="0.5", cpu=2),
            "0.5 fGPU is free, but not with 2 CPU and 1 GiB of memory on the same machine",
        ),
        (
            world(devices=0).node("n1", cpu=1).node("n2", node_memory_mib=1024),
            request(fgpu="0.5", cpu=2, memory_mib=2048),
            "0.5 fGPU is free, but not with 2 CPU and 2 GiB of memory on the same machine",
        ),
        (
            world(fgpu_per_gpu=1).running("a", "0.5").unit(5),
            "3",
            "3 fGPU is free, but earlier sessions still hold its GPU memory or compute",
        ),
        (
            world().holding(MEMORY_ONLY),
            "0.5",
            "0.5 fGPU is free, but only beside sessions with GPU memory and no limit of compute: "
            "fGPU cannot share a GPU with them",
        ),
        (
            # The free part of a GPU of the other mode cannot be used.
            world(devices=2).holding(MEMORY_ONLY, on="GPU-n1-0").running("b", "0.8", on="GPU-n1-1"),
            "0.9",
            "0.9 fGPU is not free, only 0.2 is",
        ),
        (
            world().node("n2").cordoned("n1").lost("n2"),
            "0.5",
            "no machine of resource group 'default' takes sessions now",
        ),
        (
            world().node("n2").lost("n1").lost("n2"),
            "0.5",
            "no machine of resource group 'default' answers now",
        ),
        (
            # The free part of a cordoned node cannot be used.
            world().node("n2").running("a", "1", on="GPU-n2-0").cordoned("n1"),
            "0.5",
            "all GPUs are busy",
        ),
        (
            world(devices=2).node("n2").cordoned("n1"),
            "2",
            "no machine that takes sessions now has 2 fGPU",
        ),
        (world(), "0.5", "waits for its turn"),
        (
            reduce(lambda lab, n: lab.running(f"u{n}", "0.04"), range(MAX_SHARES), world()),
            "0.2",
            "0.2 fGPU is free, but 20 sessions share that GPU already",
        ),
    ],
)
def test_a_shortage_says_what_is_short(lab: World, asked: str | Request, words: str) -> None:
    assert shortage(request(fgpu=asked) if isinstance(asked, str) else asked, free(lab)) == words


def test_forecast_of_several_sessions_is_that_of_the_last() -> None:
    lab = world().running("a", "0.1", started_ago_s=600)
    found = asks(lab, "0.4", 3)
    text = "0.4 fGPU is not free, only 0.1 is"
    assert (found.startable_now, found.position) == (2, 1)
    assert (found.expected_start_at_s, found.basis, found.text) == (NOW_S + HOUR, BASIS_TYPICAL, text)
    # Of three, each.
    assert (found.reason, found.largest_now_milli) == (WaitReason.RESOURCES, 300)
    assert (found.soonest_milli, found.soonest_at_s) == (None, None), "what starts now is told instead"


def test_forecast_names_the_amount_that_would_start_soonest() -> None:
    lab = world().running("a", "0.3", started_ago_s=1800).running("b", "0.7", started_ago_s=600)
    found = asks(lab, "1")
    assert (found.largest_now_milli, found.expected_start_at_s) == (None, NOW_S + HOUR - 600)
    assert (found.soonest_milli, found.soonest_at_s) == (100, NOW_S + HOUR - 1800)
    assert found.ahead is not None
    assert (found.ahead.sessions, found.ahead.fgpu_milli) == (2, 1000)


def test_soonest_amount_counts_the_last_of_several_sessions() -> None:
    lab = world().running("a", "0.9", started_ago_s=1800).running("b", "0.1", started_ago_s=600)
    assert (asks(lab, "1").soonest_milli, asks(lab, "1").soonest_at_s) == (100, NOW_S + HOUR - 1800)
    found = asks(lab, "1", 10)
    assert found.largest_now_milli is None
    assert found.expected_start_at_s is not None
    assert (found.soonest_milli, found.soonest_at_s) == (100, NOW_S + HOUR - 600)


def test_amount_that_would_not_start_sooner_is_left_out() -> None:
    found = asks(world().running("a", "1", started_ago_s=600), "0.5")
    assert (found.soonest_milli, found.soonest_at_s) == (None, None)


def test_the_largest_amount_that_starts_now_may_bring_its_own_cpu_and_memory() -> None:
    lab = world(cpu=8).running("a", "0.1", cpu=4)
    asked = request("b", "0.5", cpu=8)
    # Eight cores with a whole GPU: four are left.
    for amounts, found in (
        (others(lab, asked), (None, None)),
        (others(lab, asked, cores_per_gpu=8), (500, (4000, 1024))),
    ):
        told = forecast_request(asked, 1, lab, Policy(), lasting(HOUR), amounts)
        assert (told.largest_now_milli, told.beside_other) == found


def test_ahead_has_only_the_sessions_that_must_end() -> None:
    lab = world().running("a", "0.5", started_ago_s=1800).running("b", "0.1", started_ago_s=1700)
    lab = lab.running("c", "0.4", started_ago_s=600).pending("d", "0.4").pending("e", "0.2")
    found = {f.session_id: f.ahead for f in forecast(lab, Policy(), lasting(HOUR))}
    a, b = lab.of("a").id, lab.of("b").id
    assert found[lab.of("d").id] == BlockingSessions(1, 500, (a,))
    assert found[lab.of("e").id] == BlockingSessions(2, 600, (a, b)), (
        "with d, who comes first, there is too little without b"
    )


def test_ahead_has_the_session_that_frees_the_missing_cpu() -> None:
    lab = world(devices=2, cpu=8).running("a", "0.5", on="GPU-n1-0", cpu=8, started_ago_s=600)
    lab = lab.pending("b", "1", cpu=4)
    (found,) = forecast(lab, Policy(), lasting(HOUR))
    assert found.ahead == BlockingSessions(1, 500, (lab.of("a").id,))


def test_forecast_names_the_cpu_and_memory_that_would_start_now() -> None:
    lab = world(devices=0).node("n1", cpu=4, node_memory_mib=8192).node("n2", cpu=8, node_memory_mib=4096)
    # Each node has one of them: both are told of one node, and that is the one with more CPU.
    assert asks(lab, "0.5", cpu=8, memory_mib=8192).beside_now == (8000, 4096)
    assert asks(lab, "0.5", cpu=4, memory_mib=8192).beside_now is None, "it starts as it is"
    # Three on two nodes: two of them stand side by side.
    assert asks(lab, "0.5", 3, cpu=4, memory_mib=4096).beside_now == (4000, 2048)
    busy = lab.running("a", "1", on="GPU-n1-0").running("b", "1", on="GPU-n2-0")
    assert asks(busy, "0.5", cpu=9).beside_now is None, "the GPUs are short too"


def test_amounts_that_waiting_sessions_get_are_not_offered() -> None:
    lab = world(devices=2, cpu=4).running("a", "0.1", cpu=3)
    assert asks(lab, "0.5", cpu=2).beside_now == (1000, 1024)
    assert asks(lab.pending("b", "0.5", cpu=1), "0.5", cpu=2).beside_now is None


def runs(*lengths_s: int, user: str = "other") -> RunLengths:
    """Return the lengths of past runs: by default of another user, with the common image."""
    image = world().running("a", "1").of("a").request.image
    return RunLengths("default", [PastRun("default", user, image, length_s) for length_s in lengths_s])


def limited() -> World:
    """Return a world with one session that has just begun and has a time limit of a day."""
    return world().holding(replace(request("a", "1"), time_limit_s=24 * HOUR))


def test_long_running_session_is_expected_to_last_like_the_longest_past_runs() -> None:
    lab = world().running("a", "1", started_ago_s=2 * HOUR).pending("b", "1")
    known = ForecastHistory(runs(*[600] * 95, 3 * HOUR, 4 * HOUR, 5 * HOUR, 6 * HOUR, 7 * HOUR))
    (found,) = forecast(lab, Policy(), known)
    assert found.shown is not None
    # Half of those who ran for two hours ran for five.
    assert found.expected_start_at_s == NOW_S + 3 * HOUR
    assert (found.early_at_s, found.late_at_s) == (NOW_S + HOUR, NOW_S + 5 * HOUR)


def test_start_is_expected_before_the_limit_if_sessions_usually_end_before_it() -> None:
    lab = limited().pending("b", "1")
    (found,) = forecast(lab, Policy(), ForecastHistory(runs(*[HOUR] * 20)))
    assert found.expected_start_at_s == NOW_S + HOUR
    (late,) = forecast(lab, Policy(), ForecastHistory(runs(*[48 * HOUR] * 20)))
    assert late.expected_start_at_s == late.late_at_s == NOW_S + 24 * HOUR


def test_without_past_runs_only_time_limits_give_a_start() -> None:
    lab = limited().pending("b", "1")
    (found,) = forecast(lab, Policy(), ForecastHistory())
    assert (found.early_at_s, found.late_at_s) == (NOW_S + 24 * HOUR, NOW_S + 24 * HOUR)


def test_a_lifetime_of_the_resource_group_is_the_latest_end_of_each_session() -> None:
    lab = world().running("a", "1", started_ago_s=600).pending("b", "1")
    (found,) = forecast(lab, Policy(GroupPolicy(max_lifetime_s=HOUR)), ForecastHistory())
    assert (found.expected_start_at_s, found.basis) == (NOW_S + HOUR - 600, BASIS_LIMITS)


def test_start_that_may_come_later_does_not_rest_on_time_limits() -> None:
    lab = world(devices=5)
    for user in "abcde":
        lab = lab.running(user, "1")
    lab = lab.having("a", ends_at_s=NOW_S + HOUR, ends_cause=EndCause.TIME_LIMIT).pending("z", "1")
    (found,) = forecast(lab, Policy(), ForecastHistory(runs(*range(600, 12600, 600))))
    assert found.late_at_s == NOW_S + HOUR
    assert found.expected_start_at_s is not None
    assert (found.basis, found.expected_start_at_s < found.late_at_s) == (BASIS_TYPICAL, True)


def test_starts_that_were_later_than_planned_make_the_next_range_later_and_never_before_now() -> None:
    lab = world().running("a", "1", started_ago_s=60).pending("b", "1")
    lengths = runs(*range(600, 6600, 600))
    (plain,) = forecast(lab, Policy(), ForecastHistory(lengths))
    (taught,) = forecast(lab, Policy(), ForecastHistory(lengths, Calibration(-9.0, 1.0, 2.0)))
    assert plain.planned == taught.planned == plain.shown
    assert taught.early_at_s == NOW_S
    assert plain.late_at_s is not None
    assert taught.expected_start_at_s is not None
    assert taught.late_at_s is not None
    assert plain.late_at_s < taught.expected_start_at_s < taught.late_at_s


def test_first_of_several_uncertain_ends_is_expected_sooner_than_a_single_one() -> None:
    lengths = ForecastHistory(runs(*range(600, 12600, 600)))
    one = world().running("a", "1").pending("z", "1")
    many = world(devices=4)
    for user in "abcd":
        many = many.running(user, "1")
    (alone,) = forecast(one, Policy(), lengths)
    (first,) = forecast(many.pending("z", "1"), Policy(), lengths)
    assert first.expected_start_at_s < alone.expected_start_at_s


@pytest.mark.parametrize("other", ["of another resource group", "parked"])
def test_far_starts_wait_for_no_session_that_frees_nothing_for_them(other: str) -> None:
    """With quotas the sessions of all groups are known; a parked session holds no shares."""
    lab = world(devices=WORLD_STARTS, cpu=WORLD_STARTS + 1)
    if other == "parked":
        lab = parked(lab.running("p", "1", started_ago_s=900), "p")
    else:
        lab = lab.node("n2", group="class").running("other", "1", group="class")
        lab = replace(lab, quotas=(Quota(QuotaScope.USER, "*", max_sessions=1),))
    for n in range(WORLD_STARTS):
        lab = lab.running(f"u{n}", "1", started_ago_s=HOUR // 2)
    for n in range(WORLD_STARTS + 1):
        lab = lab.pending(f"w{n}", "1")
    assert starts(lab)[f"w{WORLD_STARTS}"] == HOUR // 2 + HOUR


def test_position_from_an_earlier_outlook_counts_its_own_queue_only() -> None:
    lab = world(group="lab").node("n2", group="class").running("a", "1", group="lab")
    lab = lab.pending("b", "2", group="class").pending("c", "1", group="lab")
    known = outlook(lab, Policy(), lambda _: lasting(HOUR))
    asked = request("d", "1", group="lab")
    assert forecast_request(asked, 1, lab, Policy(), lasting(HOUR), ahead=known).position == 2


BUSY = world(devices=1).node("n2").node("n3").node("n4")
BUSY = BUSY.running("d", "0.5", started_ago_s=90).running("a", "0.5").running("b", "1", started_ago_s=30)
BUSY = BUSY.running("c", "0.5", started_ago_s=60).running("f", "1").pending("d", "1").pending("e", "1")
HALF = world(devices=1).node("n2").running("d", "0.5", started_ago_s=60).running("a", "0.5")
HALF = HALF.pending("e", "2")
"""Another node is free than the one on which the user's session ends; the session that waits fits nowhere."""
LAST = world(devices=1).node("n2").node("n3", devices=2).running("a", "1", started_ago_s=2600)
LAST = LAST.running("b", "1", started_ago_s=600)
LAST = replace(
    LAST,
    sessions=(
        *LAST.sessions,
        Session(3, replace(request("e", "1"), priority=-1), SessionState.PENDING, NOW_S),
    ),
)
"""The last pass starts a session behind the request, which counts until it ends."""
NOW = world(devices=1).node("n2").running("a", "1", started_ago_s=1800).pending("d", "1").pending("e", "2")
"""The user's own session starts now."""
KEPT = (
    world(devices=2).running("a", "1", started_ago_s=600).running("c", "0.5").having("a", time_limit_s=4000)
)
KEPT = KEPT.having("c", time_limit_s=4000).running("d", "0.5", started_ago_s=300).pending("e", "2")
"""Behind a reservation a session starts that ends in time, here by the quota's limit."""


@pytest.mark.parametrize(
    ("lab", "quota", "asked"),
    [
        (BUSY, Quota(QuotaScope.USER, "*", max_fgpu_milli=3000), "1"),
        (BUSY, Quota(QuotaScope.USER, "*", max_fgpu_milli=2000), "1"),
        (BUSY, Quota(QuotaScope.USER, "*", max_fgpu_milli=1500), "0.5"),
        (BUSY, Quota(QuotaScope.USER, "*", max_fgpu_milli=900), "1"),
        (BUSY, Quota(QuotaScope.USER, "*", max_sessions=1), "1"),
        (BUSY, Quota(QuotaScope.ALL, "*", max_fgpu_milli=2500), "1"),
        (BUSY, Quota(QuotaScope.ALL, "*", max_sessions=3), "0.5"),
        (HALF, Quota(QuotaScope.USER, "*", max_sessions=1), "1"),
        (LAST, Quota(QuotaScope.ALL, "*", max_fgpu_milli=2500), "2"),
        (NOW, Quota(QuotaScope.USER, "*", max_sessions=1), "1"),
        (KEPT, Quota(QuotaScope.USER, "d", max_sessions=1, max_lifetime_s=600), "0.5"),
    ],
)
def test_an_earlier_outlook_answers_for_a_request_that_a_quota_stops(
    lab: World, quota: Quota, asked: str
) -> None:
    lab = replace(lab, quotas=(quota,))
    known = outlook(lab, Policy(), lambda _: lasting(HOUR))
    new = Session(len(lab.sessions) + 1, request("d", asked), SessionState.PENDING, lab.now_s)
    submitted = lab.changed([(None, new)])
    found = forecast_new(submitted, new.id, Policy(), lasting(HOUR), known, PlanCache())
    (whole,) = forecast(submitted, Policy(), lasting(HOUR), [new.id])
    assert found is not None
    assert replace(found, ahead=None, planned=None) == replace(whole, ahead=None, planned=None)


@pytest.mark.parametrize("later", ["started", "came"])
def test_an_earlier_outlook_does_not_answer_once_the_user_has_another_session(later: str) -> None:
    lab = world(devices=1).node("n2").running("a", "1", started_ago_s=1800).pending("e", "2")
    lab = replace(lab, quotas=(Quota(QuotaScope.USER, "*", max_sessions=1),))
    known = outlook(lab, Policy(), lambda _: lasting(HOUR))
    lab = lab.running("d", "1") if later == "started" else lab.pending("d", "1")
    new = Session(len(lab.sessions) + 1, request("d", "1"), SessionState.PENDING, lab.now_s)
    submitted = replace(lab, version=lab.version + 1).changed([(None, new)])
    assert forecast_new(submitted, new.id, Policy(), lasting(HOUR), known, PlanCache()) is None


def test_an_earlier_outlook_does_not_answer_where_nothing_more_is_known_to_end() -> None:
    lab = world(devices=1).running("a", "1").having("a", time_limit_s=HOUR)
    lab = lab.pending("b", "1").pending("c", "1")
    known = outlook(lab, Policy(), lambda _: lasting(None))
    new = Session(len(lab.sessions) + 1, request("d", "1"), SessionState.PENDING, lab.now_s)
    submitted = lab.changed([(None, new)])
    assert forecast_new(submitted, new.id, Policy(), lasting(None), known, PlanCache()) is None


def test_an_earlier_outlook_does_not_answer_for_lent_amounts() -> None:
    lab = world(devices=1).running("a", "1")
    lab = replace(lab, quotas=(Quota(QuotaScope.ACCOUNT, "*", guaranteed_milli=500),))
    known = outlook(lab, Policy(), lambda _: lasting(HOUR))
    new = Session(len(lab.sessions) + 1, request("d", "1"), SessionState.PENDING, lab.now_s)
    submitted = lab.changed([(None, new)])
    assert forecast_new(submitted, new.id, Policy(), lasting(HOUR), known, PlanCache()) is None
