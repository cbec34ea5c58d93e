"""What the Hub writes so that sessions lend each other compute: numbers, words, owners, and mounts of each its own."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sessions

from fgpu_scheduler import Device, Node, Session, Share, ShareMode
from fgpuspawner.isolation import facts, lending, limits
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.settings import FGPU

FIRST = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 2000, True)
SECOND = Device("MIG-a/b", "lab", 1, "Simulated GPU 8192 MiB", 8192, 2000, True)
LAB = Node("lab", "default", 16000, 65536, (FIRST, SECOND))

pytestmark = pytest.mark.usefixtures("native_parts")


def opened(tmp_path: Path, *, own_root: bool = True, **given: Any) -> Isolation:
    (tmp_path / "data").mkdir(exist_ok=True)
    settings = FGPU(
        data_dir=str(tmp_path / "data"),
        accounting_dir=str(tmp_path / "shm"),
        **given,
    )
    found = Isolation(settings, (LAB,))
    found.open(own_root=own_root, installation="abc")
    return found


def test_nothing_is_lent_without_a_place_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "with").mkdir()
    (tmp_path / "without").mkdir()
    assert opened(tmp_path / "with").lending == {"lab"}
    monkeypatch.setattr(facts, "memory_place", lambda *_: None)
    assert opened(tmp_path / "without").lending == set()


def session(session_id: int, *devices: Device, milli: int = 500, mode: ShareMode | None = None) -> Session:
    shares = [Share.of(device, milli) for device in devices or (FIRST,)]
    if mode is not None:
        shares = [replace(share, mode=mode) for share in shares]
    return sessions.session(session_id, *shares)


def words_of(tmp_path: Path, name: int | str) -> Path:
    return lending.folder_of(tmp_path / "shm" / "fgpu-abc", str(name))


def owners(tmp_path: Path, session_id: int, index: int = 0) -> list[int]:
    """What a session is told of who owns what."""
    return list((words_of(tmp_path, session_id) / str(index) / lending.OWNERS).read_bytes())


def heard(tmp_path: Path, session_id: int, index: int = 0) -> dict[int, bytes]:
    """The words that a session can read."""
    folder = words_of(tmp_path, session_id) / str(index)
    return {int(path.name): path.read_bytes() for path in folder.iterdir() if path.name != lending.OWNERS}


def says(tmp_path: Path, name: int | str, word: bytes) -> None:
    """Write a session's word as the session does: into the file that it has mounted."""
    with (words_of(tmp_path, name) / "own-0").open("r+b") as file:
        file.write(word)


def numbers(prepared: Prepared) -> list[int]:
    return [limit.lending for limit in prepared.limits.devices]


