"""The limits file: its exact text, who may write it, that it is whole or absent; and what a session is told."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share, ShareMode
from fgpuspawner.isolation import limits

SMALL = Device("GPU-a", "local", 0, "Simulated GPU", 8192, 2000, True)
ODD = Device("GPU-b", "local", 1, "Tesla T4", 16160, 2000)


def session(*shares: Share, fgpu_milli: int = 500, session_id: int = 12) -> Session:
    request = Request("alice", "gpu-2", "python", "default", fgpu_milli, 1000, 2048)
    return Session(
        session_id,
        request,
        SessionState.SCHEDULED,
        0,
        placement=Placement("local", shares) if shares else None,
    )


HALF = session(Share.of(SMALL, 500))
TWO = session(Share.of(SMALL, 2000), Share.of(ODD, 2000), fgpu_milli=4000)
MEMORY_ONLY = session(Share("GPU-a", 500, 2048, 25, ShareMode.MEMORY))


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            HALF,
            "fgpu-limits 1\n"
            "session=12\n"
            "device=GPU-a memory_mib=2048 compute_percent=25 mode=memory+compute\n",
        ),
        (
            TWO,
            "fgpu-limits 1\n"
            "session=12\n"
            "device=GPU-a memory_mib=8192 compute_percent=100 mode=memory+compute\n"
            "device=GPU-b memory_mib=16160 compute_percent=100 mode=memory+compute\n",
        ),
        (
            MEMORY_ONLY,
            "fgpu-limits 1\nsession=12\ndevice=GPU-a memory_mib=2048 compute_percent=25 mode=memory\n",
        ),
    ],
)
def test_the_text_is_exactly_this(given: Session, text: str, tmp_path: Path) -> None:
    assert limits.render(given) == text
    assert limits.write(tmp_path, given).read_bytes() == text.encode("ascii")


def test_a_session_without_shares_has_no_limits_file(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="no limits"):
        limits.write(tmp_path, session())
    assert not (tmp_path / "12" / "limits").exists()


def test_the_file_is_where_the_container_mounts_it_from(tmp_path: Path) -> None:
    path = limits.write(tmp_path / "limits", HALF)
    assert path == tmp_path / "limits" / "12" / "limits"
    assert path.is_absolute()


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_nobody_may_write_it_and_everybody_may_read_it_whatever_the_umask(umask: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        path = limits.write(tmp_path, HALF)
    finally:
        os.umask(before)
    assert mode_of(path) == 0o444


def test_a_new_file_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    path = limits.write(tmp_path, HALF)
    with path.open() as reader:
        limits.write(tmp_path, MEMORY_ONLY)
        # Who had it open reads the whole old one; who opens it now, the whole new one.
        assert reader.read() == limits.render(HALF)
    assert path.read_text() == limits.render(MEMORY_ONLY)
    assert [p.name for p in path.parent.iterdir()] == ["limits"]


def test_a_draft_that_a_killed_hub_left_is_no_obstacle(tmp_path: Path) -> None:
    draft = tmp_path / "12" / "limits.new"
    draft.parent.mkdir()
    draft.write_text("fgpu-limits 1\ndevice=")
    draft.chmod(0o444)
    path = limits.write(tmp_path, HALF)
    assert path.read_text() == limits.render(HALF)
    assert not draft.exists()


def test_a_link_in_the_drafts_place_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "limits.new").symlink_to(other)
    limits.write(tmp_path, HALF)
    assert other.read_text() == "not ours"


def test_removing_it_twice_is_fine(tmp_path: Path) -> None:
    limits.write(tmp_path, HALF)
    limits.remove(tmp_path, 12)
    limits.remove(tmp_path, 12)
    assert list(tmp_path.iterdir()) == []


def test_pruning_keeps_the_living_and_what_is_not_a_sessions(tmp_path: Path) -> None:
    for number in (1, 2, 12):
        limits.write(tmp_path, session(Share.of(SMALL, 500), session_id=number))
    (tmp_path / "notes").mkdir()
    limits.prune(tmp_path, [2])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["2", "notes"]
    assert (tmp_path / "2" / "limits").exists()


def test_pruning_before_anything_was_written_is_fine(tmp_path: Path) -> None:
    limits.prune(tmp_path / "none", [])
    assert not (tmp_path / "none").exists()


def test_a_session_is_told_its_slice() -> None:
    assert limits.environment(HALF, limits_path="/run/fgpu/limits", simulated=True) == {
        "FGPU_SESSION_ID": "12",
        "FGPU_AMOUNT": "0.5",
        "FGPU_MEMORY_MIB": "2048",
        "FGPU_COMPUTE_PERCENT": "25",
        "FGPU_LIMITS_FILE": "/run/fgpu/limits",
        "FGPU_SIMULATED": "1",
        "NVIDIA_VISIBLE_DEVICES": "GPU-a",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        "CUDA_VISIBLE_DEVICES": "GPU-a",
    }


def test_several_gpus_are_told_as_sums_and_a_list() -> None:
    told = limits.environment(TWO, limits_path="/x", simulated=False)
    assert (told["FGPU_AMOUNT"], told["FGPU_MEMORY_MIB"], told["FGPU_COMPUTE_PERCENT"]) == (
        "4",
        "24352",
        "200",
    )
    assert (told["CUDA_VISIBLE_DEVICES"], told["NVIDIA_VISIBLE_DEVICES"]) == ("GPU-a,GPU-b", "GPU-a,GPU-b")
    assert told["FGPU_SIMULATED"] == "0"
