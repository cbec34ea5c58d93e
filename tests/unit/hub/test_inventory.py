"""Which nodes there are on other machines: what comes, changes and goes is taken over; nothing is guessed."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from fgpu_scheduler import FoundDevice, Node, NodeState, StoreUnavailable
from fgpuspawner.concurrency.background import Background
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub import inventory as module
from fgpuspawner.hub.inventory import Inventory, described, nodes_at_start
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import MachineFacts

LONG = ".".join(["a" * 63] * 3 + ["b" * 61])
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def machine(*uuids: str, **more: Any) -> MachineFacts:
    """Return a machine of 8 CPU and 8 GiB with these GPUs."""
    found = tuple(FoundDevice(uuid, index, "Test GPU", 8192) for index, uuid in enumerate(uuids))
    return replace(MachineFacts(8000, 8192, found), **more)


class Cluster:
    """A cluster with nodes that a test changes; it records calls of isolation and queue."""

    def __init__(self, settings: FGPU, **machines: MachineFacts | None) -> None:
        self.settings = settings.checked()
        self.machines: dict[str, MachineFacts | None] = dict(machines)
        self.errors: list[Exception] = []
        self.not_taken: dict[str, Exception] = {}
        self.taken: list[str] = []
        self.forgotten: set[str] = set()
        self.queued: tuple[Node, ...] = ()
        self.changed = asyncio.Event()
        start = nodes_at_start(self.settings, self.survey, ())
        self.inventory = Inventory(self.settings, self.survey, cast(Any, self), cast(Any, self), nodes=start)

    def survey(self) -> Mapping[str, MachineFacts | None]:
        if self.errors:
            raise self.errors.pop()
        return dict(self.machines)

    def add_node(self, node: Node) -> None:
        if node.id in self.not_taken:
            raise self.not_taken[node.id]
        self.taken.append(node.id)

    def forget_nodes(self, node_ids: Collection[str]) -> None:
        self.forgotten |= set(node_ids)

    async def change_nodes(self, nodes: Sequence[Node]) -> None:
        self.queued = tuple(nodes)
        self.changed.set()

    @property
    def seen(self) -> dict[str, list[str]]:
        return {node.id: [device.uuid for device in node.devices] for node in self.queued}


def finding(tmp_path: Path, **more: Any) -> FGPU:
    return FGPU(data_dir=str(tmp_path), finds_nodes=True, **more)


def test_engine_finds_the_nodes_if_no_nodes_are_set(
    tmp_path: Path,
) -> None:
    found = {"gpu-1.lab": machine("GPU-1", closed=True), LONG: machine("GPU-2", group="default")}
    nodes = nodes_at_start(finding(tmp_path), lambda: found, ())
    assert [(n.id, n.closed, n.cpu_milli) for n in nodes] == [(LONG, False, 8000), ("gpu-1.lab", True, 8000)]
    assert nodes_at_start(finding(tmp_path), dict, ()) == ()
    assert finding(tmp_path).discover_nodes() == ()
    assert finding(tmp_path).is_elsewhere("gpu-1.lab")


def test_settings_override_parts_of_found_nodes_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = [
        {"name": "n1.lab", "group": "class", "cpu": 2, "memory_mib": 1024, "gpus": ["GPU-1"]},
        {"name": "not-there"},
    ]
    settings = finding(tmp_path, nodes=own, groups={"default": {}, "class": {}}).checked()
    found = {"n1.lab": machine("GPU-0", "GPU-1", group="default")}
    (node,) = nodes_at_start(settings, lambda: found, ())
    assert (node.resource_group, node.cpu_milli, node.memory_mib) == ("class", 2000, 1024)
    assert [d.uuid for d in node.devices] == ["GPU-1"]
    assert [r.getMessage() for r in caplog.records] == ["c.FGPU.nodes: there is no node not-there now"]


def test_label_names_the_group_and_an_unknown_group_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = finding(tmp_path, groups={"default": {}, "class": {}})
    found = {
        "n1": machine("GPU-1", group="class"),
        "n2": machine("GPU-2"),
        "n3": machine(group="other"),
        "..": machine(),
    }
    nodes = nodes_at_start(settings, lambda: found, ())
    assert {n.id: n.resource_group for n in nodes} == {"n1": "class", "n2": "default"}
    said = [r.getMessage() for r in caplog.records]
    assert any("'n3' is in group 'other'" in line for line in said)
    assert any("node '..': use a DNS name" in line for line in said)


def test_nodes_of_a_silent_cluster_are_remembered_and_lost(
    tmp_path: Path,
) -> None:
    def silent() -> Mapping[str, MachineFacts | None]:
        raise EngineSilent("the API does not answer")

    stored = nodes_at_start(finding(tmp_path), lambda: {"n1": machine("GPU-1")}, ())
    (node,) = nodes_at_start(finding(tmp_path), silent, stored)
    assert node == replace(stored[0], state=NodeState.LOST)
    # What a sick node has is known from before; one that never said it is left out.
    sick = {"n1": machine(devices=None), "n2": machine(devices=None)}
    (node,) = nodes_at_start(finding(tmp_path), lambda: sick, stored)
    assert (node.id, [d.uuid for d in node.devices]) == ("n1", ["GPU-1"])


def test_gpu_shown_by_two_nodes_stays_with_its_node(tmp_path: Path) -> None:
    settings = finding(tmp_path)
    (had,), _ = described(settings, {"n2": machine("GPU-1")}, {})
    both = {"n1": machine("GPU-1"), "n2": machine("GPU-1")}
    found, troubles = described(settings, both, {"n2": had})
    assert [node.id for node in found] == ["n2"]
    assert str(troubles["n1"]) == "GPU GPU-1 of node 'n1' is on node 'n2' too"
    moved, none = described(settings, {"n1": machine("GPU-1"), "n2": machine()}, {"n2": had})
    assert ({node.id: len(node.devices) for node in moved}, none) == ({"n1": 1, "n2": 0}, {})


async def test_changed_nodes_are_applied_and_only_other_gpus_choose_isolation_again(
    tmp_path: Path,
) -> None:
    cluster = Cluster(finding(tmp_path), n1=machine("GPU-1"), n2=machine("GPU-2"))
    assert await cluster.inventory.look()
    assert (cluster.seen, cluster.taken) == ({"n1": ["GPU-1"], "n2": ["GPU-2"]}, [])
    cluster.machines = {"n1": machine("GPU-1", cpu_milli=1000), "n3": machine("GPU-3", "GPU-2")}
    assert await cluster.inventory.look()
    assert cluster.seen == {"n1": ["GPU-1"], "n3": ["GPU-3", "GPU-2"]}
    assert (cluster.taken, cluster.forgotten) == (["n3"], {"n2"})
    assert cluster.queued[0].cpu_milli == 1000
    assert cluster.inventory.nodes == cluster.queued


async def test_silent_and_unusable_machines_stay_unchanged_and_are_asked_again_soon(
    tmp_path: Path,
) -> None:
    cluster = Cluster(finding(tmp_path), n1=machine("GPU-1"), n2=machine("GPU-2"))
    await cluster.inventory.look()
    cluster.machines = {"n1": None, "n2": machine(devices=None), "n3": machine("GPU-3")}
    cluster.not_taken = {"n3": FULL}
    assert not await cluster.inventory.look()
    assert cluster.seen == {"n1": ["GPU-1"], "n2": ["GPU-2"]}
    cluster.machines["n1"] = machine("GPU-1", "GPU-4")
    cluster.not_taken = {}
    assert not await cluster.inventory.look()
    assert cluster.seen == {"n1": ["GPU-1", "GPU-4"], "n2": ["GPU-2"], "n3": ["GPU-3"]}


async def test_devices_that_come_later_are_no_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    words = "the lease pod lease-0 hasn't said which GPU it has"
    coming = replace(machine(devices=None), found=True, coming=True, trouble=words)
    cluster = Cluster(finding(tmp_path), n1=coming)
    assert not await cluster.inventory.look()
    said = [(r.levelno, r.getMessage()) for r in caplog.records]
    assert {level for level, _ in said} == {logging.INFO}
    assert all(line.endswith(f"which GPUs node 'n1' has is not known yet: {words}") for _, line in said)
    cluster.machines = {"n1": replace(coming, coming=False, trouble="the GPU does not work")}
    assert not await cluster.inventory.look()
    last = caplog.records[-1]
    assert (last.levelno, last.getMessage()) == (
        logging.ERROR,
        "Node n1 cannot be used as it is now: which GPUs node 'n1' has is not known: the GPU does not work",
    )


async def test_silent_cluster_loses_no_nodes(tmp_path: Path) -> None:
    cluster = Cluster(finding(tmp_path), n1=machine("GPU-1"))
    before = cluster.inventory.nodes
    cluster.errors = [EngineSilent("the API does not answer")]
    with pytest.raises(EngineSilent):
        await cluster.inventory.look()
    assert (cluster.inventory.nodes, cluster.queued) == (before, ())


async def test_configured_nodes_change_and_this_machines_node_stays(tmp_path: Path) -> None:
    own = {"name": "here", "gpus": {"simulated": 1}}
    away = {"name": "away", "engine": "ssh://fgpu@elsewhere"}
    settings = FGPU(data_dir=str(tmp_path), hub_address="10.0.0.1", nodes=[own, away])
    cluster = Cluster(settings, away=None)
    assert {n.id: n.state for n in cluster.inventory.nodes} == {
        "away": NodeState.LOST,
        "here": NodeState.READY,
    }
    cluster.machines = {"away": machine("GPU-1", "GPU-2")}
    assert await cluster.inventory.look()
    cluster.machines = {"away": machine("GPU-2")}
    assert await cluster.inventory.look()
    assert cluster.seen["away"] == ["GPU-2"]
    assert len(cluster.seen["here"]) == 1


@pytest.mark.parametrize(
    "error", [FULL, StoreUnavailable("the database does not answer"), ValueError("no JSON")]
)
async def test_failed_survey_is_repeated_and_logged_once(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "LOOK_SOON_S", 0.001)
    monkeypatch.setattr(module, "TOGETHER_S", 0.0)
    caplog.set_level(logging.INFO, "fgpu")
    cluster = Cluster(finding(tmp_path))
    cluster.errors = [error, error]
    cluster.machines = {"n1": machine("GPU-1")}
    background = Background(module.log)
    cluster.inventory.begin(background)
    async with asyncio.timeout(60):
        await cluster.changed.wait()
    await background.close()
    why = str(error) if isinstance(error, StoreUnavailable) else repr(error)
    said = [r.getMessage() for r in caplog.records if r.name == "fgpu"]
    assert said[0] == f"Which nodes there are cannot be told now, and all stays as it was: {why}"
    assert said[1:] == ["Node n1: 1 GPUs, 8 CPU, 8192 MiB"]


async def test_engine_can_request_a_survey_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SOON_S", 3600.0)
    monkeypatch.setattr(module, "TOGETHER_S", 0.01)
    cluster = Cluster(finding(tmp_path))
    background = Background(module.log)
    cluster.inventory.begin(background)
    await asyncio.sleep(0)
    for number in (1, 2):
        cluster.machines = {f"n{number}": machine("GPU-1")}
        cluster.changed.clear()
        cluster.inventory.changed()
        async with asyncio.timeout(60):
            await cluster.changed.wait()
        assert list(cluster.seen) == [f"n{number}"]
    await background.close()
