"""The administrators' first page: problems with links, waiting and idle sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from worlds import ADMIN, SITE, Build, gpu, node

from fgpu_scheduler import AuditLine, ForecastAccuracy, NodeState, SessionState
from fgpuspawner.isolation.choice import Verdict
from fgpuspawner.meter.gpu_health import GpuHealth, GpuHealthState
from fgpuspawner.meter.model import Live, Meter, MeterState, Point
from fgpuspawner.meter.usage_report import Hour, RecentUse, Span
from fgpuspawner.service.admin.objects import Overview, Trouble
from fgpuspawner.service.admin.overview import charts, gpu_parts, idle, overview_object, problems
from fgpuspawner.service.model import World

SPAN = Span(1.0, 3, 60, 120)
LATELY = RecentUse(1000, SPAN, SPAN, (Hour(-2600, 3.0, None, 0.5, 60),))


def seen(world: World, **more: Any) -> Overview:
    return overview_object(world, ADMIN, SITE, **{"lately": LATELY, **more})


def told(*found: Trouble) -> list[tuple[str, str, str | None]]:
    return [(one["level"], one["text"], one["link"]) for one in found]


def test_empty_cluster_has_no_problems() -> None:
    found = seen(Build(node()).world())
    assert (found["problems"], found["idle"], found["running"]) == ([], [], 0)
    assert found["queues"][0]["length"] == 0


def test_use_is_a_percentage_of_the_gpus_up_to_100() -> None:
    use = seen(Build(node("n1", "default", gpu("n1"), gpu("n1", 1))).world())["use"]
    assert (use["gpus"], use["day"]["percent"]) == (2, 50)
    many = RecentUse(1000, replace(SPAN, gpus=3.0), replace(SPAN, gpus=None), ())
    use = seen(Build(node("n1", "default", gpu("n1"), gpu("n1", 1))).world(), lately=many)["use"]
    assert (use["day"]["percent"], use["week"]["percent"]) == (100, None)
    assert seen(Build().world(), lately=None)["use"] is None


def test_parked_sessions_are_counted_with_their_memory() -> None:
    build = Build().running("ann", 500).running("bob", 500)
    build.sessions[0] = replace(build.sessions[0], state=SessionState.PARKED, parked_at_s=50, parked_mib=300)
    found = seen(build.world())
    assert (found["parked"], found["parked_mib"], found["running"]) == (1, 300, 2)


def test_use_without_gpus_is_unknown() -> None:
    world = Build().world()
    bare = replace(world, snapshot=replace(world.snapshot, nodes=()))
    found = seen(bare)
    assert (found["use"]["day"]["percent"], found["gpus"]) == (None, [])


def live(now_s: int, sm_percent: float | None, lent_percent: float | None = None) -> Live:
    return Live(Meter(now_s, 0, 1, sm_percent, 25, 0.0, None, compute_lent_percent=lent_percent))


def test_gpus_now_have_what_is_held_idle_used_and_lent() -> None:
    build = Build(node("n1", "default", gpu("n1"), gpu("n1", 1))).running("ann", 500).running("bob", 1000)
    build.sessions[1] = replace(build.sessions[1], idle_since_s=100)
    world = build.world()
    now_s = world.snapshot.now_s
    world = replace(world, meters=MeterState(5, {1: live(now_s, 20.0, 5.0), 2: live(now_s, 0.0, 0.0)}))
    first, second = seen(world)["gpus"]
    assert (first["fgpu_held"], first["fgpu_idle"], first["fgpu_total"]) == ("1.5", "1", "2")
    assert (first["used_percent"], first["lent_percent"]) == (20.0, 5.0)
    assert gpu_parts(first) == [
        [("held", 0.0, 25.0), ("idle", 25.0, 50.0), ("free", 75.0, 25.0)],
        [("used", 0.0, 15.0), ("lent", 15.0, 5.0)],
    ]
    assert (second["used_percent"], second["lent_percent"], gpu_parts(second)[1]) == (0, None, [])
    half = replace(world, meters=MeterState(5, {1: live(now_s, 20.0)}))
    assert seen(half)["gpus"][0]["used_percent"] is None


def test_use_of_a_real_gpu_comes_from_its_driver() -> None:
    world = Build().running("ann", 500).world()
    world = replace(world, gpus=GpuHealthState({"GPU-n1-0": GpuHealth(world.snapshot.now_s, use_percent=70)}))
    assert seen(world)["gpus"][0]["used_percent"] == 70


def test_use_of_a_free_real_gpu_is_unknown_without_its_driver() -> None:
    def used(simulated: bool) -> float | None:
        return seen(Build(node("n1", "default", gpu("n1", simulated=simulated))).world())["gpus"][0][
            "used_percent"
        ]

    assert (used(simulated=False), used(simulated=True)) == (None, 0)


def test_charts_have_the_last_hours_and_their_gaps() -> None:
    hours = tuple(Hour(3600 * n, float(n), None, 0.5, n or None) for n in range(168))
    use = seen(Build().world(), lately=RecentUse(1000, SPAN, SPAN, hours))["use"]
    gpus, waiting, waits = charts(use, 24)
    assert (gpus.starts_at_s[0], len(gpus.series[0].values), gpus.series[0].values[-1]) == (
        144 * 3600,
        24,
        167,
    )
    assert set(gpus.series[1].values) == {None}
    assert (waiting.series[0].values[0], waits.unit, len(charts(use, 168)[2].starts_at_s)) == (0.5, "s", 168)


def test_problems_link_to_the_page_that_fixes_them() -> None:
    broken = replace(gpu("n2", 1), cordon_reason="the fan")
    build = Build(node("n1", state=NodeState.LOST), node("n2", "default", gpu("n2"), broken)).running(
        "ann", 500, at="n2"
    )
    build.sessions[0] = replace(build.sessions[0], message="holds more than its share")
    world = build.world()
    world = replace(world, gpus=GpuHealthState({"GPU-n2-0": GpuHealth(world.snapshot.now_s, ecc_errors=3)}))
    strike = AuditLine(1, 1, "the watchdog", "watchdog.strike", "session 1", "")
    verdict = Verdict("n2", 7, "interposer", 1, ("too much",))
    assert told(*problems(world, [verdict], [strike, strike])) == [
        ("bad", "Machine n1 does not answer; what it runs keeps its shares", "admin/nodes#node-n1"),
        ("bad", "GPU 0 of n2: 3 uncorrected memory errors (ECC)", "admin/nodes#node-n2"),
        ("bad", "On machine n2 the GPU limits were not in force in session 7", "admin/nodes#node-n2"),
        (
            "bad",
            "The watchdog found sessions above their limits 2 times in the last day",
            "admin/audit?action=watchdog",
        ),
        ("warn", "Session 1 of ann: holds more than its share", "end/1"),
        ("off", "GPU 1 of n2 takes no new sessions: the fan", "admin/nodes#node-n2"),
    ]


def test_queue_summary_has_last_start_and_unknown_count() -> None:
    world = (
        Build(node())
        .running("bob", 2000)
        .pending("ann", 500)
        .pending("cy", 2000)
        .world(typical_length_s=3600)
    )
    (queue,) = seen(world)["queues"]
    last = max(f.expected_start_at_s or 0 for f in world.forecasts.values())
    assert (queue["length"], queue["last_start_at_s"], queue["without_estimate"]) == (2, last, 0)
    world = Build(node(state=NodeState.CORDONED)).pending("ann", 500).world()
    (queue,) = seen(world)["queues"]
    assert (queue["last_start_at_s"], queue["without_estimate"]) == (None, 1)


def test_idle_sessions_come_from_the_rule_or_the_gpu_meter() -> None:
    build = Build(node()).running("ann", 500).running("bob", 500).running("cy", 500).running("dan", 500)
    build.running("eve", 0)
    build.sessions[0] = replace(build.sessions[0], idle_since_s=700)
    build.sessions[4] = replace(build.sessions[4], idle_since_s=999)
    world = build.world()
    now_s = world.snapshot.now_s

    def sampled(*percents: float | None) -> Live:
        points = tuple(Point(now_s - 100 * (len(percents) - n), 0, p) for n, p in enumerate(percents))
        return Live(Meter(now_s, 0, 1, percents[-1], 25, 0.0, None), points)

    meters = {2: sampled(5, 0, 0, 0, 0), 3: sampled(0, 0, None, 0), 4: sampled(0, 0, 0, 0, 3)}
    found = idle(replace(world, meters=MeterState(5, meters)))
    assert [(one["user"], one["idle_since_s"]) for one in found] == [("bob", now_s - 400), ("ann", 700)]


def test_forecast_accuracy_is_in_percent_and_seconds() -> None:
    world = Build().world()
    found = seen(world, foretold=ForecastAccuracy(40, 0.8, 0.125, 0.075, 3600.4, 4000.0))
    assert found.model_dump()["forecasts"] == {
        "starts": 40,
        "inside_percent": 80,
        "late_percent": 12,
        "told_wait_s": 3600,
        "true_wait_s": 4000,
    }
    assert seen(world)["forecasts"] is None
