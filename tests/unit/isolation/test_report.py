"""The probe's report: read like a stranger's letter, and compared with the limits in every way of asking."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpu_scheduler import ShareMode
from fgpuspawner.isolation.limits import DeviceLimit, Limits
from fgpuspawner.isolation.native import mapped_as
from fgpuspawner.isolation.report import (
    LARGEST_BYTES,
    Answer,
    BadReport,
    CheckpointReport,
    ProbeReport,
    checkpoint_command,
    missing_library,
    not_in_force,
    probe_command,
    problems,
    read_answer,
    static_command,
    uuid_bytes,
    wrong_preload,
)

MIB = 2**20
NONCE = "5f0c1e2d"
REAL = "GPU-51a0c3d4-0000-1111-2222-333344445555"
SIMULATED = "GPU-simulated-local-0"
Json = dict[str, Any]


def limit(uuid: str, memory_mib: int, device_mib: int = 8192) -> DeviceLimit:
    return DeviceLimit(uuid, memory_mib, device_mib, 0, 25, ShareMode.MEMORY_COMPUTE, ((0, 25),))


PART = Limits(7, "charge", (limit(REAL, 2048),))
WHOLE = Limits(7, "charge", (limit(REAL, 8192), limit(SIMULATED, 8192)))


def report(limits: Limits, **totals_mib: int) -> Json:
    """Return what the probe prints where everything is right; ``totals_mib`` are other totals by way of asking."""

    def totals(own: DeviceLimit, *ways: str) -> dict[str, int]:
        return {way: totals_mib.get(way, own.memory_mib) * MIB for way in ways}

    cuda = [
        {
            "error": None,
            "uuid_bytes": uuid_bytes(own.uuid),
            "total_bytes": totals(own, "dlsym", "legacy", "per_thread"),
        }
        for own in limits.devices
    ]
    nvml = [
        {"error": None, "uuid": own.uuid, "total_bytes": totals(own, "v1", "v2")} for own in limits.devices
    ]
    tried = [
        {"uuid": own.uuid, "error": None, "total_bytes": own.memory_mib * MIB, "over": {"code": 2}}
        for own in limits.devices
        if not own.whole
    ]
    found: Json = {
        "probe": 1,
        "nonce": NONCE,
        "libfgpu": [{"path": "/run/fgpu/libfgpu.so", "device": "08:01", "inode": 4711}],
        "preload": {"error": None, "content": "/run/fgpu/libfgpu.so\n", "read_only": True, "mount": True},
        "cuda": {"status": "ok", "error": None, "code": 0, "devices": cuda},
        "nvml": {"status": "ok", "error": None, "code": 0, "devices": nvml},
    }
    if tried:
        found["allocate"] = {"status": "ok", "error": None, "code": 0, "devices": tried}
    return found


def answer(found: Any, status: int | None = 0) -> Answer:
    return Answer(json.dumps(found).encode(), status)


def said(limits: Limits, found: Json) -> list[str]:
    return problems(limits, read_answer(ProbeReport, answer(found), NONCE))


# --- What is right ---


@pytest.mark.parametrize("limits", [PART, WHOLE], ids=["part", "whole"])
def test_a_session_that_sees_its_limits_has_no_problem(limits: Limits) -> None:
    assert said(limits, report(limits)) == []


def test_ways_that_an_old_driver_lacks_are_not_held_against_it() -> None:
    found = report(PART)
    found["cuda"]["devices"][0]["total_bytes"] |= {"legacy": None, "per_thread": None}
    found["nvml"]["devices"][0]["total_bytes"]["v2"] = None
    assert said(PART, found) == []


def test_nvml_may_show_what_cannot_be_used() -> None:
    found = report(PART)
    other = copy.deepcopy(found["nvml"]["devices"][0]) | {"uuid": "GPU-other"}
    other["total_bytes"] = {"v1": 80000 * MIB, "v2": None}
    found["nvml"]["devices"].append(other)
    assert said(PART, found) == []


@pytest.mark.parametrize("failed", ["section", "device"])
def test_slice_too_small_for_a_context_passes(failed: str) -> None:
    found = report(PART)
    words = "cuDevicePrimaryCtxRetain: CUDA_ERROR_OUT_OF_MEMORY (2)"
    if failed == "section":
        found["allocate"] = {"status": "failed", "error": words, "code": 2}
    else:
        found["allocate"]["devices"] = [{"uuid": REAL, "error": words}]
    assert said(PART, found) == []


# --- What is wrong ---


@pytest.mark.parametrize("way", ["dlsym", "legacy", "per_thread", "v1", "v2"])
@pytest.mark.parametrize("mib", [8192, 2049, 2047])
def test_a_total_that_is_not_the_limit_is_a_problem_in_every_way_of_asking(way: str, mib: int) -> None:
    label = "NVML" if way.startswith("v") else "CUDA"
    assert said(PART, report(PART, **{way: mib})) == [
        f"{label} reported {mib} MiB of GPU {REAL} ({way}), not 2048 MiB"
    ]


@pytest.mark.parametrize("mib", [0, 8193])
def test_total_of_a_whole_device_is_not_zero_and_not_larger(mib: int) -> None:
    assert len(said(WHOLE, report(WHOLE, v1=mib))) == 2


def spoilt(path: str, value: Any) -> Callable[[Json], None]:
    """Return a function that puts a value at a path such as ``cuda.devices.0.error``."""

    def spoil(found: Json) -> None:
        *way, last = path.split(".")
        for step in way:
            found = found[int(step) if step.isdigit() else step]  # type: ignore[index]
        found[last] = value

    return spoil


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (
            "cuda",
            {"status": "missing", "error": "no such library", "code": None},
            "CUDA could not be asked: missing",
        ),
        ("cuda", {"status": "crashed"}, "CUDA could not be asked: crashed"),
        ("nvml", {"status": "timed_out", "error": "nvmlInit_v2", "code": None}, "timed_out, nvmlInit_v2"),
        ("cuda.devices", [], f"CUDA does not show GPU {REAL}"),
        ("nvml.devices", [], f"NVML does not show GPU {REAL}"),
        ("cuda.devices.0.uuid_bytes", None, f"CUDA does not show GPU {REAL}"),
        ("cuda.devices.0.uuid_bytes", "00" * 16, "CUDA shows 1 GPUs that are not the session's"),
        ("cuda.devices.0.error", "cuDeviceGet: lost (999)", f"CUDA fails for GPU {REAL}: cuDeviceGet"),
        ("cuda.devices.0.total_bytes", {"dlsym": None}, f"CUDA does not tell the memory of GPU {REAL}"),
        ("nvml.devices.0.total_bytes", {}, f"NVML does not tell the memory of GPU {REAL}"),
        ("allocate", None, ""),
        ("allocate", {"status": "crashed"}, "allocating could not be tried: crashed"),
        (
            "allocate",
            {"status": "failed", "error": "lost", "code": 999},
            "allocating could not be tried: failed, lost",
        ),
        ("allocate.devices", [], f"allocating on GPU {REAL} was not tried"),
        (
            "allocate.devices.0.error",
            "the driver shows no such device",
            "could not be tried: the driver shows no",
        ),
        ("allocate.devices.0.over.code", 0, f"more than 2048 MiB of GPU {REAL} could be allocated"),
        ("allocate.devices.0.over.code", 999, "failed with 999, not with 2"),
    ],
)
def test_what_is_wrong_is_named(path: str, value: Any, words: str) -> None:
    found = report(PART)
    if path == "allocate" and value is None:
        del found["allocate"]
        assert said(PART, found) == ["allocating more than the limit was not tried"]
        return
    spoilt(path, value)(found)
    assert words in "; ".join(said(PART, found))


def test_exactly_the_hosts_library_has_to_be_loaded() -> None:
    found = report(PART)
    own = read_answer(ProbeReport, answer(found), NONCE)
    assert missing_library(own, ("08:01", 4711)) == []
    assert missing_library(own, ("08:01", 4712)) == ["libfgpu is not loaded into the session's processes"]
    assert missing_library(own, ("08:02", 4711)) == ["libfgpu is not loaded into the session's processes"]
    found["libfgpu"].append({"path": "/tmp/libfgpu.so", "device": "08:01", "inode": 1})
    assert missing_library(read_answer(ProbeReport, answer(found), NONCE), ("08:01", 4711)) == [
        "1 other libraries of its name are loaded beside libfgpu"
    ]
    for empty, words in (([], "is not loaded"), (None, "cannot be told")):
        (said,) = missing_library(
            read_answer(ProbeReport, answer(found | {"libfgpu": empty}), NONCE), ("08:01", 4711)
        )
        assert words in said


def test_a_mapping_is_known_as_the_kernel_tells_of_it(tmp_path: Path) -> None:
    path = tmp_path / "a library.so"
    path.write_bytes(b"x" * 5000)
    device, inode = mapped_as(path)
    assert inode == path.stat().st_ino
    assert ":" in device


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({}, []),
        ({"error": "ENOENT"}, ["/etc/ld.so.preload cannot be read: ENOENT"]),
        ({"content": ""}, ["/etc/ld.so.preload is not the one of the session"]),
        (
            {"content": "/run/fgpu/libfgpu.so\n/evil.so\n"},
            ["/etc/ld.so.preload is not the one of the session"],
        ),
        ({"mount": False}, ["/etc/ld.so.preload is no read-only mount"]),
        ({"read_only": False}, ["/etc/ld.so.preload is no read-only mount"]),
        ({"read_only": 1}, ["/etc/ld.so.preload is no read-only mount"]),
    ],
)
def test_the_preload_file_has_to_be_ours_and_mounted_read_only(change: Json, words: list[str]) -> None:
    found = report(PART)
    found["preload"] |= change
    assert wrong_preload(read_answer(ProbeReport, answer(found), NONCE), "/run/fgpu/libfgpu.so\n") == words


def test_no_look_at_the_preload_file_is_no_pass() -> None:
    assert wrong_preload(None, "x") == ["/etc/ld.so.preload was not looked at"]


# --- A stranger's letter ---


@pytest.mark.parametrize(
    ("output", "status", "words"),
    [
        (b"", 0, "printed no report"),
        (b"{}", 0, "printed no report"),
        (b"[]", 0, "printed no report"),
        (b"null", 0, "printed no report"),
        (b"\xff", 0, "printed no report"),
        (b"[" * 60000, 0, "printed no report"),
        (b"9" * 60000, 0, "printed no report"),
        (b"x" * (LARGEST_BYTES + 1), 0, "more than a check does"),
        (json.dumps(report(PART)).encode(), 1, "ended with status 1"),
        (b"", -8, "the check crashed by SIGFPE"),
        (b"", 136, "the check crashed by SIGFPE"),
        (json.dumps(report(PART)).encode(), 137, "ended with status 137"),
        (json.dumps(report(PART) | {"nonce": "old"}).encode(), 0, "another report"),
        (json.dumps({k: v for k, v in report(PART).items() if k != "nonce"}).encode(), 0, "another report"),
        (json.dumps(report(PART) | {"probe": 2}).encode(), 0, "printed no report"),
    ],
)
def test_what_is_no_report_is_refused(output: bytes, status: int, words: str) -> None:
    with pytest.raises(BadReport, match=words):
        read_answer(ProbeReport, Answer(output, status), NONCE)


@pytest.mark.parametrize("number", [2048.0 * MIB, True, -1, 2**63, "2147483648"])
def test_a_number_is_a_whole_one_that_there_can_be(number: Any) -> None:
    found = report(PART)
    found["cuda"]["devices"][0]["total_bytes"]["dlsym"] = number
    with pytest.raises(BadReport):
        read_answer(ProbeReport, answer(found), NONCE)


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


def paths(found: Any, way: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return every path into a report."""
    items = found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ()
    return [way, *(path for key, value in items for path in paths(value, (*way, key)))]


