"""Nodes on which the cluster chooses the card: what is left there, and which settings go with it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.kubernetes.dialects.base import Dialect, GpuRecords
from fgpuspawner.engines.kubernetes.dialects.counted import Cce, Mig
from fgpuspawner.engines.kubernetes.inventory import PodOwner, machine_of, usage_of
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.settings import FGPU

CCE, MIG = Cce(), Mig()
SMALL, LARGE = "nvidia.com/mig-1g.10gb", "nvidia.com/mig-3g.40gb"
NODES: dict[Dialect, dict[str, Any]] = {
    CCE: {"allocatable": {"volcano.sh/gpu-mem.128Mi": "378", "volcano.sh/gpu-core.percentage": "300"}},
    MIG: {
        "allocatable": {SMALL: "2", LARGE: "1"},
        "labels": {f"{SMALL}.memory": "9856", f"{LARGE}.memory": "40320"},
    },
}


def pod(**limits: str) -> dict[str, Any]:
    return {
        "metadata": {"name": "theirs"},
        "spec": {"nodeName": "gpu1", "containers": [{"resources": {"limits": limits}}]},
    }


def left(dialect: Dialect, *others: dict[str, Any], held: Collection[str] = ()) -> list[str]:
    """Return what is offered of the node's three devices beside these pods of others."""
    said = NODES[dialect]
    node = {
        "metadata": {"name": "gpu1", "labels": said.get("labels", {})},
        "status": {
            "allocatable": said.get("allocatable", {}),
            "conditions": [{"type": "Ready", "status": "True"}],
        },
    }
    found = [
        one for other in others if (one := usage_of(other, dialect, PodOwner("lab", "jhub"))) is not None
    ]
    machine = machine_of(node, found, dialect, GpuRecords(), {}, held)
    assert machine is not None
    assert machine.devices is not None
    return [device.uuid.removeprefix("gpu1/") for device in machine.devices]


def test_each_other_pod_hides_one_unnamed_gpu() -> None:
    assert left(CCE, pod(**{"volcano.sh/gpu-mem.128Mi": "8"})) == ["gpu-0", "gpu-1"]
    assert left(CCE, pod(**{"volcano.sh/gpu-mem.128Mi": "8"}), pod(cpu="1")) == ["gpu-0", "gpu-1"]


def test_used_mig_instance_hides_one_of_its_profile() -> None:
    assert left(MIG, pod(**{SMALL: "1"})) == ["mig-1g.10gb-0", "mig-3g.40gb-0"]
    assert left(MIG, pod(**{LARGE: "1"})) == ["mig-1g.10gb-0", "mig-1g.10gb-1"]
    assert left(MIG, pod(**{SMALL: "1"}), held={"gpu1/mig-1g.10gb-1"}) == [
        "mig-1g.10gb-1",
        "mig-3g.40gb-0",
    ]


# --- Settings ---


def check(dialect: str, **settings: Any) -> None:
    config = Config({"KubernetesFGPUSpawner": {"dialect": dialect}})
    KubernetesFGPUSpawner.check_settings(config, FGPU(**settings))


@pytest.mark.parametrize(("dialect", "holder"), [("cce", "xGPU"), ("mig", "hardware")])
def test_libfgpu_is_refused_where_another_library_enforces(dialect: str, holder: str) -> None:
    with pytest.raises(BadSettings, match=rf'use "none": {holder} holds sessions'):
        check(dialect, isolation="auto")


def test_parts_of_mig_instances_are_refused() -> None:
    with pytest.raises(BadSettings, match=r"use c.FGPU.fgpu_per_gpu = 1 and c.FGPU.fgpu_step = 1"):
        check("mig", isolation="none")
    check("mig", isolation="none", fgpu_per_gpu=1, fgpu_step="1")
