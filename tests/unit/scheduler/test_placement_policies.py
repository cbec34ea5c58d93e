"""Which of the places that fit each score takes."""

from __future__ import annotations

from dataclasses import replace

import placing
import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core import placer
from fgpu_scheduler.core.model import Request
from fgpu_scheduler.core.placement import NodeAmounts, Score, free, place, untouched
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.request_counts import count_requests
from fgpu_scheduler.core.scores import (
    ClusterTotals,
    TypicalRequest,
    Workload,
    best_fit,
    fgd,
    first_fit,
    spread,
    worth,
)
from fgpu_scheduler.core.scores.cutting_stock import residual_values
from fgpu_scheduler.core.scores.fgd import Fragmentation
from fgpu_scheduler.core.scores.placements import PLACEMENTS, score_for, workload_of
from fgpu_scheduler.core.scores.worth import ScarceNodes, prices, scarce_nodes


def goes_to(lab: World, fgpu: str, score: Score, **asked: int | str) -> list[str] | None:
    """Return the devices that a new request gets now, or None."""
    return placing.goes_to(lab, request("new", fgpu, **asked), score)  # type: ignore[arg-type]


def asks(**counts: int) -> Workload:
    """Return a workload: ``asks(f470=3, f1000=1)``, each with one core and 1 GiB."""
    return Workload.counted((TypicalRequest(int(name[1:]), 1000, 1024), n) for name, n in counts.items())


def test_first_fit_takes_the_lowest_ids() -> None:
    lab = world(devices=2).node("n2", devices=1).running("a", "0.7", on="GPU-n1-1")
    assert goes_to(lab, "0.3", first_fit) == ["GPU-n1-0"]
    assert goes_to(lab, "0.3", best_fit) == ["GPU-n1-1"]


def test_spread_takes_the_emptiest_device_then_the_emptiest_node() -> None:
    lab = world(devices=2).node("n2", devices=2).running("a", "0.2", on="GPU-n1-0")
    assert goes_to(lab, "0.3", spread) == ["GPU-n2-0"]
    assert goes_to(lab.running("b", "1", on="GPU-n2-1"), "0.3", spread) == ["GPU-n1-1"]


def test_fragmentation_is_what_the_typical_shapes_cannot_use() -> None:
    """Worked by hand from the paper: half of the requests are of 0.5, a quarter of 1, a quarter of none."""
    counts = [
        (TypicalRequest(500, 1000, 0), 2),
        (TypicalRequest(1000, 4000, 0), 1),
        (TypicalRequest(0, 1000, 0), 1),
    ]
    potential = Fragmentation(Workload.counted(counts), percent=100)
    assert potential.scale == 4
    # 1.3 free: 0.5 can use the whole device and none of 0.3; 1 the whole one; without GPU, all is lost.
    assert potential(NodeAmounts(8000, 9999, (1000, 300), (1000, 1000))) == 2 * 300 + 1 * 300 + 1 * 1300
    # With 3 cores, 1 cannot run: all of it is lost to that.
    assert potential(NodeAmounts(3000, 9999, (1000, 300), (1000, 1000))) == 2 * 300 + 1 * 1300 + 1 * 1300
    assert potential(NodeAmounts(500, 9999, (1000, 300), (1000, 1000))) == 4 * 1300


def test_several_devices_are_fragments_to_a_shape_that_needs_more_of_them() -> None:
    potential = Fragmentation(asks(f2000=1), percent=100)
    assert potential(NodeAmounts(8000, 9999, (1000, 1000, 400), (1000,) * 3)) == 400
    assert potential(NodeAmounts(8000, 9999, (1000, 900, 400), (1000,) * 3)) == 2300
    assert potential(NodeAmounts(500, 9999, (1000, 1000, 400), (1000,) * 3)) == 2400, (
        "without CPU it cannot run"
    )


def test_fgd_keeps_whole_the_device_that_most_requests_need_whole() -> None:
    lab = world(devices=2).running("a", "0.4", on="GPU-n1-1")
    assert goes_to(lab, "0.2", fgd(asks(f1000=9, f200=1))) == ["GPU-n1-1"]


