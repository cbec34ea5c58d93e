"""Which of the places that fit each score takes."""

from __future__ import annotations

from dataclasses import replace

import placing
import pytest
from simulator import World, world
from simulator.world import request

from fgpu_scheduler.core.model import Request
from fgpu_scheduler.core.placement import NodeAmounts, Score, best_fit, free
from fgpu_scheduler.core.placer import Placer
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.request_counts import count_requests
from fgpu_scheduler.core.scores.cutting_stock import residual_values
from fgpu_scheduler.core.scores.fragments import Fragmentation
from fgpu_scheduler.core.scores.workload import ClusterTotals, TypicalRequest, Workload, workload_of
from fgpu_scheduler.core.scores.worth import ScarceNodes, prices, scarce_nodes, score_for, worth


def goes_to(lab: World, fgpu: str, score: Score, **asked: int | str) -> list[str] | None:
    """Return the devices that a new request gets now, or None."""
    return placing.goes_to(lab, request("new", fgpu, **asked), score)  # type: ignore[arg-type]


def asks(**counts: int) -> Workload:
    """Return a workload: ``asks(f470=3, f1000=1)``, each with one core and 1 GiB."""
    return Workload.counted((TypicalRequest(int(name[1:]), 1000, 1024), n) for name, n in counts.items())


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


@pytest.mark.parametrize(("cpu", "node"), [(8, "n1"), (9, "n5")])
def test_request_for_cpu_alone_leaves_a_scarce_node_large_enough(cpu: int, node: str) -> None:
    """n1 has 40 cores left, and a request for all of its GPUs needs 32; n5 has 64."""
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
    assert [where and where.node_id for where in went[:8]] == ["n2", "n2", "n3", "n3", "n4", "n4", "n1", "n1"]
    assert went[8] is None


def test_score_is_best_fit_on_one_node_and_with_few_requests() -> None:
    def made(lab: World, asked: list[Request]) -> Score:
        lab = replace(lab, request_counts=count_requests(asked))
        return score_for(lab, "default", ClusterTotals.of(lab.nodes))

    asked = [request("u", "1")] * 60
    assert made(two_models(), asked) is not best_fit
    assert made(two_models(), asked) is made(two_models(), asked), "made once for all passes"
    assert made(world(devices=8), asked) is best_fit
    assert made(two_models(), asked[:49]) is best_fit
    assert made(two_models(), [replace(one, resource_group="other") for one in asked]) is best_fit
    assert made(two_models(), [replace(one, fgpu_milli=0) for one in asked]) is best_fit


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
