"""Reading nodes' GPUs and pods' GPUs from what each cluster writes; what is not reported is unknown, not none."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from dialectworlds import ALL, BY_NAME, NODE, POD, allocated, gpu, patch_of, share, slice_of
from fgpu_scheduler import FoundDevice
from fgpuspawner.engines.kubernetes.dialects.base import AssignedGpu, Dialect, GpuRecords, GpuUnknown
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.dialects.lease import Lease, given_as, gpu_of

A, B = "GPU-00552014-5c87-89ac-b1a6-7b53aa24b0ec", "GPU-0fc3eda5-e98b-a25b-5b0d-cf5c855d1448"
V100 = "NVIDIA-Tesla V100-PCIE-32GB"


def node(
    *,
    annotations: dict[str, str] | None = None,
    labels: dict[str, str] | None = None,
    allocatable: dict[str, str] | None = None,
) -> dict[str, Any]:
    return {
        "metadata": {"name": NODE, "annotations": annotations, "labels": labels},
        "status": {"allocatable": {"cpu": "16", **(allocatable or {})}},
    }


def pod(*, annotations: dict[str, str] | None = None, limits: dict[str, str] | None = None) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(dict(POD))
    made["metadata"]["annotations"] = annotations or {}
    made["spec"]["containers"][0]["resources"]["limits"] = limits or {}
    return made


# --- HAMi ---


JSON = (
    f'[{{"id":"{A}","count":10,"devmem":32768,"devcore":100,"type":"{V100}","mode":"hami-core","health":true}},'
    f'{{"id":"{B}","index":1,"count":10,"devmem":65536,"devcore":100,"type":"{V100}","mode":"hami-core"}}]'
)


def test_hami_registers_healthy_gpus_that_it_does_not_divide_by_mig() -> None:
    gpus = [
        *json.loads(JSON),
        {"id": "GPU-mig", "devmem": 81559, "type": V100, "mode": "mig", "health": True},
    ]
    found = Hami().capacity(
        node(annotations={"hami.io/node-nvidia-register": json.dumps(gpus)}), GpuRecords()
    )
    assert found == [FoundDevice(A, 0, V100, 32768)], "the second GPU is not healthy"


def test_hami_notes_a_pods_gpus_also_those_of_mig_instances() -> None:
    noted = pod(
        annotations={"hami.io/vgpu-devices-allocated": f";{A}[0-1],NVIDIA,3000,0:{B},NVIDIA,5000,30:;"}
    )
    assert Hami().assigned(noted, GpuRecords()) == [AssignedGpu(A), AssignedGpu(B)]


# --- CCE ---


@pytest.mark.parametrize(
    ("units", "percent", "gpus", "mib"), [("252", "200", 2, 16128), ("5k", "800", 8, 80000)]
)
def test_cce_registers_equal_gpus_without_names(units: str, percent: str, gpus: int, mib: int) -> None:
    resources = {"volcano.sh/gpu-mem.128Mi": units, "volcano.sh/gpu-core.percentage": percent}
    found = BY_NAME["cce"].capacity(node(allocatable=resources), GpuRecords())
    assert found == [FoundDevice(f"{NODE}/gpu-{i}", i, "GPU", mib) for i in range(gpus)]


def test_each_container_of_a_pod_on_cce_has_its_own_gpu() -> None:
    several = pod(limits={"volcano.sh/gpu-mem.128Mi": "8", "volcano.sh/gpu-core.percentage": "5"})
    several["spec"]["containers"] += [
        {"name": "other", "resources": {"limits": {"volcano.sh/gpu-mem.128Mi": "16"}}},
        {"name": "none"},
    ]
    assert BY_NAME["cce"].assigned(several, GpuRecords()) == [AssignedGpu(), AssignedGpu()]


# --- MIG ---


def test_mig_instances_are_registered_by_profile() -> None:
    resources = {"nvidia.com/gpu": "0", "nvidia.com/mig-1g.10gb": "2", "nvidia.com/mig-3g.40gb": "1"}
    labels = {
        "nvidia.com/gpu.product": "NVIDIA-H100",
        "nvidia.com/mig-1g.10gb.memory": "9856",
        "nvidia.com/mig-3g.40gb.memory": "40448",
    }
    found = BY_NAME["mig"].capacity(node(allocatable=resources, labels=labels), GpuRecords())
    assert found == [
        FoundDevice(f"{NODE}/mig-1g.10gb-0", 0, "NVIDIA-H100 MIG 1g.10gb", 9856),
        FoundDevice(f"{NODE}/mig-1g.10gb-1", 1, "NVIDIA-H100 MIG 1g.10gb", 9856),
        FoundDevice(f"{NODE}/mig-3g.40gb-0", 2, "NVIDIA-H100 MIG 3g.40gb", 40448),
    ]
    device = gpu(memory_mib=found[0].memory_mib, model=found[0].model)
    patch = patch_of(BY_NAME["mig"], share(device, 9856), of=[device])
    assert patch.limits == {"nvidia.com/mig-1g.10gb": "1"} == {BY_NAME["mig"].resource_of(found[0]): "1"}


# --- DRA ---


def test_dra_slices_name_gpus_with_their_memory() -> None:
    devices = [gpu(0), gpu(3, memory_mib=81559)]
    found = BY_NAME["dra"].capacity(node(), GpuRecords(slices=[slice_of(devices)]))
    assert found == [FoundDevice(d.uuid, d.index, d.model, d.memory_mib) for d in devices]


def test_a_tainted_device_is_left_out() -> None:
    sliced = slice_of([gpu()])
    sliced["spec"]["devices"][0]["taints"] = [{"key": "gpu.nvidia.com/xid", "effect": "NoExecute"}]
    assert BY_NAME["dra"].capacity(node(), GpuRecords(slices=[sliced])) == []


def test_only_a_pools_complete_newest_generation_counts() -> None:
    old, new = slice_of([gpu(0), gpu(1)]), slice_of([gpu(1)])
    new["spec"]["pool"]["generation"] = 2
    (found,) = BY_NAME["dra"].capacity(node(), GpuRecords(slices=[old, new]))
    assert found.uuid == gpu(1).uuid
    new["spec"]["pool"]["resourceSliceCount"] = 2
    with pytest.raises(GpuUnknown, match="not all ResourceSlices of the pool gpu-1 are there yet"):
        BY_NAME["dra"].capacity(node(), GpuRecords(slices=[old, new]))


def test_gpu_of_the_same_name_on_another_node_is_another_gpu() -> None:
    device = gpu()
    patched, records = allocated(patch_of(BY_NAME["dra"], share(device, 1280), of=[device]), [device])
    elsewhere = slice_of([gpu(0, memory_mib=1)])
    elsewhere["spec"]["devices"][0]["attributes"]["uuid"]["string"] = A
    elsewhere["spec"]["pool"]["name"] = "gpu-2"
    (found,) = BY_NAME["dra"].assigned(
        patched, GpuRecords(claims=records.claims, slices=[*records.slices, elsewhere])
    )
    assert found == AssignedGpu(device.uuid)


def test_claim_made_from_a_template_is_found() -> None:
    device = gpu()
    patched, records = allocated(patch_of(BY_NAME["dra"], share(device, 1280), of=[device]), [device])
    patched["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimTemplateName": "shared"}]
    with pytest.raises(GpuUnknown, match="the claim gpu of pod fgpu-lab-7-1 isn't made yet"):
        BY_NAME["dra"].assigned(patched, records)
    patched["status"] = {"resourceClaimStatuses": [{"name": "gpu", "resourceClaimName": "fgpu-lab-7-1"}]}
    assert BY_NAME["dra"].assigned(patched, records) == [AssignedGpu(device.uuid)]


# --- lease ---


LEASE = Lease("lab")
TOLD = f"0, {A}, Tesla T4, 15360\n"


def test_lease_pods_answers_are_the_nodes_gpus() -> None:
    records = GpuRecords(leases={"lab-lease-1": f"0, {B}, Tesla T4, 15360\n", "lab-lease-0": TOLD})
    found = LEASE.capacity(node(), records)
    assert found == [
        FoundDevice(A, 0, "Tesla T4", 15360),
        FoundDevice(B, 1, "Tesla T4", 15360),
    ]


# --- what is not said ---


def offered(
    dialect: Dialect, records: GpuRecords | None = None, **node_has: dict[str, str]
) -> Callable[[], Any]:
    return lambda: dialect.capacity(node(**node_has), records or GpuRecords())


def registered(text: str, **more: str) -> Callable[[], Any]:
    return offered(Hami(), annotations={"hami.io/node-nvidia-register": text, **more})


def noted(text: str) -> Callable[[], Any]:
    return lambda: Hami().assigned(pod(annotations={"hami.io/vgpu-devices-allocated": text}), GpuRecords())


def leased(answer: str | None) -> Callable[[], Any]:
    return offered(LEASE, GpuRecords(leases={"lab-lease-0": answer}))


def units(memory: str, compute: str) -> Callable[[], Any]:
    resources = {"volcano.sh/gpu-mem.128Mi": memory, "volcano.sh/gpu-core.percentage": compute}
    return offered(BY_NAME["cce"], allocatable=resources)


UNKNOWN: dict[str, list[Callable[[], Any]]] = {
    "hasn't said which GPU it has": [leased(None)],
    "what the lease pod lab-lease-0 said of its GPU can't be read": [
        leased(answer)
        for answer in (
            "",
            f"{TOLD}{TOLD}",
            "No devices were found",
            "0, all, Tesla T4, 15360",
            f"0, {A}, T4, [N/A]",
        )
    ],
    f"{NODE}.*no ResourceSlice of gpu.nvidia.com": [offered(BY_NAME["dra"])],
    f"{NODE}.*no annotation hami.io/node-nvidia-register": [offered(Hami())],
    f"node {NODE}: its device plugin doesn't answer the scheduler": [
        registered(JSON, **{"hami.io/node-handshake": "Deleted_2026-11-23 08:00:00"})
    ],
    f"node-nvidia-register of node {NODE} can't be read": [
        *map(registered, ("[", "{}", "[1]", f"{A},10,32768,100,{V100},0,true,0,hami-core:")),
        *map(registered, (JSON.replace("32768", "0"), JSON.replace('"id"', '"uuid"'))),
    ],
    "vgpu-devices-allocated of pod fgpu-lab-7-1 can't be read": [
        *map(noted, (f"{A},NVIDIA,0,0:;", f"{A},NVIDIA:;", f"{A},NVIDIA,much,0:;"))
    ],
    f"{NODE}.*registers no volcano.sh/gpu-mem.128Mi": [offered(BY_NAME["cce"])],
    NODE: [
        units("100", "150"),
        units("0", "100"),
        units("127", "200"),
        units("-1", "100"),
        units("1.5", "100"),
    ],
    f"{NODE}.*no label nvidia.com/mig-1g.10gb.memory": [
        offered(BY_NAME["mig"], allocatable={"nvidia.com/mig-1g.10gb": "1"})
    ],
    "fgpu-lab-7-1": [
        lambda: Hami().assigned(
            pod(limits={"nvidia.com/gpu": "1", "nvidia.com/gpumem": "1280"}), GpuRecords()
        )
    ],
}
"""What is missing or unreadable in a cluster's reports, by what is said of it."""


