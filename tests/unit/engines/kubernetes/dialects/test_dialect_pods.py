"""What each dialect writes into a session's pod; the schemas of Kubernetes 1.25 to 1.37 take it strictly."""

from __future__ import annotations

import copy
from typing import Any

import kubernetes_validate
import pytest

from dialectworlds import ALL, BY_NAME, NODE, POD, gpu, instance, patch_of, share
from fgpuspawner.engines.kubernetes.dialects.base import Dialect, PodPatch
from fgpuspawner.engines.kubernetes.dialects.lease import Lease

VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
CLAIM_BY_NAME = "1.31"
"""From here on a pod names its ResourceClaim as we do."""
RESOURCE_V1 = "1.34"
"""From here on ResourceClaim is in resource.k8s.io/v1, with capacity."""
NOT_VISIBLE = {"NVIDIA_VISIBLE_DEVICES": None}
NOT_NAMED = {"CUDA_VISIBLE_DEVICES": None, **NOT_VISIBLE}
REQUEST = {
    "deviceClassName": "gpu.nvidia.com",
    "allocationMode": "ExactCount",
    "count": 1,
    "selectors": [{"cel": {"expression": f'device.attributes["gpu.nvidia.com"].uuid == "{gpu().uuid}"'}}],
    "capacity": {"requests": {"memory": "5120Mi"}},
}
CLAIM = {
    "apiVersion": "resource.k8s.io/v1",
    "kind": "ResourceClaim",
    "metadata": {"name": "fgpu-lab-7-1"},
    "spec": {"devices": {"requests": [{"name": "gpu-0", "exactly": REQUEST}]}},
}
WRITTEN = {
    "lease": PodPatch(
        environment={"NVIDIA_VISIBLE_DEVICES": gpu().uuid}, spec={"runtimeClassName": "nvidia"}
    ),
    "dra": PodPatch(environment={"NVIDIA_VISIBLE_DEVICES": "void"}, claims=(CLAIM,)),
    "hami": PodPatch(
        annotations={"nvidia.com/use-gpuuuid": gpu().uuid, "nvidia.com/vgpu-mode": "hami-core"},
        limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "5120", "nvidia.com/gpucores": "33"},
        environment={**NOT_VISIBLE, "CUDA_DISABLE_CONTROL": None},
        spec={"schedulerName": "hami-scheduler"},
    ),
    "cce": PodPatch(
        limits={"volcano.sh/gpu-mem.128Mi": "40", "volcano.sh/gpu-core.percentage": "30"},
        environment=NOT_NAMED,
        spec={"schedulerName": "volcano"},
    ),
    "mig": PodPatch(limits={"nvidia.com/mig-1g.10gb": "1"}, environment=NOT_NAMED),
}
"""For a third of a GPU's compute and 5 GiB, or one MIG instance."""


def patch(dialect: Dialect) -> PodPatch:
    device = instance() if dialect.name == "mig" else gpu()
    memory_mib = device.memory_mib if dialect.name == "mig" else 5120
    return patch_of(dialect, share(device, memory_mib, 33), of=[device])


def since(manifest: dict[str, Any]) -> str:
    """Return the first version that this can be sent to."""
    if manifest["kind"] == "ResourceClaim":
        return RESOURCE_V1
    return CLAIM_BY_NAME if "resourceClaims" in manifest["spec"] else VERSIONS[0]


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_dialect_writes_what_its_software_documents(dialect: Dialect) -> None:
    assert patch(dialect) == WRITTEN[dialect.name]


def test_lease_pod_asks_for_one_gpu_of_its_node() -> None:
    pod = Lease("lab", priority_class="high").lease_pod(name="n", node=NODE, image="registry.lab/libfgpu:1")
    (container,) = pod["spec"]["containers"]
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "1"
    (term,) = pod["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"][
        "nodeSelectorTerms"
    ]
    assert term == {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [NODE]}]}
    assert (pod["spec"]["priorityClassName"], pod["spec"]["runtimeClassName"]) == ("high", "nvidia")
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }


@pytest.mark.parametrize("version", VERSIONS)
def test_objects_are_valid_in_every_kubernetes_version(version: str) -> None:
    made = [Lease("lab").lease_pod(name="n", node=NODE, image="registry.lab/libfgpu:1")]
    for dialect in ALL:
        own = patch(dialect)
        made += [own.applied(POD), *(copy.deepcopy(dict(claim)) for claim in own.claims)]
    for manifest in made:
        if VERSIONS.index(since(manifest)) <= VERSIONS.index(version):
            assert kubernetes_validate.validate(manifest, version, strict=True) == version


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_gpu_limits_equal_requests_and_other_values_stay(dialect: Dialect) -> None:
    pod = patch(dialect).applied(POD)
    resources = pod["spec"]["containers"][0]["resources"]
    assert resources["limits"] == resources["requests"]
    assert resources["limits"].items() >= {"cpu": "2", "memory": "4Gi"}.items()
    assert pod["metadata"]["labels"].items() >= POD["metadata"]["labels"].items()
    assert {"name": "LANG", "value": "C.UTF-8"} in pod["spec"]["containers"][0]["env"]


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_visible_gpus_are_set_by_the_dialect_or_left_to_the_device_plugin(dialect: Dialect) -> None:
    device = instance()
    pod = copy.deepcopy(dict(POD))
    pod["spec"]["containers"][0]["env"].append({"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"})
    applied = patch_of(dialect, share(device, device.memory_mib), of=[device]).applied(pod)
    variables = [
        v["value"] for v in applied["spec"]["containers"][0]["env"] if v["name"] == "NVIDIA_VISIBLE_DEVICES"
    ]
    assert variables == {"lease": [device.uuid], "dra": ["void"]}.get(dialect.name, [])


@pytest.mark.parametrize("value", ["true", ""])
def test_the_variable_that_disables_hami_core_is_removed(value: str) -> None:
    device = gpu()
    pod = copy.deepcopy(dict(POD))
    pod["spec"]["containers"][0]["env"].append({"name": "CUDA_DISABLE_CONTROL", "value": value})
    applied = patch_of(BY_NAME["hami"], share(device, 5120), of=[device]).applied(pod)
    assert [v["name"] for v in applied["spec"]["containers"][0]["env"]] == ["LANG"]


def test_libfgpu_is_used_where_nothing_else_enforces_memory() -> None:
    assert {dialect.name for dialect in ALL if dialect.libfgpu_holds} == {"lease", "dra"}
