"""Complete pods of every dialect, as files, that the schemas of Kubernetes 1.25 to 1.37 take strictly."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest

from dialectworlds import ALL, BY_NAME, NODE, POD, gpu, instance, patch_of, share
from fgpuspawner.engines.kubernetes.dialects.base import Dialect
from fgpuspawner.engines.kubernetes.dialects.lease import Lease

PODS = Path(__file__).parent / "pods"
VERSIONS = [f"1.{minor}" for minor in range(25, 38)]
CLAIM_BY_NAME = "1.31"
"""From here on a pod names its ResourceClaim as we do."""
RESOURCE_V1 = "1.34"
"""From here on ResourceClaim is in resource.k8s.io/v1, with capacity."""


def made(dialect: Dialect) -> list[dict[str, Any]]:
    """Return what is made for a session: a third of a GPU's compute and 5 GiB, or one MIG instance."""
    device = instance() if dialect.name == "mig" else gpu()
    memory_mib = device.memory_mib if dialect.name == "mig" else 5120
    patch = patch_of(dialect, share(device, memory_mib, 33), of=[device])
    return [*(copy.deepcopy(dict(claim)) for claim in patch.claims), patch.applied(POD)]


def golden(name: str) -> Any:
    return json.loads((PODS / f"{name}.json").read_text())


def since(manifest: dict[str, Any]) -> str:
    """Return the first version that this can be sent to."""
    if manifest["kind"] == "ResourceClaim":
        return RESOURCE_V1
    return CLAIM_BY_NAME if "resourceClaims" in manifest["spec"] else VERSIONS[0]


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_session_objects_equal_the_golden_file(dialect: Dialect) -> None:
    assert made(dialect) == golden(dialect.name)


def test_lease_pod_equals_the_golden_file() -> None:
    pod = Lease("lab").lease_pod(name="fgpu-lab-lease-gpu-1-0", node=NODE, image="registry.lab/libfgpu:1")
    assert [pod] == golden("lease_pod")


def test_lease_pod_has_the_configured_priority() -> None:
    pod = Lease("lab", priority_class="gpu-leases").lease_pod(name="n", node=NODE, image="i")
    assert pod["spec"]["priorityClassName"] == "gpu-leases"


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", sorted(path.stem for path in PODS.glob("*.json")))
def test_golden_pods_are_valid_in_every_kubernetes_version(name: str, version: str) -> None:
    minor = VERSIONS.index(version)
    valid = [m for m in golden(name) if VERSIONS.index(since(m)) <= minor]
    for manifest in valid:
        assert kubernetes_validate.validate(manifest, version, strict=True) == version
    assert valid or name == "dra"


def test_every_dialect_has_a_golden_file() -> None:
    assert {path.stem for path in PODS.glob("*.json")} == {dialect.name for dialect in ALL} | {"lease_pod"}


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_gpu_limits_equal_requests_and_other_values_stay(dialect: Dialect) -> None:
    pod = made(dialect)[-1]
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
