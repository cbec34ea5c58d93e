"""What a dialect writes is never above the share and never 0, and reads back as the share; or a rule refuses it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dialectworlds import ALL, BY_NAME, bound, gpu, instance, said, share
from fgpu_scheduler import Device, Share, ShareMode
from fgpuspawner.engines.kubernetes.dialects import DIALECTS, Cce, Dialect, Hami, NotSayable

UNITS = {
    "hami": (1, 1),
    "cce": (128, 5),
    "dra": (1, 1),
    "lease": (1, 1),
    "mig": (1, 1),
}
"""The units of memory in MiB and of compute in percent, by dialect, as its documentation has them."""


@st.composite
def worlds(draw: st.DrawFn, *, most: int = 3, instances: bool = False) -> tuple[list[Share], list[Device]]:
    """Return shares of as many GPUs of a node: small ones and whole ones, alike and not."""
    sizes = st.sampled_from([9856, 16160, 40960, 81559]) | st.integers(1, 200_000)
    made = instance if instances else gpu
    devices = [made(i, memory_mib=draw(sizes)) for i in range(draw(st.integers(1, most)))]
    alike = draw(st.booleans())
    if alike:
        devices = [made(i, memory_mib=devices[0].memory_mib) for i in range(len(devices))]
    percent = st.none() | st.integers(1, 100)
    shares: list[Share] = []
    for device in devices:
        memory = draw(st.just(device.memory_mib) | st.integers(1, device.memory_mib))
        one = share(device, memory, draw(percent))
        if alike and shares:
            one = share(device, shares[0].memory_mib, shares[0].compute_percent or None)
        shares.append(one)
    return shares, devices


def is_sayable(dialect: Dialect, shares: list[Share], devices: list[Device]) -> bool:
    """Say by the documentation's rules whether a cluster has words for these shares."""
    whole = all(s.memory_mib == d.memory_mib for s, d in zip(shares, devices, strict=True))
    memory_unit, percent_unit = UNITS[dialect.name]
    enough = all(
        s.memory_mib >= memory_unit and (s.mode is ShareMode.MEMORY or s.compute_percent >= percent_unit)
        for s in shares
    )
    alike = len({(s.memory_mib, s.compute_percent, s.mode) for s in shares}) == 1
    match dialect.name:
        case "cce":
            return enough and len(shares) == 1
        case "hami":
            return enough and alike
        case "mig":
            return whole
    return True


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_what_is_written_reads_back_as_the_share_and_never_more_nor_nothing(dialect: Dialect) -> None:
    @given(worlds(instances=dialect.name == "mig"))
    def holds(world: tuple[list[Share], list[Device]]) -> None:
        shares, devices = world
        if not is_sayable(dialect, shares, devices):
            with pytest.raises(NotSayable, match=rf"^{dialect.name}: .*choose "):
                said(dialect, *shares, of=devices)
            return
        patch = said(dialect, *shares, of=devices)
        assert all(value.isdigit() and int(value) >= 1 for value in patch.limits.values())
        read_back = dialect.given(*bound(dialect, patch, devices))
        assert len(read_back) == len(shares)
        memory_unit, percent_unit = UNITS[dialect.name]
        for found, one in zip(read_back, shares, strict=True):
            if found.uuid is not None or dialect.pins_card:
                assert found.uuid == one.device_uuid
            if found.memory_mib is not None:
                assert found.memory_mib == one.memory_mib // memory_unit * memory_unit > 0
            if found.compute_percent is not None:
                assert found.compute_percent == one.compute_percent // percent_unit * percent_unit > 0
            assert found.compute_percent is None or one.mode is ShareMode.MEMORY_COMPUTE

    holds()


@pytest.mark.parametrize("name", ["hami", "cce"])
def test_who_holds_compute_is_told_it_and_memory_alone_is_no_percent(name: str) -> None:
    dialect, device = BY_NAME[name], gpu()
    (both,) = dialect.given(*bound(dialect, said(dialect, share(device, 5120, 25), of=[device]), [device]))
    (memory,) = dialect.given(*bound(dialect, said(dialect, share(device, 5120), of=[device]), [device]))
    assert (both.memory_mib, both.compute_percent) == (5120, 25)
    assert (memory.memory_mib, memory.compute_percent) == (5120, None)


@pytest.mark.parametrize("name", ["hami", "cce", "dra"])
def test_who_holds_or_counts_memory_is_told_it(name: str) -> None:
    dialect, device = BY_NAME[name], gpu()
    (found,) = dialect.given(*bound(dialect, said(dialect, share(device, 5120, 25), of=[device]), [device]))
    assert found.memory_mib == 5120
    assert found.whole is None


@pytest.mark.parametrize(("name", "uuid"), [("lease", True), ("dra", True), ("cce", False)])
def test_a_card_is_read_back_where_the_cluster_says_it(name: str, uuid: bool) -> None:
    dialect, device = BY_NAME[name], gpu(1)
    (found,) = dialect.given(*bound(dialect, said(dialect, share(device, 5120), of=[device]), [device]))
    assert found.uuid == (device.uuid if uuid else None)


@given(st.integers(1, 2000), st.integers(1, 100_000))
def test_a_memory_factor_rounds_down_to_its_units(unit: int, memory_mib: int) -> None:
    dialect, device = Hami(memory_unit_mib=unit), gpu(memory_mib=100_000)
    if memory_mib < unit:
        with pytest.raises(NotSayable, match=f"units of {unit} MiB, so {memory_mib} MiB isn't possible"):
            said(dialect, share(device, memory_mib), of=[device])
        return
    patch = said(dialect, share(device, memory_mib), of=[device])
    written = int(patch.limits["nvidia.com/gpumem"])
    assert written >= 1
    assert memory_mib - unit < written * unit <= memory_mib


@given(st.integers(1, 127), st.integers(1, 4))
def test_less_than_a_unit_of_cce_is_refused_and_the_unit_named(memory_mib: int, percent: int) -> None:
    device = gpu()
    with pytest.raises(
        NotSayable, match=f"units of 128 MiB, so {memory_mib} MiB isn't possible; choose 128 MiB or more"
    ):
        said(Cce(), share(device, memory_mib, 50), of=[device])
    with pytest.raises(NotSayable, match=f"units of 5 %, so {percent} % isn't possible; choose 5 % or more"):
        said(Cce(), share(device, 1280, percent), of=[device])


def test_here_are_all_dialects_with_their_units() -> None:
    assert tuple(type(dialect) for dialect in ALL) == DIALECTS
    assert UNITS.keys() == BY_NAME.keys()
    assert len(BY_NAME) == len(DIALECTS)