def test_fgd_takes_the_node_whose_cpu_serves_no_typical_request() -> None:
    lab = world(devices=0).node("n1", cpu=16).node("n2", cpu=2)
    typical = Workload.counted([(TypicalRequest(500, 8000, 1024), 1)])
    assert goes_to(lab, "0.5", fgd(typical)) == ["GPU-n2-0"]
    assert goes_to(lab, "0.5", best_fit) == ["GPU-n1-0"]


def test_a_part_is_worth_what_popular_fractions_can_be_cut_from_it() -> None:
    values = residual_values({470: 100, 320: 10}, capacity_milli=1000)
    assert values[0] == values[60] == 0, "nothing fits into 0.06"
    assert values[470] > 450, "two of 0.47 make a device"
    assert values[469] < values[470], "one thousandth less is of no use to 0.47"
    assert values[1000] == 1000


def test_a_fraction_that_fills_gaps_that_abound_is_worth_little() -> None:
    values = residual_values({810: 100, 160: 5}, capacity_milli=1000)
    assert values[160] < 100 < 900 < values[810]


@pytest.mark.parametrize("capacity", [1, 200, 1000, 5000, 12345])
def test_worth_grows_with_size_and_never_passes_the_device(capacity: int) -> None:
    demand = {capacity * part // 100: part for part in (5, 16, 33, 47, 65, 81)}
    for asked in (demand, {}, {capacity: 3, 10 * capacity: 1}):
        values = residual_values(asked, capacity_milli=capacity)
        assert len(values) == capacity + 1
        assert list(values) == sorted(values)
        assert (values[0], values[-1]) == (0, capacity)


def test_worth_leaves_the_gap_that_a_popular_fraction_fills() -> None:
    """Best fit puts 0.3 into the gap of 0.47; most requests are of 0.47, so `worth` keeps it for one."""
    lab = world(devices=0).node("n1", devices=30).node("n2", devices=1)
    lab = lab.running("a", "0.53", on="GPU-n1-0").running("b", "0.35", on="GPU-n1-1")
    score = worth(asks(f470=50, f300=5, f350=5), ClusterTotals.of(lab.nodes))
    assert goes_to(lab, "0.3", best_fit) == ["GPU-n1-0"]
    assert goes_to(lab, "0.3", score) == ["GPU-n1-1"]
    assert goes_to(lab, "0.47", score) == ["GPU-n1-0"]


def test_worth_puts_a_request_of_much_cpu_where_cpu_is_left_over() -> None:
    lab = world(devices=0).node("n1", devices=2, cpu=9).node("n2", devices=2, cpu=64)
    score = worth(
        Workload.counted([(TypicalRequest(1000, 4000, 1024), 9), (TypicalRequest(500, 4000, 1024), 1)]),
        ClusterTotals.of(lab.nodes),
    )
    assert goes_to(lab, "0.5", best_fit, cpu=8) == ["GPU-n1-0"]
    assert goes_to(lab, "0.5", score, cpu=8) == ["GPU-n2-0"]


def test_worth_counts_memory_of_the_host_as_it_counts_cpu() -> None:
    lab = world(devices=0).node("n1", devices=2, node_memory_mib=9000).node("n2", devices=2)
    score = worth(Workload.counted([(TypicalRequest(1000, 1000, 4096), 9)]), ClusterTotals.of(lab.nodes))
    assert goes_to(lab, "0.5", score, memory_mib=8192) == ["GPU-n2-0"]


@pytest.mark.parametrize(("without_gpu", "device"), [(0, "GPU-n2-0"), (1, "GPU-n1-0")])
def test_worth_saves_cpu_for_gpus_only_where_there_is_enough_for_all(without_gpu: int, device: str) -> None:
    """With 100 cores that go without GPU more is asked for than there is: then some GPU idles wherever this goes."""
    lab = world(devices=0).node("n1", devices=2, cpu=16).node("n2", devices=2, cpu=64)
    counts = [
        (TypicalRequest(1000, 1000, 1024), 3),
        (TypicalRequest(1000, 40000, 1024), 1),
        (TypicalRequest(0, 100000, 1024), without_gpu),
    ]
    assert goes_to(lab, "1", worth(Workload.counted(counts), ClusterTotals.of(lab.nodes)), cpu=12) == [device]


def test_worth_leaves_a_node_with_much_cpu_to_requests_for_all_of_it() -> None:
    """To whole nodes all others are equal: their GPUs are all taken, and no fragment is left."""
    lab = world(devices=0).node("n1", devices=2, cpu=64).node("n2", devices=2, cpu=16)
    score = worth(asks(f1000=9, f2000=1), ClusterTotals.of(lab.nodes))
    assert goes_to(lab, "2", best_fit, cpu=8) == ["GPU-n1-0", "GPU-n1-1"]
    assert goes_to(lab, "2", score, cpu=8) == ["GPU-n2-0", "GPU-n2-1"]
    assert goes_to(lab, "2", score, cpu=32) == ["GPU-n1-0", "GPU-n1-1"]


def test_worth_is_best_fit_on_one_node_and_without_a_workload() -> None:
    lab = world(devices=2).node("n2")
    assert worth(asks(f470=9), ClusterTotals.of(lab.nodes[:1])) is best_fit
    assert worth(Workload(), ClusterTotals.of(lab.nodes)) is best_fit
    assert worth(asks(f0=9), ClusterTotals.of(lab.nodes)) is best_fit
    assert worth(asks(f470=9), ClusterTotals.of(lab.nodes)) is not best_fit


def two_models() -> World:
    lab = world(devices=0)
    for name, model in (("n1", "Rare"), ("n2", "Plain"), ("n3", "Plain"), ("n4", "Plain")):
        lab = lab.node(name, devices=2, model=model)
    return lab


def named(model: str, count: int) -> Workload:
    return Workload.counted(
        [(TypicalRequest(1000, 1000, 1024), 9), (TypicalRequest(1000, 1000, 1024, model), count)]
    )


def test_price_of_a_model_is_the_demand_of_requests_for_it_alone() -> None:
    cluster = ClusterTotals.of(two_models().nodes)
    assert prices(named("Rare", 1), cluster) == {"Rare": 400}, (
        "a tenth of the requests, a quarter of the GPUs"
    )
    assert prices(named("Rare", 9), cluster) == {"Rare": 1000}, "more than there are"
    assert prices(named("Other", 3), cluster) == {}, "there is none of it"
    assert prices(asks(f1000=9), cluster) == {}


def few_large_nodes() -> World:
    """Return four nodes of two GPUs, the first with more CPU than the others."""
    lab = world(devices=0).node("n1", devices=2, cpu=64)
    for name in ("n2", "n3", "n4"):
        lab = lab.node(name, devices=2, cpu=16)
    return lab


def wholes(count: int, *, cpu: int = 32, others: int = 10) -> Workload:
    """Return a workload of requests for two GPUs and much CPU, and of others for one GPU and little CPU."""
    return Workload.counted(
        [(TypicalRequest(2000, 1000 * cpu, 1024), count), (TypicalRequest(1000, 12000, 1024), others)]
    )


def test_node_is_scarce_if_half_of_its_kind_is_requested_whole() -> None:
    cluster = ClusterTotals.of(few_large_nodes().nodes)
    assert scarce_nodes(wholes(1), cluster) == (ScarceNodes(2000, 32000, 1024, 2 * 666),)
    assert scarce_nodes(wholes(10), cluster) == (ScarceNodes(2000, 32000, 1024, 2 * 1000),), (
        "more than there are"
    )
    assert scarce_nodes(wholes(1, others=15), cluster) == (), "less than half"
    assert scarce_nodes(wholes(10, cpu=16), cluster) == (), "they fit on all nodes"
    assert scarce_nodes(wholes(1, cpu=65), cluster) == (), "they fit on none"
    assert scarce_nodes(asks(f500=3), cluster) == (), "nobody needs a node whole"


def test_requests_that_fit_on_the_same_nodes_count_together() -> None:
    """One has more CPU, the other more memory: only n1 holds either."""
    cluster = ClusterTotals.of(few_large_nodes().nodes)
    counts = [
        (TypicalRequest(2000, 40000, 1024), 1),
        (TypicalRequest(2000, 32000, 2048), 1),
        (TypicalRequest(1000, 12000, 1024), 20),
    ]
    assert scarce_nodes(Workload.counted(counts), cluster) == (ScarceNodes(2000, 32000, 1024, 2 * 666),)


@pytest.mark.parametrize("amount", ["1", "0.5"])
def test_worth_leaves_a_scarce_node_to_requests_for_all_of_it(amount: str) -> None:
    """Of much CPU a GPU, as those who are placed are, more would be left over on n1."""
    lab = few_large_nodes()
    asked = request("new", amount, cpu=15)
    for count, node in ((1, "n2"), (0, "n1")):
        found = placing.goes_to(lab, asked, worth(wholes(count), ClusterTotals.of(lab.nodes)))
        assert found is not None
        assert found[0] == f"GPU-{node}-0"


def test_a_scarce_node_that_is_begun_costs_nothing_more() -> None:
    lab = few_large_nodes().running("a", "1", on="GPU-n1-0")
    for count in (0, 1):
        score = worth(wholes(count), ClusterTotals.of(lab.nodes))
        assert goes_to(lab, "1", score, cpu=15) == ["GPU-n1-1"]


@pytest.mark.parametrize("few", [0, placer.FEW])
@pytest.mark.parametrize(("cpu", "node"), [(8, "n1"), (9, "n5")])
def test_request_for_cpu_alone_leaves_a_scarce_node_large_enough(
    cpu: int, node: str, few: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """n1 has 40 cores left, and a request for all of its GPUs needs 32; n5 has 64. Also with all nodes in tables."""
    monkeypatch.setattr(placer, "FEW", few)
    lab = world(devices=0).node("n1", devices=2, cpu=64).running("a", "0", cpu=24)
    lab = lab.node("n2", devices=2, cpu=16).node("n3", devices=2, cpu=16).node("n5", devices=2, cpu=64)
    score = worth(wholes(2), ClusterTotals.of(lab.nodes))
    where = Placer(free(lab), score=score).place(request("new", "0", cpu=cpu))
    assert where is not None
    assert where.node_id == node


@pytest.mark.parametrize("amount", ["1", "0.5", "2"])
def test_worth_leaves_a_scarce_model_to_requests_for_it(amount: str) -> None:
    lab = two_models()
    asked = request("new", amount)
    for score, node in ((worth(named("Rare", 2), ClusterTotals.of(lab.nodes)), "n2"), (best_fit, "n1")):
        found = placing.goes_to(lab, asked, score)
        assert found is not None
        assert found[0] == f"GPU-{node}-0"
    picky = replace(asked, gpu_models=("Rare",))
    found = placing.goes_to(lab, picky, worth(named("Rare", 2), ClusterTotals.of(lab.nodes)))
    assert found is not None
    assert found[0] == "GPU-n1-0"


def test_scarce_model_is_used_before_a_request_waits() -> None:
    lab = two_models()
    placer = Placer(free(lab), score=worth(named("Rare", 2), ClusterTotals.of(lab.nodes)))
    went = [placer.place(request("u", "1")) for _ in range(9)]
    assert [where and where.node_id for where in went] == [
        "n2",
        "n2",
        "n3",
        "n3",
        "n4",
        "n4",
        "n1",
        "n1",
        None,
    ]


def test_every_placement_policy_makes_its_score_from_past_requests() -> None:
    lab = replace(two_models(), request_counts=count_requests([request("u", "1")] * 60))
    chosen = {name: score_for(one, lab, "default") for name, one in PLACEMENTS.items()}
    assert (chosen["first-fit"], chosen["best-fit"], chosen["spread"]) == (first_fit, best_fit, spread)
    assert type(chosen["fgd"]) is type(fgd(Workload()))
    assert type(chosen["default"]) is type(worth(asks(f1000=1), ClusterTotals.of(lab.nodes)))
    # Made once for all passes.
    assert score_for(PLACEMENTS["default"], lab, "default") is chosen["default"]


def test_default_placement_is_best_fit_on_one_node_and_with_few_requests() -> None:
    asked = [request("u", "1")] * 60
    one_node = replace(world(devices=8), request_counts=count_requests(asked))
    assert score_for(PLACEMENTS["default"], one_node, "default") is best_fit
    new = replace(two_models(), request_counts=count_requests(asked[:49]))
    assert score_for(PLACEMENTS["default"], new, "default") is best_fit
    elsewhere = [replace(one, resource_group="other") for one in asked]
    assert (
        score_for(PLACEMENTS["default"], replace(new, request_counts=count_requests(elsewhere)), "default")
        is best_fit
    )
    without_gpu = [replace(one, fgpu_milli=0) for one in asked]
    assert (
        score_for(PLACEMENTS["default"], replace(new, request_counts=count_requests(without_gpu)), "default")
        is best_fit
    )


def test_explicit_amounts_count_as_their_worth_in_fgpu() -> None:
    cluster = ClusterTotals.of(two_models().nodes)
    half = replace(request("u", "0"), gpu_memory_mib=4096, compute_percent=25)
    (found,) = workload_of(count_requests([half] * 50), cluster).counts
    assert found == (TypicalRequest(500, 1000, 1024), 50)


def test_plan_uses_the_counts_of_past_requests() -> None:
    """The gap of 0.47 is kept for the popular fraction, which a plan alone, told of nothing, would not do."""
    lab = world(devices=0).node("n1", devices=30).node("n2", devices=1)
    lab = lab.running("a", "0.53", on="GPU-n1-0").running("b", "0.35", on="GPU-n1-1").pending("c", "0.3")
    asked = [request("u", amount) for amount in ("0.47",) * 50 + ("0.3", "0.35") * 5]
    for seen, device in ((lab, "GPU-n1-0"), (replace(lab, request_counts=count_requests(asked)), "GPU-n1-1")):
        (placed,) = plan(seen, Policy()).placed
        assert [share.device_uuid for share in placed.placement.shares] == [device]


def all_scores(lab: World) -> dict[str, Score]:
    workload = asks(f1000=5, f500=3, f300=2, f2000=1)
    return {
        "first_fit": first_fit,
        "best_fit": best_fit,
        "spread": spread,
        "fgd": fgd(workload),
        "worth": worth(workload, ClusterTotals.of(lab.nodes)),
    }


AMOUNTS = ("0.5", "1", "0.3", "2", "0.1", "0.7", "1", "0.9", "0.2", "0.4", "0.6", "1", "0.3", "0.5")


@pytest.mark.parametrize("name", ["first_fit", "best_fit", "spread", "fgd", "worth"])
def test_placer_agrees_with_place_in_equal_worlds(name: str) -> None:
    lab = world(devices=0).node("n2", devices=3, cpu=6).node("n1", devices=2).node("n3", devices=2, cpu=4)
    left = tuple(untouched(node) for node in lab.nodes)
    placers = [Placer(left, score=all_scores(lab)[name]) for _ in range(2)]
    score = all_scores(lab)[name]
    for amount in AMOUNTS:
        asked = request("u", amount)
        found = place(asked, left, score=score)
        expected = None
        if found is not None:
            expected, left = found
        assert [placer.place(asked) for placer in placers] == [expected, expected]
        assert placers[0].left == left


def test_placer_uses_released_capacity() -> None:
    lab = world(devices=0).node("n1").node("n2")
    empty = tuple(untouched(node) for node in lab.nodes)
    placer = Placer(empty, score=best_fit)
    whole = request("u", "1")
    assert [placer.place(whole) is not None for _ in range(3)] == [True, True, False]
    assert not placer.fits(whole)
    placer.update(empty[1])
    assert placer.fits(whole)
    where = placer.place(whole)
    assert where is not None
    assert where.node_id == "n2"


def test_placer_places_a_request_without_gpu() -> None:
    lab = world(devices=0).node("n1", cpu=1)
    placer = Placer(tuple(untouched(node) for node in lab.nodes), score=best_fit)
    asked = Request("u", "", "image", "default", 0, 1000, 1024)
    where = placer.place(asked)
    assert where is not None
    assert where.shares == ()
    assert placer.place(asked) is None
    assert goes_to(lab, "0", best_fit) == []


def test_placer_with_full_caches_makes_the_same_decisions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fgpu_scheduler.core.placer.KEPT_CHANGES", 3)
    monkeypatch.setattr("fgpu_scheduler.core.placer.KEPT_SHAPES", 2)
    test_placer_agrees_with_place_in_equal_worlds("worth")
