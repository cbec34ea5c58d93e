"""A share that a dialect has no words for is refused in one line: the dialect, its rule, and what would do."""

from __future__ import annotations

import pytest
from traitlets.config import Config

from dialectworlds import ALL, BY_NAME, gpu, instance, said, share
from fgpu_scheduler import Device, Share, ShareMode
from fgpuspawner.engines.kubernetes.dialects import Dialect, NotSayable
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

BIG = [gpu(0), gpu(1), gpu(2, memory_mib=81559, model="NVIDIA H100")]
SMALL, LARGE = instance(0), instance(1, profile="3g.40gb", memory_mib=40448)

RULES: list[tuple[str, list[Device], list[Share], str]] = [
    (
        "cce",
        BIG,
        [share(BIG[0], 127, 5)],
        "cce: GPU memory is counted in units of 128 MiB, so 127 MiB isn't possible; choose 128 MiB or more",
    ),
    (
        "cce",
        BIG,
        [share(BIG[0], 128, 4)],
        "cce: compute is counted in units of 5 %, so 4 % isn't possible; choose 5 % or more",
    ),
    (
        "cce",
        BIG,
        [share(BIG[0], 16160, 100), share(BIG[1], 16160, 100)],
        "cce: a pod has a share of one GPU, so 2 GPUs aren't possible; choose 1 GPU or less",
    ),
    (
        "hami",
        BIG,
        [share(BIG[0], 16160, 100), share(BIG[2], 81559, 100)],
        "hami: each GPU of a pod gives the same, so 2 different shares aren't possible; choose GPUs of one model",
    ),
    (
        "mig",
        [SMALL],
        [share(SMALL, 1280)],
        "mig: a pod gets whole MIG instances, so 1280 MiB isn't possible; choose all 9856 MiB of the instance",
    ),
    (
        "mig",
        BIG,
        [share(BIG[0], 16160)],
        "mig: a pod gets MIG instances, and Tesla T4 is none;"
        ' choose a GPU whose model ends in its profile, as in "MIG 1g.10gb"',
    ),
    (
        "mig",
        [SMALL, LARGE],
        [share(SMALL, 9856), share(LARGE, 40448)],
        "mig: a pod gets MIG instances of one profile, so nvidia.com/mig-1g.10gb and nvidia.com/mig-3g.40gb together"
        " aren't possible; choose one",
    ),
]


@pytest.mark.parametrize(("name", "devices", "shares", "words"), RULES)
def test_a_refusal_names_the_rule_and_what_would_do(
    name: str, devices: list[Device], shares: list[Share], words: str
) -> None:
    with pytest.raises(NotSayable) as refused:
        said(BY_NAME[name], *shares, of=devices)
    assert str(refused.value) == words


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_no_dialect_says_memory_that_is_none_or_more_than_the_gpu_has(dialect: Dialect) -> None:
    device = instance()
    for memory_mib in (0, -128, device.memory_mib + 1):
        with pytest.raises(NotSayable) as refused:
            said(dialect, share(device, memory_mib), of=[device])
        assert str(refused.value) == (
            f"{dialect.name}: GPU memory of {memory_mib} MiB isn't possible on a GPU of 9856 MiB; choose 1 to 9856 MiB"
        )


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
@pytest.mark.parametrize("percent", [0, -5, 101])
def test_no_dialect_says_compute_that_is_none_or_more_than_the_gpu_has(
    dialect: Dialect, percent: int
) -> None:
    device = instance()
    one = Share(device.uuid, 0, device.memory_mib, percent, ShareMode.MEMORY_COMPUTE)
    with pytest.raises(NotSayable) as refused:
        said(dialect, one, of=[device])
    assert str(refused.value) == f"{dialect.name}: compute of {percent} % isn't possible; choose 1 to 100 %"


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_a_pod_without_a_share_has_no_dialect(dialect: Dialect) -> None:
    with pytest.raises(ValueError, match="without a share"):
        dialect.patch([], [gpu()], name="fgpu-lab-7-1")


def test_a_whole_gpu_of_a_size_that_is_no_multiple_of_128_is_all_its_units_on_cce() -> None:
    device = gpu(memory_mib=16160)
    patch = said(BY_NAME["cce"], share(device, 16160, 100), of=[device])
    assert patch.limits == {"volcano.sh/gpu-mem.128Mi": "126", "volcano.sh/gpu-core.percentage": "100"}


def test_compute_is_rounded_down_to_steps_of_5_on_cce() -> None:
    device = gpu()
    patch = said(BY_NAME["cce"], share(device, 5120, 33), of=[device])
    assert patch.limits == {"volcano.sh/gpu-mem.128Mi": "40", "volcano.sh/gpu-core.percentage": "30"}


@pytest.mark.parametrize(
    ("model", "resource"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
        ("A100-SXM4-40GB-MIG-3g.20gb", "nvidia.com/mig-3g.20gb"),
    ],
)
def test_a_profile_is_the_resource_that_the_device_plugin_calls_it(model: str, resource: str) -> None:
    device = gpu(memory_mib=4864, model=model)
    assert said(BY_NAME["mig"], share(device, 4864, 100), of=[device]).limits == {resource: "1"}


def test_a_uuid_is_nothing_but_a_string_of_a_selector() -> None:
    device = Device('GPU-1" || true || "', "gpu-1", 0, "Tesla T4", 16160, 1000)
    (claim,) = said(BY_NAME["dra"], share(device, 1280), of=[device]).claims
    (request,) = claim["spec"]["devices"]["requests"]
    (selector,) = request["exactly"]["selectors"]
    assert selector["cel"]["expression"] == (
        'device.attributes["gpu.nvidia.com"].uuid == "GPU-1\\" || true || \\""'
    )


def test_the_memory_factor_of_hami_is_a_setting() -> None:
    config = Config()
    config.KubernetesFGPUSpawner.dialect = "hami"
    config.KubernetesFGPUSpawner.hami_memory_factor = 10
    dialect = KubernetesFGPUSpawner.dialect_of(config, installation="lab")
    device = gpu(memory_mib=16160)
    patch = dialect.patch([share(device, 8000)], [device], name="x")
    assert patch.limits["nvidia.com/gpumem"] == "800"