@pytest.mark.parametrize(("words", "look"), [(words, look) for words in UNKNOWN for look in UNKNOWN[words]])
def test_missing_or_unreadable_report_is_unknown_not_none(words: str, look: Callable[[], Any]) -> None:
    with pytest.raises(GpuUnknown, match=words):
        look()


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_pod_without_request_has_no_gpu(dialect: Dialect) -> None:
    assert list(dialect.assigned(pod(), GpuRecords())) == []


OWN = gpu()
INJECTED = {
    "variable": ({"NVIDIA_VISIBLE_DEVICES": OWN.uuid}, {}, "nvidia"),
    "cdi": ({"NVIDIA_VISIBLE_DEVICES": f"k8s.device-plugin.nvidia.com/gpu={OWN.uuid}"}, {}, "nvidia"),
    "nri": (
        {"NVIDIA_VISIBLE_DEVICES": "void"},
        {"nvidia.cdi.k8s.io/container.notebook": f"k8s.device-plugin.nvidia.com/gpu={OWN.uuid}"},
        None,
    ),
}


@pytest.mark.parametrize(
    ("runtime_class", "lease_got", "way"),
    [
        ("nvidia", OWN.uuid, "variable"),
        ("nvidia", "void", "cdi"),
        ("nvidia", "", "cdi"),
        ("", "void", "nri"),
        ("", "", "nri"),
        ("nvidia", None, "variable"),
        ("", None, "nri"),
    ],
)
def test_session_names_its_gpu_as_the_lease_got_it(
    runtime_class: str, lease_got: str | None, way: str
) -> None:
    dialect = Lease("lab", runtime_class=runtime_class)
    if lease_got is not None:
        dialect.given_as[OWN.uuid] = lease_got
    assert injected(dialect) == INJECTED[way]


@pytest.mark.parametrize("way", INJECTED)
def test_configured_injection_is_used_and_read_back_from_other_pods(
    way: str,
) -> None:
    dialect = Lease("lab", injection=way)
    dialect.given_as[OWN.uuid] = "anything"
    assert injected(dialect) == INJECTED[way]
    patched = dialect.patch([share(OWN, 1024)], [OWN], name="x").applied(pod())
    assert dialect.assigned(patched, GpuRecords()) == [AssignedGpu(OWN.uuid)]


def injected(dialect: Lease) -> tuple[object, object, str | None]:
    patch = dialect.patch([share(OWN, 1024)], [OWN], name="x")
    return patch.environment, patch.annotations, patch.spec.get("runtimeClassName")


@pytest.mark.parametrize("visible", ["", "void", OWN.uuid])
def test_lease_answer_is_read_with_any_variable(visible: str) -> None:
    answer = f"0, {OWN.uuid}, Tesla T4, 15360\ngiven as:{visible}\n"
    assert gpu_of("lease-0", answer) == FoundDevice(OWN.uuid, 0, "Tesla T4", 15360)
    assert given_as(answer) == visible
