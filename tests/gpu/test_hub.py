"""The whole product: two tenants of a quarter and three quarters of a GPU, and a third who waits for one of them.

The tests follow each other, on one Hub.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
from conftest import end_children
from hubworld import PROGRAM, HubWorld, Kernel
from realgpu import Gpu

SECONDS = 6
SHARES = {"ann": 25, "ben": 75}
BEGIN_S = 1.5
"""All begin to train before what is measured begins."""
ALONE_AT_LEAST, SHARE_WITHIN = 0.9, 5.0
"""Of the rate of the whole GPU: with all else lent; and off the share, in points, beside a neighbour who trains too."""
METER_WITHIN_MIB, METER_WITHIN_POINTS = 64, 20
Record = Callable[[str, object], None]


@dataclass
class Product:
    """The Hub, and what the tests so far have found out."""

    hub: HubWorld
    whole: float
    kernels: dict[str, Kernel] = field(default_factory=dict)
    percent: dict[str, float] = field(default_factory=dict)
    held_mib: dict[str, float] = field(default_factory=dict)
    meters: list[dict[str, dict[str, float]]] = field(default_factory=list)

    def train(self, *users: str) -> dict[str, float]:
        """Have these train at the same time; return their percent of the rate of the whole GPU."""
        code = f"print(train({time.time() + BEGIN_S}, {SECONDS}))"
        with ThreadPoolExecutor() as threads:
            rates = threads.map(lambda user: float(self.kernels[user].run(code)), users)
            return {user: 100 * rate / self.whole for user, rate in zip(users, rates, strict=True)}


@pytest.fixture(scope="module")
def product(gpu: Gpu, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Product]:
    """A Hub with two sessions, and the rate of the whole GPU without libfgpu."""
    hub = None
    try:
        hub = HubWorld(tmp_path_factory.mktemp("hub"), gpu)
        code = f"{PROGRAM}\nprint(train({time.time()} + {BEGIN_S}, {SECONDS}))"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={k: v for k, v in hub.machine_environment.items() if k != "LD_PRELOAD"},
            capture_output=True,
            text=True,
            timeout=60,
        )
        if done.returncode:
            raise RuntimeError(f"nothing can be trained on this GPU: {done.stderr[-1000:]}")
        found = Product(hub, float(done.stdout))
        for user, share in SHARES.items():
            hub.asks_for(user, str(share / 50))
        for user in SHARES:
            hub.wait_for(user)
        with ThreadPoolExecutor() as threads:
            found.kernels = dict(zip(SHARES, threads.map(hub.start_program, SHARES), strict=True))
        yield found
    finally:
        if hub is not None:
            hub.close()
        end_children()


def test_each_session_sees_its_slice(product: Product, record_property: Record) -> None:
    for user in SHARES:
        slice_mib = product.hub.session(user)["gpu_memory_mib"]
        seen = float(product.kernels[user].run("print(total_mib())"))
        record_property(f"{user}_mib", [slice_mib, seen])
        assert seen == slice_mib


def test_more_memory_than_the_slice_is_an_error_of_the_program_and_it_goes_on(
    product: Product, record_property: Record
) -> None:
    slice_mib = product.hub.session("ann")["gpu_memory_mib"]
    said = product.kernels["ann"].run(
        f"print(take({slice_mib + 1}), take({slice_mib // 4}) or 'taken', work() > 0)"
    )
    record_property("said", said.strip())
    error, then, works = said.split()
    assert error in ("OutOfMemoryError", "CUDA_ERROR_OUT_OF_MEMORY")
    assert (then, works) == ("taken", "True")


def test_alone_a_session_borrows_the_compute_of_its_idle_neighbour(
    product: Product, record_property: Record
) -> None:
    (found,) = product.train("ann").values()
    record_property("whole_steps_per_s", round(product.whole, 1))
    record_property("percent_of_the_whole_gpu", round(found, 1))
    assert found >= 100 * ALONE_AT_LEAST


def test_two_tenants_who_train_have_their_shares(product: Product, record_property: Record) -> None:
    with ThreadPoolExecutor() as threads:
        running = threads.submit(product.train, *SHARES)
        time.sleep(BEGIN_S)
        while not running.done():
            product.meters.append(product.hub.fgpu("GET", "meters?all=1")["meters"])
            time.sleep(1)
        product.percent = running.result()
    product.held_mib = product.hub.held_mib()
    record_property("percent_of_the_whole_gpu", {user: round(p, 1) for user, p in product.percent.items()})
    # A rehearsal's few CPUs are also the other tests'.
    within = SHARE_WITHIN * (2 if product.hub.gpu.simulated else 1)
    for user, share in SHARES.items():
        assert abs(product.percent[user] - share) <= within, f"{user}: {product.percent[user]:.1f} %"


def test_meters_say_what_the_driver_and_the_rates_say(product: Product, record_property: Record) -> None:
    if not product.meters:
        pytest.skip("the tenants have not trained")
    for user in SHARES:
        own = [meters[str(product.hub.session(user)["id"])] for meters in product.meters]
        said = [each["sm_percent"] for each in own if each["sm_percent"] is not None]
        # The first readings are of before: the driver's samples come late.
        percent = statistics.median(said) if said else None
        record_property(f"{user}_sm_percent", said)
        record_property(f"{user}_mib", [own[-1]["memory_used_mib"], round(product.held_mib.get(user, 0))])
        if user in product.held_mib:  # In a PID namespace of its own, NVML lists other numbers.
            assert abs(own[-1]["memory_used_mib"] - product.held_mib[user]) <= METER_WITHIN_MIB
        if percent is not None:
            assert abs(percent - product.percent[user]) <= METER_WITHIN_POINTS, f"{user}: {percent:.1f} %"


def test_a_third_waits_and_starts_after_an_end(product: Product, record_property: Record) -> None:
    hub = product.hub
    hub.asks_for("cat", "1")
    waiting = hub.until(lambda: hub.session("cat"), "cat's request is there")
    record_property("waits", [waiting["state"], waiting["position"], waiting.get("wait_text")])
    assert (waiting["state"], waiting["position"]) == ("PENDING", 1)
    hub.end_session("ben")
    record_property("seconds_from_the_end", round(hub.wait_for("cat"), 1))
    seen = float(hub.start_program("cat").run("print(total_mib())"))
    assert seen == hub.session("cat")["gpu_memory_mib"]


def test_the_receipt_says_what_was_measured(product: Product, record_property: Record) -> None:
    hub = product.hub
    receipts = hub.until(lambda: hub.fgpu("GET", "history?all=1")["receipts"], "ben's receipt is there")
    found = next(each for each in receipts if each["user"] == "ben")
    for name in (
        "run_s",
        "gpu_hours",
        "memory_peak_mib",
        "sm_p95_percent",
        "compute_received_percent",
        "samples",
    ):
        record_property(name, found[name])
    assert found["samples"] > 0
    held_s = found["ended_at_s"] - found["submitted_at_s"] - found["wait_s"]
    assert abs(found["gpu_hours"] - held_s * SHARES["ben"] / 100 / 3600) <= 0.001
    if product.percent and found["compute_received_percent"] is not None:
        trained = product.percent["ben"] * (SECONDS + BEGIN_S) / found["run_s"]
        record_property("trained_percent", round(trained, 1))
        assert abs(found["compute_received_percent"] - trained) <= METER_WITHIN_POINTS
    if "ben" in product.held_mib:
        assert abs(found["memory_peak_mib"] - product.held_mib["ben"]) <= METER_WITHIN_MIB