def test_each_session_of_a_gpu_has_its_own_number_and_slots(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert [numbers(found.prepare(session(n), [7, 8, 9])) for n in (7, 8, 9)] == [[1], [2], [3]]
    for n in (7, 8, 9):
        assert owners(tmp_path, n) == [1] * 25 + [2] * 25 + [3] * 25 + [0] * 25


def test_word_is_visible_to_sessions_of_the_same_gpu_only(tmp_path: Path) -> None:
    found = opened(tmp_path)
    live = [7, 8, 9]
    for n, device in ((7, FIRST), (8, FIRST), (9, SECOND)):
        found.prepare(session(n, device), live)
    says(tmp_path, 8, b"\x08" * 8)
    says(tmp_path, 9, b"\x09" * 8)
    assert heard(tmp_path, 7) == heard(tmp_path, 8) == {1: bytes(8), 2: b"\x08" * 8}
    assert heard(tmp_path, 9) == {1: b"\x09" * 8}


def test_ended_session_owns_no_slots_and_leaves_no_word(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(7), [7])
    old = (words_of(tmp_path, 7) / "own-0").open("r+b")
    old.write(b"\xff" * 8)
    old.flush()
    found.prepare(session(8), [7, 8])
    found.prune([8])
    assert owners(tmp_path, 8) == [0] * 25 + [2] * 25 + [0] * 50
    assert heard(tmp_path, 8) == {2: bytes(8)}
    again = found.prepare(session(9), [8, 9])
    assert numbers(again) == [1]
    old.write(b"\xff" * 8)
    old.close()
    assert heard(tmp_path, 8) == heard(tmp_path, 9) == {1: bytes(8), 2: bytes(8)}
    found.prune([])
    left = [path.name for path in (tmp_path / "shm" / "fgpu-abc").rglob("*")]
    assert sorted(left) == ["ledger", "lending", "simulated-lab"]


def test_container_can_write_only_its_own_words(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(6), [6])
    prepared = found.prepare(session(7, FIRST, SECOND), [6, 7])
    own = words_of(tmp_path, 7)
    mounts = {m.target: (m.source, m.read_only) for m in prepared.mounts if "lending" in m.target}
    assert mounts == {
        "/run/fgpu/lending": (own, True),
        "/run/fgpu/lending/own-0": (own / "own-0", False),
        "/run/fgpu/lending/own-1": (own / "own-1", False),
    }
    modes = {p.relative_to(own).as_posix(): stat.S_IMODE(p.stat().st_mode) for p in own.rglob("*")}
    words = {"own-0": 0o666, "own-1": 0o666, "0/1": 0o666, "0/2": 0o666, "1/1": 0o666}
    assert modes == {"0": 0o755, "1": 0o755, "0/owners": 0o644, "1/owners": 0o644} | words
    assert stat.S_IMODE(own.stat().st_mode) == 0o755
    assert (found.folder(7) / "lending").is_dir(), "a place to mount it on"


def test_a_local_session_finds_the_same_in_its_folder(tmp_path: Path) -> None:
    found = opened(tmp_path, own_root=False)
    found.prepare(session(7, FIRST, SECOND), [7])
    lent = found.folder(7) / "lending"
    for n in (0, 1):
        assert (lent / str(n) / "1").samefile(lent / f"own-{n}")
        assert len((lent / str(n) / "owners").read_bytes()) == 100


def test_all_sessions_see_new_owners_at_once(tmp_path: Path) -> None:
    found = opened(tmp_path)
    for n in (7, 8):
        found.prepare(session(n), [7, 8])
    one, two = (words_of(tmp_path, n) / "0" / "owners" for n in (7, 8))
    assert one.samefile(two)
    before = one.stat().st_ino
    found.prepare(session(9), [7, 8, 9])
    assert one.stat().st_ino == before, "processes that have it open see it too"


def test_unlinkable_word_keeps_its_slots_to_itself(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(7), [7])
    (words_of(tmp_path, 7) / "own-0").unlink()
    found.prepare(session(8), [7, 8])
    assert owners(tmp_path, 8) == [1] * 25 + [2] * 25 + [0] * 50
    assert heard(tmp_path, 8) == {2: bytes(8)}, "a word that is not there keeps its slots"


@pytest.mark.parametrize("milli", [100, 500, 1000])
def test_limits_that_lend_are_read_as_they_were_written(tmp_path: Path, milli: int) -> None:
    found = opened(tmp_path, max_percent=40)
    prepared = found.prepare(session(7, milli=milli), [7])
    assert limits.read(found.folder(7)) == prepared.limits
    (limit,) = prepared.limits.devices
    assert limit.most_percent == max(40, milli // 20), "a share is never cut"
    assert f" lending=1 most_percent={limit.most_percent} code_mib=0\n" in limits.render(prepared.limits)


def test_what_does_not_lend_is_kept(tmp_path: Path) -> None:
    strict = opened(tmp_path, compute="strict")
    assert numbers(strict.prepare(session(7), [7])) == [0]
    found = opened(tmp_path)
    assert numbers(found.prepare(session(8), [7, 8])) == [1]
    assert owners(tmp_path, 8) == [lending.NOT_LENT] * 25 + [1] * 25 + [0] * 50


def test_a_whole_gpu_and_one_that_shares_memory_only_lend_nothing(tmp_path: Path) -> None:
    found = opened(tmp_path)
    assert numbers(found.prepare(session(7, milli=2000), [7])) == [0]
    assert numbers(found.prepare(session(8, SECOND, mode=ShareMode.MEMORY), [7, 8])) == [0]


def test_without_libfgpu_nothing_is_lent(tmp_path: Path) -> None:
    assert numbers(opened(tmp_path, isolation="none").prepare(session(7), [7])) == [0]


def test_without_a_place_in_memory_words_are_in_the_data_folder(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.host = replace(found.host, accounting=None)
    backend = type(found.backend_of(session(7)))(found.host)
    assert numbers(backend.prepare(session(7), (FIRST,), ())) == [1]
    assert found.words_folder("7") == found.host.data / "memory" / "lending" / "7"


def test_a_container_that_was_warm_lends_with_the_word_that_it_had(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(6), [6])
    found.make_warm("warm-1", [], words=1)
    word = (words_of(tmp_path, "warm-1") / "own-0").open("r+b")
    folder = words_of(tmp_path, "warm-1").stat().st_ino
    found.prepare(session(7), [6, 7])
    found.adopt(7, "warm-1")
    assert words_of(tmp_path, 7).stat().st_ino == folder, "which it has mounted"
    assert limits.read(found.folder(7)).devices[0].lending == 2
    word.write(b"\x07" * 8)
    word.close()
    assert heard(tmp_path, 6) == heard(tmp_path, 7) == {1: bytes(8), 2: b"\x07" * 8}
    assert owners(tmp_path, 6) == owners(tmp_path, 7) == [1] * 25 + [2] * 25 + [0] * 50


def test_warm_container_sees_no_words_and_leaves_none(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(6), [6])
    found.make_warm("warm-1", [], words=1)
    found.make_warm("warm-2", [], words=1)
    found.prepare(session(7), [6, 7])
    assert heard(tmp_path, "warm-1") == {}
    found.forget_warm("warm-1")
    assert not words_of(tmp_path, "warm-1").exists()
    found.forget_warm()
    assert sorted(path.name for path in words_of(tmp_path, 6).parent.iterdir()) == ["6", "7"]


def now_ms() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 10**6


@pytest.mark.parametrize("lends", [True, False])
def test_session_that_can_be_parked_has_a_word_to_ask_for_its_gpu(tmp_path: Path, lends: bool) -> None:
    found = opened(tmp_path)
    found.host = replace(found.host, parks=True, lends=lends)
    prepared = type(found.backend_of(session(7)))(found.host).prepare(session(7), (FIRST,), ())
    writable = [m.target for m in prepared.mounts if not m.read_only and "lending" in m.target]
    assert writable == [*["/run/fgpu/lending/own-0"][:lends], "/run/fgpu/lending/wanted"]
    word = words_of(tmp_path, 7) / "wanted"
    assert stat.S_IMODE(word.stat().st_mode) == 0o666
    assert not lending.is_wanted(word.parents[2], "7")
    assert word in lending.words(word.parents[2])


@pytest.mark.parametrize(
    ("word", "wanted"),
    [
        (lambda: now_ms().to_bytes(8, "little"), True),
        (lambda: (now_ms() - 4000).to_bytes(8, "little"), True),
        (lambda: (now_ms() - 6000).to_bytes(8, "little"), False),
        (lambda: (now_ms() + 60000).to_bytes(8, "little"), False),
        (lambda: b"\xff" * 8, False),
        (lambda: now_ms().to_bytes(9, "little"), False),
        (lambda: b"", False),
    ],
)
def test_gpu_is_wanted_while_the_word_is_recent(tmp_path: Path, word: Any, wanted: bool) -> None:
    folder = lending.make_words(tmp_path, "7", 0, parks=True)
    (folder / "wanted").write_bytes(word())
    assert lending.is_wanted(tmp_path, "7") is wanted


def test_word_that_a_session_replaced_is_not_followed(tmp_path: Path) -> None:
    folder = lending.make_words(tmp_path, "7", 0, parks=True)
    (tmp_path / "other").write_bytes(now_ms().to_bytes(8, "little"))
    (folder / "wanted").unlink()
    assert not lending.is_wanted(tmp_path, "7")
    (folder / "wanted").symlink_to(tmp_path / "other")
    assert not lending.is_wanted(tmp_path, "7")
    (folder / "wanted").unlink()
    os.mkfifo(folder / "wanted")
    assert not lending.is_wanted(tmp_path, "7")
