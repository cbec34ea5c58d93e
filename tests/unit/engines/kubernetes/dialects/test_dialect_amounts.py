"""The amounts that a dialect writes: never more than the share, never 0; or a refusal that names the rule."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from traitlets.config import Config

from dialectworlds import ALL, BY_NAME, gpu, instance, patch_of, share
from fgpu_scheduler import Device, Share, ShareMode
from fgpuspawner.engines.kubernetes.dialects import DIALECTS
from fgpuspawner.engines.kubernetes.dialects.base import Dialect, UnsupportedShare
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

UNITS = {"hami": (1, 1), "cce": (128, 5)}
"""The units of memory in MiB and of compute in percent, of dialects that have units, by their documentation."""
LIMITS = {
    "hami": ("nvidia.com/gpumem", "nvidia.com/gpucores"),
    "cce": ("volcano.sh/gpu-mem.128Mi", "volcano.sh/gpu-core.percentage"),
}


@st.composite
def worlds(draw: st.DrawFn, *, instances: bool = False) -> tuple[list[Share], list[Device]]:
    """Return shares of one to three GPUs of a node: small and whole, equal and different."""
    sizes = st.sampled_from([9856, 16160, 40960, 81559]) | st.integers(1, 200_000)
    made = instance if instances else gpu
    devices = [made(i, memory_mib=draw(sizes)) for i in range(draw(st.integers(1, 3)))]
    alike = draw(st.booleans())
    if alike:
        devices = [made(i, memory_mib=devices[0].memory_mib) for i in range(len(devices))]
    shares: list[Share] = []
    for device in devices:
        memory = draw(st.just(device.memory_mib) | st.integers(1, device.memory_mib))
        one = share(device, memory, draw(st.none() | st.integers(1, 100)))
        if alike and shares:
            one = share(device, shares[0].memory_mib, shares[0].compute_percent or None)
        shares.append(one)
    return shares, devices


def is_possible(dialect: Dialect, shares: list[Share], devices: list[Device]) -> bool:
    """Return whether the documentation's rules allow these shares."""
    memory_unit, percent_unit = UNITS.get(dialect.name, (1, 1))
    enough = all(
        s.memory_mib >= memory_unit and (s.mode is ShareMode.MEMORY or s.compute_percent >= percent_unit)
        for s in shares
    )
    match dialect.name:
        case "cce":
            return enough and len(shares) == 1
        case "hami":
            return enough and len({(s.memory_mib, s.compute_percent, s.mode) for s in shares}) == 1
        case "mig":
            return all(s.memory_mib == d.memory_mib for s, d in zip(shares, devices, strict=True))
    return True


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_an_amount_is_the_share_rounded_down_to_units(dialect: Dialect) -> None:
    @given(worlds(instances=dialect.name == "mig"))
    def holds(world: tuple[list[Share], list[Device]]) -> None:
        shares, devices = world
        if not is_possible(dialect, shares, devices):
            with pytest.raises(UnsupportedShare, match=rf"^{dialect.name}: .*choose "):
                patch_of(dialect, *shares, of=devices)
            return
        patch = patch_of(dialect, *shares, of=devices)
        assert all(value.isdigit() and int(value) >= 1 for value in patch.limits.values())
        if dialect.name in UNITS:
            (memory, compute), (memory_unit, percent_unit) = LIMITS[dialect.name], UNITS[dialect.name]
            assert int(patch.limits[memory]) == shares[0].memory_mib // memory_unit
            percent = int(patch.limits.get(compute, 0))
            assert percent == shares[0].compute_percent // percent_unit * percent_unit
            assert (compute in patch.limits) is (shares[0].mode is ShareMode.MEMORY_COMPUTE)
        requests = [r for claim in patch.claims for r in claim["spec"]["devices"]["requests"]]
        assert [r["exactly"]["capacity"]["requests"]["memory"] for r in requests] == (
            [f"{s.memory_mib}Mi" for s in shares] if dialect.name == "dra" else []
        )

    holds()


@given(st.integers(1, 2000), st.integers(1, 100_000))
def test_hami_memory_factor_rounds_down(unit: int, memory_mib: int) -> None:
    dialect, device = Hami(memory_unit_mib=unit), gpu(memory_mib=100_000)
    if memory_mib < unit:
        with pytest.raises(
            UnsupportedShare, match=f"units of {unit} MiB, so {memory_mib} MiB isn't possible"
        ):
            patch_of(dialect, share(device, memory_mib), of=[device])
        return
    written = int(patch_of(dialect, share(device, memory_mib), of=[device]).limits["nvidia.com/gpumem"])
    assert written >= 1
    assert memory_mib - unit < written * unit <= memory_mib


def test_hami_memory_factor_is_a_setting() -> None:
    config = Config({"KubernetesFGPUSpawner": {"dialect": "hami", "hami_memory_factor": 10}})
    dialect, device = KubernetesFGPUSpawner.dialect_of(config, installation="lab"), gpu()
    assert patch_of(dialect, share(device, 8000), of=[device]).limits["nvidia.com/gpumem"] == "800"