@given(path=st.sampled_from([p for p in paths(report(PART)) if p]), value=values)
def test_any_value_anywhere_is_refused_or_compared(path: tuple[Any, ...], value: Any) -> None:
    found = report(PART)
    place = found
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    try:
        lines = problems(PART, read_answer(ProbeReport, answer(found), NONCE))
    except BadReport:
        return
    assert all(line.isprintable() for line in lines)


def test_what_a_session_says_is_cut_and_cannot_write_into_a_terminal() -> None:
    found = report(PART)
    found["cuda"] = {"status": "failed", "error": "\x1b[2J" + "x" * 9999, "code": 1}
    (line,) = said(PART, found)
    assert "\x1b" not in line
    assert len(line) < 300


# --- What is asked, and what the owner is told ---


def test_probe_tries_to_exceed_partial_devices_only() -> None:
    assert probe_command("n", PART, timeout_s=48) == [
        "probe",
        "--nonce",
        "n",
        "--timeout",
        "48",
        "--allocate",
        f"{REAL}=2048",
    ]
    assert "--allocate" not in probe_command("n", WHOLE, timeout_s=48)
    assert static_command("n", timeout_s=48) == ["probe-static", "--nonce", "n", "--timeout", "48"]


@pytest.mark.parametrize(
    ("uuid", "expected"),
    [
        (REAL, "51a0c3d4000011112222333344445555"),
        ("MIG-51A0C3D4-0000-1111-2222-333344445555", "51a0c3d4000011112222333344445555"),
        # FNV-1a of nothing and of "a", from its reference.
        ("GPU-", "6c62272e07bb014262b821756295c58d"),
        ("GPU-a", "d228cb696f1a8caf78912b704e4a8964"),
    ],
)
def test_a_device_is_known_by_the_bytes_that_cuda_tells(uuid: str, expected: str) -> None:
    assert uuid_bytes(uuid) == expected


