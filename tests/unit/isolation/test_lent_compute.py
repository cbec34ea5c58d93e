"""What the Hub writes so that sessions lend each other compute: numbers, words, owners, and mounts of each its own."""

from __future__ import annotations

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import Device, Node, Placement, Request, Session, SessionState, Share, ShareMode
from fgpuspawner.isolation import lending, limits, native
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.limits import BadLimits
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.native import Native
from fgpuspawner.settings import FGPU

FIRST = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 2000, True)
SECOND = Device("MIG-a/b", "lab", 1, "Simulated GPU 8192 MiB", 8192, 2000, True)
LAB = Node("lab", "default", 16000, 65536, (FIRST, SECOND))


@pytest.fixture(autouse=True)
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files in the places of the built parts."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "native")
    for part in Native(tmp_path / "native").parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.write_text(part.name)


def opened(tmp_path: Path, *, own_root: bool = True, **given: Any) -> Isolation:
    (tmp_path / "data").mkdir(exist_ok=True)
    settings = FGPU(
        data_dir=str(tmp_path / "data"),
        accounting_dir=str(tmp_path / "shm"),
        **{"compute": "elastic", **given},
    )
    found = Isolation(settings, (LAB,))
    found.open(own_root=own_root, installation="abc")
    return found


def session(session_id: int, *devices: Device, milli: int = 500, mode: ShareMode | None = None) -> Session:
    request = Request("alice", "", "python", "default", milli, 1000, 2048)
    shares = tuple(Share.of(device, milli) for device in devices or (FIRST,))
    if mode is not None:
        shares = tuple(replace(share, mode=mode) for share in shares)
    return Session(session_id, request, SessionState.PREPARING, 0, placement=Placement("lab", shares))


def owners(tmp_path: Path, device: Device = FIRST) -> list[int]:
    folder = lending.folder_of(tmp_path / "shm" / "fgpu-abc", device.uuid)
    return list((folder / lending.OWNERS).read_bytes())


def numbers(prepared: Prepared) -> list[int]:
    return [limit.lending for limit in prepared.limits.devices]


def test_sessions_of_a_gpu_have_numbers_and_slots_of_their_own(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert [numbers(found.prepare(session(n), [7, 8, 9])) for n in (7, 8, 9)] == [[1], [2], [3]]
    assert owners(tmp_path) == [1] * 25 + [2] * 25 + [3] * 25 + [0] * 25


def test_who_is_gone_owns_nothing_and_its_number_gets_a_word_that_says_nothing(tmp_path: Path) -> None:
    found = opened(tmp_path)
    first = found.prepare(session(7), [7])
    word = first.mounts[-1].source
    old = word.open("r+b")
    old.write(b"\xff" * 8)
    old.flush()
    found.prepare(session(8), [7, 8])
    found.prune([8])
    assert owners(tmp_path) == [0] * 25 + [2] * 25 + [0] * 50
    again = found.prepare(session(9), [8, 9])
    assert numbers(again) == [1]
    old.write(b"\xff" * 8)
    old.close()
    assert word.read_bytes() == bytes(8)


def test_a_container_can_write_its_own_word_and_read_the_others(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(6), [6])
    prepared = found.prepare(session(7, FIRST, SECOND), [6, 7])
    folders = [m for m in prepared.mounts if m.target in ("/run/fgpu/lending/0", "/run/fgpu/lending/1")]
    assert [m.read_only for m in folders] == [True, True]
    assert {m.target: m.source for m in prepared.mounts if not m.read_only and "lending" in m.target} == {
        "/run/fgpu/lending/0/2": folders[0].source / "2",
        "/run/fgpu/lending/1/1": folders[1].source / "1",
    }
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in folders[0].source.iterdir()}
    assert modes == {"1": 0o666, "2": 0o666, "owners": 0o444}
    assert stat.S_IMODE(folders[0].source.stat().st_mode) == 0o755
    assert all((found.folder(7) / "lending" / str(n)).is_dir() for n in (0, 1))


def test_a_local_session_finds_the_same_in_its_folder(tmp_path: Path) -> None:
    found = opened(tmp_path, own_root=False)
    found.prepare(session(7, FIRST, SECOND), [7])
    for n in (0, 1):
        assert (found.folder(7) / "lending" / str(n) / "1").read_bytes() == bytes(8)
        assert len((found.folder(7) / "lending" / str(n) / "owners").read_bytes()) == 100


@pytest.mark.parametrize("milli", [100, 500, 1000])
def test_limits_that_lend_are_read_as_they_were_written(tmp_path: Path, milli: int) -> None:
    found = opened(tmp_path, max_percent=40)
    prepared = found.prepare(session(7, milli=milli), [7])
    assert limits.read(found.folder(7)) == prepared.limits
    (limit,) = prepared.limits.devices
    assert limit.most_percent == max(40, milli // 20), "a share is never cut"
    assert f" lending=1 most_percent={limit.most_percent}\n" in limits.render(prepared.limits)


def test_what_does_not_lend_is_kept(tmp_path: Path) -> None:
    strict = opened(tmp_path, compute="strict")
    assert numbers(strict.prepare(session(7), [7])) == [0]
    found = opened(tmp_path)
    assert numbers(found.prepare(session(8), [7, 8])) == [1]
    assert owners(tmp_path) == [lending.KEPT] * 25 + [1] * 25 + [0] * 50


def test_a_whole_gpu_and_one_that_shares_memory_only_lend_nothing(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert numbers(found.prepare(session(7, milli=2000), [7])) == [0]
    assert numbers(found.prepare(session(8, SECOND, mode=ShareMode.MEMORY), [7, 8])) == [0]


def test_without_a_place_in_memory_and_without_libfgpu_nothing_is_lent(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.host = replace(found.host, accounting=None)
    found._backends = {}
    backend = type(found.backend_of(session(7)))(found.host)
    assert numbers(backend.prepare(session(7), (FIRST,), ())) == [0]
    assert numbers(opened(tmp_path, isolation="none").prepare(session(7), [7])) == [0]


def test_a_container_that_was_warm_does_not_lend(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.make_warm("warm-1", [])
    found.prepare(session(7), [7])
    found.adopt(7, "warm-1")
    assert limits.read(found.folder(7)).devices[0].lending == 0
    assert owners(tmp_path) == [lending.KEPT] * 25 + [0] * 75


def test_a_word_that_a_session_has_let_grow_is_cut_back(tmp_path: Path) -> None:
    found = opened(tmp_path)
    word = found.prepare(session(7), [7]).mounts[-1].source
    word.write_bytes(bytes(100_000))
    found.trim_files()
    assert word.stat().st_size == lending.WORD_BYTES


@pytest.mark.parametrize("more", ["lending=1", "lending=x most_percent=50", "most_percent=50"])
def test_half_a_line_is_no_limit(more: str) -> None:
    line = "device=GPU-1 memory_mib=1 device_mib=2 context_mib=0 compute_percent=25 mode=memory+compute slots=0-25"
    with pytest.raises(BadLimits):
        limits.parse(f"fgpu-limits 1\nsession=1\nmanaged=charge\n{line} {more}\nend\n")
