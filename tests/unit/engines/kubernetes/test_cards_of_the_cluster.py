"""Nodes on which the cluster chooses the card: what is left there, and which settings go with it."""

from __future__ import annotations

from typing import Any

import pytest
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpu_scheduler.testing import World, world
from fgpuspawner.engines.kubernetes.cards import card_for, known_on
from fgpuspawner.engines.kubernetes.dialects import Beside, Cce, Dialect, Kai, Mig
from fgpuspawner.engines.kubernetes.inventory import Owner, machine_of, taken
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.settings import FGPU

KAI, CCE, MIG = Kai("lab"), Cce(), Mig()
SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
NODES: dict[Dialect, dict[str, Any]] = {
    KAI: {"labels": {"nvidia.com/gpu.count": "3", "nvidia.com/gpu.memory": "16160"}},
    CCE: {"allocatable": {"volcano.sh/gpu-mem.128Mi": "378", "volcano.sh/gpu-core.percentage": "300"}},
    MIG: {
        "allocatable": {SMALL: "2", LARGE: "1"},
        "labels": {f"{SMALL}.memory": "9856", f"{LARGE}.memory": "40320"},
    },
}


def pod(
    *, annotations: dict[str, str] | None = None, group: str | None = None, **limits: str
) -> dict[str, Any]:
    return {
        "metadata": {
            "name": "theirs",
            "annotations": annotations or {},
            "labels": {"runai-gpu-group": group} if group else {},
        },
        "spec": {"nodeName": "gpu1", "containers": [{"resources": {"limits": limits}}]},
    }


def left(dialect: Dialect, *others: dict[str, Any], held: dict[str, str | None] | None = None) -> list[str]:
    """Return what is offered of the node's three devices beside these pods of others."""
    said = NODES[dialect]
    node = {
        "metadata": {"name": "gpu1", "labels": said.get("labels", {})},
        "status": {
            "allocatable": said.get("allocatable", {}),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    found = [one for other in others if (one := taken(other, dialect, Owner("lab", "jhub"))) is not None]
    machine = machine_of(node, found, dialect, Beside(), held)
    assert machine is not None
    assert machine.devices is not None
    return [device.uuid.removeprefix("gpu1/") for device in machine.devices]


SHARE = {"gpu-memory": "4000"}


def test_pods_of_others_that_share_one_gpu_take_one_and_those_that_do_not_one_each() -> None:
    assert left(KAI) == ["gpu-0", "gpu-1", "gpu-2"]
    together = [pod(annotations=SHARE, group="a"), pod(annotations={"gpu-fraction": "0.5"}, group="a")]
    assert left(KAI, *together) == ["gpu-0", "gpu-1"]
    assert left(KAI, *together, pod(annotations=SHARE, group="b")) == ["gpu-0"]
    assert left(KAI, *together, pod(**{"nvidia.com/gpu": "2"})) == []


def test_one_of_which_it_is_not_said_yet_may_have_any_gpu_and_takes_one() -> None:
    assert left(KAI, pod(annotations=SHARE), pod(annotations=SHARE)) == ["gpu-0"]


def test_the_pod_with_which_kai_reserves_a_gpu_takes_nothing_of_its_own() -> None:
    assert left(KAI, pod(group="a", **{"nvidia.com/gpu": "1"})) == ["gpu-0", "gpu-1", "gpu-2"]


def test_what_sessions_hold_stays_offered_while_another_gpu_is_left_for_the_pod_of_somebody_else() -> None:
    held: dict[str, str | None] = {"gpu1/gpu-2": "ours", "gpu1/gpu-1": None}
    assert left(KAI, pod(annotations=SHARE, group="a"), held=held) == ["gpu-1", "gpu-2"]
    # It is on the very GPU of one of our sessions.
    assert left(KAI, pod(annotations=SHARE, group="ours"), held=held) == ["gpu-0", "gpu-1"]


def test_where_it_is_never_said_each_pod_of_others_takes_a_gpu() -> None:
    assert left(CCE, pod(**{"volcano.sh/gpu-mem.128Mi": "8"})) == ["gpu-0", "gpu-1"]
    assert left(CCE, pod(**{"volcano.sh/gpu-mem.128Mi": "8"}), pod(cpu="1")) == ["gpu-0", "gpu-1"]


def test_an_instance_that_somebody_has_is_one_less_of_its_profile() -> None:
    assert left(MIG, pod(**{SMALL: "1"})) == ["mig-1g.10gb-0", "mig-3g.40gb-0"]
    assert left(MIG, pod(**{LARGE: "1"})) == ["mig-1g.10gb-0", "mig-1g.10gb-1"]
    assert left(MIG, pod(**{SMALL: "1"}), held={"gpu1/mig-1g.10gb-1": None}) == [
        "mig-1g.10gb-1",
        "mig-3g.40gb-0",
    ]


# --- Which card is ours to name ---


def lab() -> World:
    return world(devices=2).running("a", "0.5", on="GPU-n1-0").running("b", "0.5", on="GPU-n1-1")


def test_a_session_is_where_those_are_who_share_its_gpu_else_where_nobody_is() -> None:
    found = lab().pending("c", "0.5")
    known, cards = known_on(found, "n1", ()), ["GPU-n1-0", "GPU-n1-1"]
    new = lab().running("c", "0.5").of("c")
    said = {found.of("a").id: "x", found.of("b").id: "y"}
    assert card_for("y", new, cards, known, said) == "GPU-n1-1"
    assert card_for("z", new, cards, known, said) is None
    assert card_for("z", new, cards, known[:1], said) == "GPU-n1-1"


# --- Settings ---


def check(dialect: str, *, queue: str = "", **settings: Any) -> None:
    config = Config({"KubernetesFGPUSpawner": {"dialect": dialect, "kai_queue": queue}})
    KubernetesFGPUSpawner.check_settings(config, FGPU(**settings))


def test_kai_needs_its_queue() -> None:
    with pytest.raises(BadSettings, match=r"kai_queue is empty; .* name the queue of sessions"):
        check("kai", isolation="none")
    check("kai", queue="lab", isolation="none")


@pytest.mark.parametrize(
    ("dialect", "holder"), [("kai", "KAI from 0.17"), ("cce", "xGPU"), ("mig", "hardware")]
)
def test_libfgpu_is_refused_where_it_could_not_be_told_the_gpu(dialect: str, holder: str) -> None:
    with pytest.raises(BadSettings, match=rf'use "none": {holder} holds sessions'):
        check(dialect, queue="lab", isolation="auto")


def test_instances_are_given_whole_so_nobody_may_choose_a_part_of_one() -> None:
    with pytest.raises(BadSettings, match=r"use c.FGPU.fgpu_per_gpu = 1 and c.FGPU.fgpu_step = 1"):
        check("mig", isolation="none")
    check("mig", isolation="none", fgpu_per_gpu=1, fgpu_step="1")