def test_the_owner_is_told_limit_finding_and_what_to_do() -> None:
    found = said(PART, report(PART, dlsym=8192) | {"nvml": {"status": "crashed"}})
    assert not_in_force(PART, found, image="torch") == (
        "your session was ended because its GPU limit of 2048 MiB was not in force (CUDA reported 8192 MiB); this is "
        "usually the fault of the image (torch): try another one, or ask an administrator"
    )
    crashed = said(PART, report(PART) | {"nvml": {"status": "crashed"}})
    assert "not in force (NVML could not be asked: crashed); this is" in not_in_force(
        PART, crashed, image="torch"
    )


PARKED = {
    "probe": 1,
    "nonce": NONCE,
    "done": True,
    "processes": [{"pid": 17, "state": "checkpointed", "error": None, "ms": 12}],
    "why": None,
}


def test_report_of_a_parked_session_is_read() -> None:
    assert checkpoint_command(NONCE, "/a", "park", timeout_s=60)[-2:] == ["--park", "/a"]
    found = read_answer(CheckpointReport, Answer(json.dumps(PARKED).encode(), 0), NONCE)
    assert (found.done, found.why) == (True, None)
    assert [(p.pid, p.state, p.error, p.ms) for p in found.processes] == [(17, "checkpointed", None, 12)]


@pytest.mark.parametrize(
    "wrong",
    [
        {"nonce": "other"},
        {"probe": 2},
        {"processes": [{"pid": -1, "state": "locked", "error": None, "ms": 0}]},
        {"processes": [PARKED["processes"][0]] * 1025},  # type: ignore[index]
        {"processes": None},
        {"why": 7},
    ],
)
def test_other_text_is_no_report_of_a_parked_session(wrong: Json) -> None:
    with pytest.raises(BadReport):
        read_answer(CheckpointReport, Answer(json.dumps({**PARKED, **wrong}).encode(), 0), NONCE)


def test_only_true_means_done() -> None:
    for done in (1, "true", None, [True]):
        assert not read_answer(
            CheckpointReport, Answer(json.dumps({**PARKED, "done": done}).encode(), 0), NONCE
        ).done