def test_every_dialect_is_tested() -> None:
    assert tuple(type(dialect) for dialect in ALL) == DIALECTS
    assert len(BY_NAME) == len(DIALECTS)


def test_cce_counts_a_whole_gpu_of_an_odd_size_as_all_its_units() -> None:
    device = gpu(memory_mib=16160)
    patch = patch_of(BY_NAME["cce"], share(device, 16160, 100), of=[device])
    assert patch.limits == {"volcano.sh/gpu-mem.128Mi": "126", "volcano.sh/gpu-core.percentage": "100"}


@pytest.mark.parametrize(
    ("model", "resource"),
    [
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "nvidia.com/mig-1g.5gb"),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb+me", "nvidia.com/mig-1g.10gb.me"),
        ("A100-SXM4-40GB-MIG-3g.20gb", "nvidia.com/mig-3g.20gb"),
    ],
)
def test_a_mig_profile_is_the_device_plugins_resource(model: str, resource: str) -> None:
    device = gpu(memory_mib=4864, model=model)
    assert patch_of(BY_NAME["mig"], share(device, 4864, 100), of=[device]).limits == {resource: "1"}


def test_a_uuid_cannot_change_a_dra_selector() -> None:
    device = Device('GPU-1" || true || "', "gpu-1", 0, "Tesla T4", 16160, 1000)
    (claim,) = patch_of(BY_NAME["dra"], share(device, 1280), of=[device]).claims
    (selector,) = claim["spec"]["devices"]["requests"][0]["exactly"]["selectors"]
    assert selector["cel"]["expression"] == (
        'device.attributes["gpu.nvidia.com"].uuid == "GPU-1\\" || true || \\""'
    )


# --- Refusals ---


BIG = [gpu(0), gpu(1), gpu(2, memory_mib=81559, model="NVIDIA H100")]
SMALL, LARGE = instance(0), instance(1, profile="3g.40gb", memory_mib=40448)
RULES: list[tuple[str, list[Device], list[Share], str]] = [
    (
        "cce",
        BIG,
        [share(BIG[0], 127, 5)],
        "GPU memory is counted in units of 128 MiB, so 127 MiB isn't possible; choose 128 MiB or more",
    ),
    (
        "cce",
        BIG,
        [share(BIG[0], 128, 4)],
        "compute is counted in units of 5 %, so 4 % isn't possible; choose 5 % or more",
    ),
    (
        "cce",
        BIG,
        [share(BIG[0], 16160, 100), share(BIG[1], 16160, 100)],
        "a pod has a share of one GPU, so 2 GPUs aren't possible; choose 1 GPU or less",
    ),
    (
        "hami",
        BIG,
        [share(BIG[0], 16160, 100), share(BIG[2], 81559, 100)],
        "each GPU of a pod gives the same, so 2 different shares aren't possible; choose GPUs of one model",
    ),
    (
        "mig",
        [SMALL],
        [share(SMALL, 1280)],
        "a pod gets whole MIG instances, so 1280 MiB isn't possible; choose all 9856 MiB of the instance",
    ),
    (
        "mig",
        BIG,
        [share(BIG[0], 16160)],
        "a pod gets MIG instances, and Tesla T4 is none;"
        ' choose a GPU whose model ends in its profile, as in "MIG 1g.10gb"',
    ),
    (
        "mig",
        [SMALL, LARGE],
        [share(SMALL, 9856), share(LARGE, 40448)],
        "a pod gets MIG instances of one profile, so nvidia.com/mig-1g.10gb and nvidia.com/mig-3g.40gb together"
        " aren't possible; choose one",
    ),
]


@pytest.mark.parametrize(("name", "devices", "shares", "words"), RULES)
def test_a_refusal_names_the_rule_and_a_possible_choice(
    name: str, devices: list[Device], shares: list[Share], words: str
) -> None:
    with pytest.raises(UnsupportedShare) as refused:
        patch_of(BY_NAME[name], *shares, of=devices)
    assert str(refused.value) == f"{name}: {words}"


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_no_dialect_takes_nothing_or_more_than_the_gpu_has(dialect: Dialect) -> None:
    device = instance()
    for memory_mib in (0, -128, device.memory_mib + 1):
        with pytest.raises(UnsupportedShare, match=f"memory of {memory_mib} MiB .* choose 1 to 9856 MiB"):
            patch_of(dialect, share(device, memory_mib), of=[device])
    for percent in (0, -5, 101):
        one = Share(device.uuid, 0, device.memory_mib, percent, ShareMode.MEMORY_COMPUTE)
        with pytest.raises(
            UnsupportedShare, match=f"compute of {percent} % isn't possible; choose 1 to 100 %"
        ):
            patch_of(dialect, one, of=[device])
