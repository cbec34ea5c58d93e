"""The limits file: its exact text, who may write it, that it is whole or absent; and what a session is told."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpu_scheduler import Device, Placement, Request, Session, SessionState, Share, ShareMode
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.files import make_folder
from fgpuspawner.isolation.limits import BadLimits, DeviceLimit, Limits, assign_slots, limits_of

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
MEMORY_ONLY = session(Share("GPU-a", 500, 2048, 0, ShareMode.MEMORY))


def of(given: Session, *neighbours: Limits, managed: str = "charge", **contexts: int) -> Limits:
    """Return the limits of a session on the two devices; ``contexts`` are by the letter of the UUID."""
    context_mib = {f"GPU-{letter}": amount for letter, amount in contexts.items()}
    return limits_of(given, (SMALL, ODD), neighbours, managed=managed, context_mib=context_mib)


def written(folder: Path, given: Limits) -> Path:
    return limits.write(make_folder(folder / str(given.session_id), mode=0o755), given)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (
            of(HALF),
            "fgpu-limits 1\n"
            "session=12\n"
            "managed=charge\n"
            "device=GPU-a memory_mib=2048 device_mib=8192 context_mib=0 compute_percent=25 mode=memory+compute"
            " slots=0-25 code_mib=0\n"
            "end\n",
        ),
        (
            of(TWO, managed="refuse", b=300),
            "fgpu-limits 1\n"
            "session=12\n"
            "managed=refuse\n"
            "device=GPU-a memory_mib=8192 device_mib=8192 context_mib=0 compute_percent=100 mode=memory+compute"
            " slots=0-100 code_mib=0\n"
            "device=GPU-b memory_mib=16160 device_mib=16160 context_mib=300 compute_percent=100 mode=memory+compute"
            " slots=0-100 code_mib=0\n"
            "end\n",
        ),
        (
            of(MEMORY_ONLY),
            "fgpu-limits 1\n"
            "session=12\n"
            "managed=charge\n"
            "device=GPU-a memory_mib=2048 device_mib=8192 context_mib=0 compute_percent=0 mode=memory slots=-"
            " code_mib=0\n"
            "end\n",
        ),
    ],
    ids=["half", "two", "memory only"],
)
def test_the_text_is_exactly_this(given: Limits, text: str, tmp_path: Path) -> None:
    assert limits.render(given) == text
    assert written(tmp_path, given).read_bytes() == text.encode("ascii")
    assert limits.read(tmp_path / "12") == given


# --- What a session gets ---


def test_slots_are_beside_those_of_the_neighbours_on_the_same_device() -> None:
    first = of(session(Share.of(SMALL, 1000), session_id=1))
    second = of(session(Share.of(SMALL, 500), session_id=2), first)
    elsewhere = of(session(Share.of(ODD, 500), session_id=3), first, second)
    assert [limit.devices[0].slots for limit in (first, second, elsewhere)] == [
        ((0, 50),),
        ((50, 75),),
        ((0, 25),),
    ]


def test_a_session_that_is_launched_again_is_not_its_own_neighbour() -> None:
    first = of(HALF)
    assert of(HALF, first) == first


def test_limits_have_no_slots_where_another_backend_limits_compute() -> None:
    found = limits_of(HALF, (SMALL,), (), managed="charge", context_mib={}, compute=False)
    (device,) = found.devices
    assert (device.mode, device.slots, device.compute_percent) == (ShareMode.MEMORY, (), 25)


def test_a_limit_is_never_above_the_device_which_libfgpu_would_refuse() -> None:
    shrunk = replace(SMALL, memory_mib=1900)
    found = limits_of(HALF, (shrunk,), (), managed="charge", context_mib={})
    assert (found.devices[0].memory_mib, found.devices[0].device_mib) == (1900, 1900)


def test_a_share_of_a_device_that_is_gone_is_refused_in_words_for_the_owner() -> None:
    with pytest.raises(BadLimits, match="GPU GPU-b is no longer configured; ask for a new session"):
        limits_of(TWO, (SMALL,), (), managed="charge", context_mib={})


def test_code_is_charged_where_contexts_are() -> None:
    assert [d.code_mib for d in of(TWO).devices] == [0, None], "a real context would be counted as code"
    assert [d.code_mib for d in of(TWO, b=300).devices] == [0, 0]


# --- The text, read back ---

amounts = st.integers(1, 10**9)
device_limits = st.builds(
    DeviceLimit,
    uuid=st.from_regex(r"(GPU|MIG)-[0-9a-f-]{1,40}", fullmatch=True),
    memory_mib=amounts,
    device_mib=amounts,
    context_mib=st.integers(0, 10**6),
    compute_percent=st.integers(1, 100),
    mode=st.just(ShareMode.MEMORY_COMPUTE),
    slots=st.integers(1, 100).map(lambda percent: assign_slots([], percent)),
    code_mib=st.none() | st.integers(0, 10**6),
)


@given(
    st.builds(
        Limits,
        session_id=st.integers(1, 10**18 - 1),
        managed=st.sampled_from(limits.MANAGED),
        devices=st.lists(device_limits, min_size=1, max_size=16).map(tuple),
    )
)
def test_what_is_written_is_read_back_as_it_was(given: Limits) -> None:
    assert limits.parse(limits.render(given)) == given


@pytest.mark.parametrize(
    "change",
    [
        ("fgpu-limits 1", "fgpu-limits 2"),
        ("session=12", "session="),
        ("session=12", "session=-12"),
        ("managed=charge\n", ""),
        ("managed=charge", "managed=ignore"),
        ("end\n", ""),
        ("end\n", "end"),
        ("device=GPU-a", "device=XPU-a"),
        ("memory_mib=2048", "memory_mib=2048 memory_mib=1"),
        ("code_mib=0", "code_mib=-1"),
        ("code_mib=0", "code_mib=00"),
        ("slots=0-25", "slots="),
        ("slots=0-25", "slots=-"),
        ("slots=0-25", "slots=0-101"),
        ("mode=memory+compute", "mode=compute"),
        ("compute_percent=25", "compute_percent=-25"),
    ],
)
def test_a_text_that_is_not_limits_is_refused(change: tuple[str, str]) -> None:
    text = limits.render(of(HALF))
    assert text != text.replace(*change)
    with pytest.raises(BadLimits):
        limits.parse(text.replace(*change))


@pytest.mark.parametrize("cut", range(0, 150, 7))
def test_a_text_that_was_cut_off_is_refused(cut: int) -> None:
    with pytest.raises(BadLimits):
        limits.parse(limits.render(of(HALF))[:cut])


def test_what_is_no_file_of_ours_is_not_read(tmp_path: Path) -> None:
    path = written(tmp_path, of(HALF))
    for spoil in (
        lambda: path.write_bytes(b"fgpu-limits 1\n" * 2000),
        lambda: path.write_bytes(b"\xff\xfe"),
        lambda: path.symlink_to(tmp_path / "other"),
        lambda: os.mkfifo(path),
        lambda: path.mkdir(),
    ):
        path.unlink(missing_ok=True)
        spoil()
        with pytest.raises(BadLimits):
            limits.read(path.parent)


# --- The file ---


def test_a_new_file_replaces_the_old_one_at_once(tmp_path: Path) -> None:
    path = written(tmp_path, of(HALF))
    with path.open() as reader:
        written(tmp_path, of(MEMORY_ONLY))
        # Who had it open reads the whole old one; who opens it now, the whole new one.
        assert reader.read() == limits.render(of(HALF))
    assert path.read_text() == limits.render(of(MEMORY_ONLY))
    assert [p.name for p in path.parent.iterdir()] == ["limits"]


def test_a_link_in_the_drafts_place_is_not_followed(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_text("not ours")
    (tmp_path / "12").mkdir()
    (tmp_path / "12" / "limits.new").symlink_to(other)
    written(tmp_path, of(HALF))
    assert other.read_text() == "not ours"


def test_more_than_libfgpu_would_read_is_not_written(tmp_path: Path) -> None:
    device = of(HALF).devices[0]
    many = Limits(12, "charge", tuple(replace(device, uuid=f"GPU-{n}") for n in range(200)))
    with pytest.raises(BadLimits, match="200 devices are more than 16384 bytes"):
        written(tmp_path, many)
    assert list((tmp_path / "12").iterdir()) == []


# --- The gate ---


def test_gate_closes_and_opens_beside_the_count_of_changes(tmp_path: Path) -> None:
    path = limits.begin_revisions(tmp_path)
    limits.change(tmp_path, of(HALF))
    for close, change in ((True, False), (True, True), (False, True), (False, False)):
        (limits.close_gate if close else limits.open_gate)(tmp_path)
        assert limits.gate_closed(tmp_path) is close
        if change:
            limits.change(tmp_path, of(MEMORY_ONLY))
    assert path.read_bytes() == (3).to_bytes(8, "little") + bytes(8)
    assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_session_of_an_older_version_has_no_gate_and_its_limits_still_change(tmp_path: Path) -> None:
    (tmp_path / "revision").write_bytes(bytes(8))
    with pytest.raises(BadLimits, match="launched by an older version"):
        limits.close_gate(tmp_path)
    limits.open_gate(tmp_path)
    limits.change(tmp_path, of(HALF))
    assert not limits.gate_closed(tmp_path)
    assert (tmp_path / "revision").read_bytes() == (1).to_bytes(8, "little")


# --- What the session is told ---


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
