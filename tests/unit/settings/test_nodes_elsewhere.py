from __future__ import annotations

from typing import Any

import pytest

from fgpu_scheduler import BadSettings, FoundDevice, NodeState
from fgpuspawner.engines.docker.address import Address, Tunnel, addresses
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import MachineFacts, address_of, as_far_as_known

TLS = {"ca": "a", "cert": "b", "key": "c"}
FOUND = FoundDevice("GPU-1f", 0, "NVIDIA A100", 40960)


def settings(**more: Any) -> FGPU:
    away = {"name": "away", "engine": "ssh://lab", **more}
    return FGPU(nodes=[{"name": "here", "gpus": {"simulated": 1}}, away], hub_address="10.0.0.1")


def test_nodes_of_one_engine_share_it_and_say_the_same_of_it() -> None:
    remote = {"engine": "tcp://10.0.0.2:2376", "tls": TLS, "gpus": {"simulated": 1}}
    found = addresses([{"name": "here"}, {"name": "a", **remote}, {"name": "b", **remote}, {"name": "too"}])
    assert found == (
        Address("", ("here", "too")),
        Address("tcp://10.0.0.2:2376", ("a", "b"), TLS, "10.0.0.2"),
    )
    assert [engine.is_elsewhere for engine in found] == [False, True]
    with pytest.raises(
        BadSettings, match="'a' and 'b' are on one engine; give both the same tls and address"
    ):
        addresses([{"name": "a", **remote}, {"name": "b", **remote, "address": "10.0.0.3"}])


@pytest.mark.parametrize(
    ("engine", "host"),
    [
        ("ssh://user@GPU1", "GPU1"),
        ("ssh://GPU1:2222", "GPU1"),
        ("tcp://lab.example:2376", "lab.example"),
        ("ssh://u:p@ss@10.0.0.2/", "10.0.0.2"),
        ("ssh://u@[fd00::2]:22", "fd00::2"),
    ],
)
def test_a_machine_is_asked_for_by_the_name_that_is_configured(engine: str, host: str) -> None:
    assert address_of({"engine": engine}) == host
    if engine.startswith("ssh"):
        # ssh's configuration tells large letters from small ones in its aliases.
        assert Tunnel(engine)._destination.rpartition("@")[2] == host


def test_this_machines_own_engine_is_needed_only_where_a_node_is_on_it() -> None:
    (only,) = addresses([{"name": "a", "engine": "unix:///run/other.sock"}])
    assert (only.url, only.is_elsewhere, only.has_gpus_to_find) == ("unix:///run/other.sock", False, True)


def test_a_machine_is_what_it_says_but_for_what_is_declared() -> None:
    machine = MachineFacts(64_000, 262_144, (FOUND,))
    _, away = sorted(settings().discover_nodes({"away": machine}), key=lambda n: n.id, reverse=True)
    assert (away.id, away.cpu_milli, away.memory_mib, away.state) == (
        "away",
        64_000,
        262_144,
        NodeState.READY,
    )
    assert [(d.uuid, d.memory_mib, d.simulated) for d in away.devices] == [("GPU-1f", 40960 - 512, False)]
    declared = settings(cpu=8, memory_mib=1024, gpus=[{"uuid": "GPU-2", "memory_mib": 8192}])
    away = next(n for n in declared.discover_nodes({"away": machine}) if n.id == "away")
    assert (away.cpu_milli, away.memory_mib, away.devices[0].uuid) == (8000, 1024, "GPU-2")


@pytest.mark.parametrize(
    ("given", "found", "left_mib"),
    [
        ({}, FOUND, 40960 - 512),
        ({}, FoundDevice("GPU-1f", 0, "Small", 8192), 8192 - 256),
        ({"gpu_reserve_mib": 1024}, FOUND, 40960 - 1024),
        ({"gpu_reserve_mib": 0}, FOUND, 40960),
        ({"gpu_reserve_mib": 10**6}, FOUND, 128),
        ({"max_shares_per_gpu": 1}, FOUND, 40960),
        ({}, FoundDevice("MIG-1f", 0, "NVIDIA A100 MIG 1g.5gb", 4864), 4864),
        ({"finds_nodes": True}, FOUND, 40960),
        ({"gpus": [{"uuid": "GPU-1f", "memory_mib": 40960}]}, FOUND, 40960),
    ],
)
def test_reserve_of_a_real_gpu_is_given_to_no_session(
    given: dict[str, Any], found: FoundDevice, left_mib: int
) -> None:
    own = {k: v for k, v in given.items() if k != "gpus"}
    spec = {"name": "away"} | {k: v for k, v in given.items() if k == "gpus"}
    node = FGPU(nodes=[spec], **own).node_of("away", MachineFacts(64_000, 262_144, (found,)))
    assert [d.memory_mib for d in node.devices] == [left_mib]


def test_a_machine_that_does_not_answer_is_lost_and_not_without_gpus_where_they_are_declared() -> None:
    away = next(n for n in settings().discover_nodes({"away": None}) if n.id == "away")
    assert (away.state, away.devices, away.cpu_milli) == (NodeState.LOST, (), 0)
    declared = settings(cpu=8, gpus=[{"uuid": "GPU-2", "memory_mib": 8192}])
    away = next(n for n in declared.discover_nodes({"away": None}) if n.id == "away")
    assert (away.state, len(away.devices), away.cpu_milli) == (NodeState.LOST, 1, 8000)


def test_a_driver_that_fails_on_a_machine_whose_gpus_are_known_does_not_stop_the_hub() -> None:
    sick = {"away": MachineFacts(1000, 1024, None, "Driver/library version mismatch")}
    specs = settings().nodes
    assert as_far_as_known(sick, specs, ["away"]) == {"away": None}, "taken as it was last"
    assert as_far_as_known(sick, specs, []) == sick, "never known: the Hub says so and ends"
    assert as_far_as_known(sick, settings(gpus={"simulated": 1}).nodes, ["away"]) == sick, "not asked"


def test_gpus_that_are_not_known_stop_the_hub_and_are_never_taken_for_none() -> None:
    unknown = MachineFacts(1000, 1024, None, "the engine has no NVIDIA runtime and no CDI devices")
    with pytest.raises(
        BadSettings, match=r"which GPUs node 'away' has is not known \(the engine has no NVIDIA"
    ):
        settings().discover_nodes({"away": unknown})
    with pytest.raises(
        BadSettings, match="node 'away' names GPU GPU-9, which NVML does not report; it has GPU-1f"
    ):
        settings(gpus=["GPU-9"]).discover_nodes({"away": MachineFacts(1000, 1024, (FOUND,))})
    found = settings(gpus=[]).discover_nodes({"away": MachineFacts(1000, 1024, (FOUND,))})
    assert next(n for n in found if n.id == "away").devices == ()
