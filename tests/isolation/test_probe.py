"""isolation/probe: one line of JSON from inside a session, whatever the driver does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from insession import in_container
from sessionfolders import UUID, MakePath, preloaded

MIB = 1 << 20


def run(program: Path, *words: str | bytes, env: dict[str, str], stdout: Any = subprocess.PIPE) -> Any:
    return subprocess.run([program, *words], env=env, stdout=stdout, stderr=subprocess.PIPE, timeout=60)


def report(program: Path, *words: str | bytes, env: dict[str, str]) -> Any:
    """Return the report; it must be one line of ASCII."""
    done = run(program, *words, env=env)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.endswith(b"\n")
    assert done.stdout.count(b"\n") == 1
    assert done.stdout.isascii()
    return json.loads(done.stdout)


def plain(folder: Path) -> dict[str, str]:
    """The environment of a process without libfgpu."""
    return {k: v for k, v in preloaded(folder).items() if k != "LD_PRELOAD"}


def totals(told: Any) -> list[int | None]:
    """Every total in a report, by all ways of asking."""
    assert (told["cuda"]["status"], told["nvml"]["status"]) == ("ok", "ok")
    devices = told["cuda"]["devices"] + told["nvml"]["devices"]
    return [total for device in devices for total in device["total_bytes"].values()]


def test_the_probe_sees_the_limit_in_every_way_of_asking(folder: Path) -> None:
    told = report(folder / "probe", "--nonce", "5f0c", env=preloaded(folder))
    assert totals(told) == [2048 * MIB] * 5
    assert (told["probe"], told["nonce"], told["static"]) == (1, "5f0c", False)
    library = (folder / "libfgpu.so").resolve()
    assert [(entry["path"], entry["inode"]) for entry in told["libfgpu"]] == [
        (str(library), library.stat().st_ino)
    ]
    assert told["nvml"]["devices"][0]["uuid"] == UUID
    assert "allocate" not in told


def test_two_devices_are_told_apart_by_the_bytes_of_their_uuids(session_folder: MakePath) -> None:
    spelled = "GPU-51a0c0de-0000-1111-2222-333344445555"
    folder = session_folder(devices=[(spelled, 1024), ("GPU-a", 2048)])
    told = report(folder / "probe", env=preloaded(folder))
    found = {d["uuid_bytes"]: set(d["total_bytes"].values()) for d in told["cuda"]["devices"]}
    # The second is the published FNV-1a hash of "a".
    assert found == {
        "51a0c0de000011112222333344445555": {1024 * MIB},
        "d228cb696f1a8caf78912b704e4a8964": {2048 * MIB},
    }
    of_nvml = {d["uuid"]: set(d["total_bytes"].values()) for d in told["nvml"]["devices"]}
    assert of_nvml == {spelled: {1024 * MIB}, "GPU-a": {2048 * MIB}}


def test_past_the_limit_is_refused_and_half_of_it_is_to_be_had(session_folder: MakePath) -> None:
    spelled = "GPU-51a0c0de-0000-1111-2222-333344445555"
    folder = session_folder(devices=[(UUID, 2048), (spelled, 256)])
    words = [w for uuid, mib in ((UUID, 2048), (spelled, 256)) for w in ("--allocate", f"{uuid}={mib}")]
    devices = report(folder / "probe", *words, env=preloaded(folder))["allocate"]["devices"]
    assert [(d["uuid"], d["error"]) for d in devices] == [(UUID, None), (spelled, None)]
    for device, mib in zip(devices, (2048, 256), strict=True):
        assert (device["total_bytes"], device["free_bytes"]) == (mib * MIB, mib * MIB)
        assert device["over"] == {"bytes": (mib + 2) * MIB, "code": 2}
        assert device["half"] == {"bytes": mib * MIB // 2, "code": 0}
    [device, _] = report(folder / "probe", *words, env=plain(folder))["allocate"]["devices"]
    assert device["over"] == {"bytes": 2050 * MIB, "code": 0}


def test_a_device_that_is_not_there_is_an_error_of_its_own(folder: Path) -> None:
    told = report(folder / "probe", "--allocate", "GPU-other=1", env=preloaded(folder))
    assert told["allocate"]["devices"] == [{"uuid": "GPU-other", "error": "the driver shows no such device"}]


def test_while_the_limits_cannot_be_read_no_total_is_told(session_folder: MakePath) -> None:
    folder = session_folder("fgpu-limits 2\n")
    told = report(folder / "probe", "--allocate", f"{UUID}=2048", env=preloaded(folder))
    assert (told["nvml"]["status"], "devices" in told["nvml"]) == ("failed", False)
    assert told["cuda"]["devices"][0]["total_bytes"] == {"dlsym": None, "legacy": None, "per_thread": None}


def test_mig_instances_are_listed_with_their_parent(session_folder: MakePath) -> None:
    machine = (
        "gpu uuid=GPU-big memory_mib=81920 name=Simulated GPU\n"
        "mig parent=GPU-big uuid=MIG-small memory_mib=9728 name=1g.10gb\n"
    )
    folder = session_folder(devices=[("GPU-big", 81920)], machine=machine)
    told = report(folder / "probe", env=plain(folder))
    assert [(d["uuid"], d["parent"]) for d in told["nvml"]["devices"]] == [
        ("GPU-big", None),
        ("MIG-small", "GPU-big"),
    ]


@pytest.fixture
def misbehaving(compile_c: MakePath, tmp_path: Path) -> Callable[[str], dict[str, str]]:
    """The environment in which both libraries do this on their first call."""

    def misbehaving(what: str) -> dict[str, str]:
        library = compile_c("tests/probe_driver.c", "-shared", "-fPIC", f"-DMISBEHAVIOUR={what}")
        folder = tmp_path / library.name
        folder.mkdir()
        for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
            (folder / name).symlink_to(library)
        return {k: v for k, v in os.environ.items() if k != "LD_PRELOAD"} | {"LD_LIBRARY_PATH": str(folder)}

    return misbehaving


def outcomes(told: Any, *names: str) -> list[tuple[str, str]]:
    return [(told[name]["status"], told[name]["error"]) for name in names]


@pytest.mark.parametrize(
    ("does", "of_cuda", "of_nvml"),
    [
        (
            "raise(SIGSEGV)",
            ("crashed", "the probe crashed by SIGSEGV in cuInit", None),
            ("crashed", "the probe crashed by SIGSEGV in nvmlInit", None),
        ),
        (
            "return 9",
            ("failed", "cuInit: an error that the driver does not name (9)", 9),
            ("failed", "nvmlInit: Driver Not Loaded (9)", 9),
        ),
    ],
)
def test_a_driver_that_crashes_or_fails_is_told(
    isolation_build: Path, misbehaving: Any, does: str, of_cuda: tuple[Any, ...], of_nvml: tuple[Any, ...]
) -> None:
    told = report(isolation_build / "probe", "--allocate", "GPU-a=1", env=misbehaving(does))
    for name, expected in (("cuda", of_cuda), ("nvml", of_nvml), ("allocate", of_cuda)):
        assert (told[name]["status"], told[name]["error"], told[name]["code"]) == expected


def test_a_driver_that_hangs_is_told_in_time(isolation_build: Path, misbehaving: Any) -> None:
    told = report(isolation_build / "probe", "--timeout", "1", env=misbehaving("hang()"))
    assert outcomes(told, "cuda")[0] == ("timed_out", "no answer in time, in cuInit")
    assert told["nvml"]["status"] == "timed_out"


def test_what_a_driver_prints_or_calls_a_device_stays_out_of_the_line(
    isolation_build: Path, misbehaving: Any
) -> None:
    told = report(isolation_build / "probe", env=misbehaving('puts("{}"); fflush(stdout)'))
    [device] = told["cuda"]["devices"]
    assert device["name"] == '"},\n{\\ \xff\x1b[2J'
    assert device["total_bytes"] == {"dlsym": None, "legacy": None, "per_thread": None}
    assert told["nvml"]["devices"] == []


def test_a_library_that_is_none_is_told_with_the_loaders_words(isolation_build: Path, tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.1").write_text("no library")
    told = report(isolation_build / "probe", env={"LD_LIBRARY_PATH": str(tmp_path)})
    [(status, words)] = outcomes(told, "cuda")
    assert status == "missing"
    assert "libcuda.so.1: file too short" in words


@pytest.mark.parametrize(
    "words",
    [
        ["--nonce"],
        ["--nonce", "x" * 129],
        ["--timeout", "0"],
        ["--timeout", "601"],
        ["--timeout", "1s"],
        ["--timeout", "99999999999999999999999"],
        ["--allocate", "GPU-a"],
        ["--allocate", "GPU-=1"],
        ["--allocate", "GPU-a=0"],
        ["--allocate", "card=1"],
        ["--allocate", "GPU-a=-1"],
        ["--verbose", "1"],
        ["--park"],
        ["--park", "/a", "--resume", "/a"],
        [w for _ in range(17) for w in ("--allocate", "GPU-a=1")],
    ],
)
def test_a_wrong_command_line_is_status_2_and_no_report(isolation_build: Path, words: list[str]) -> None:
    done = run(isolation_build / "probe", *words, env={})
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"usage: probe ")


def test_the_static_probe_has_no_libfgpu_and_says_what_it_could_try(folder: Path) -> None:
    env = preloaded(folder, FGPU_SIMULATED_MACHINE=str(folder / "simulated"))
    told = report(folder / "probe-static", "--nonce", "n", env=env)
    assert (told["static"], told["libfgpu"], told["nonce"]) == (True, [], "n")
    if told["cuda"]["status"] == "ok":
        assert totals(told) == [8192 * MIB] * 5
    else:
        assert told["cuda"]["status"] in ("not_tried", "crashed")


def test_another_glibc_than_the_static_probe_was_linked_with_is_not_taken_for_a_driver_that_crashes(
    folder: Path, compile_c: MakePath, tmp_path: Path
) -> None:
    """Seen on an H100: its glibc ended the probe by SIGFPE before any of the driver's code ran."""
    source = tmp_path / "other.c"
    source.write_text(
        "__attribute__((constructor)) static void load(void) { volatile int none = 0; none = 100 / none; }\n"
    )
    (tmp_path / "libc.so.6").symlink_to(compile_c(source, "-shared", "-fPIC", "-nostdlib"))
    told = report(folder / "probe-static", env={"LD_LIBRARY_PATH": str(tmp_path)})
    words = (
        "a static program cannot load the driver here: the glibc is another than the one it was linked with"
    )
    assert outcomes(told, "cuda", "nvml") == [("not_tried", f"{words} (SIGFPE)")] * 2


LAUNCH = """
import ctypes, os, sys, threading
cuda = ctypes.CDLL("libcuda.so.1")
context, module, kernel = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
text = b".version 6.0\\n.target sm_50\\n.address_size 64\\n.visible .entry spin_1us()\\n{\\nret;\\n}\\n"
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
assert cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_ulonglong()), ctypes.c_size_t(32 << 20)) == 0
assert cuda.cuModuleLoadData(ctypes.byref(module), text) == 0
assert cuda.cuModuleGetFunction(ctypes.byref(kernel), module, b"spin_1us") == 0
assert cuda.cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, None, None, None) == 0
def rest():
    print("launched", flush=True)
    sys.stdin.read()
    os._exit(0)
threading.Thread(target=rest).start()
# The first thread alone ends: SYS_exit.
ctypes.CDLL(None).syscall(60, 0)
"""


@pytest.mark.parametrize("libfgpu", [True, False], ids=["with libfgpu", "without"])
def test_a_program_runs_though_its_first_thread_has_ended_and_has_a_slot_only_with_libfgpu(
    session_folder: MakePath, libfgpu: bool
) -> None:
    folder = session_folder(devices=[(UUID, 2048)], compute_percent=25, mode="memory+compute", slots="0-25")
    env = preloaded(folder) if libfgpu else plain(folder)
    words = [sys.executable, "-c", LAUNCH]
    with subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"launched\n"
        while Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
            pass
        asked = [
            "--nonce",
            "n",
            "--accounting",
            folder / "accounting",
            "--processes",
            f"{child.pid},1,999999999",
        ]
        told = report(folder / "probe-static", *asked, env={})
        assert told == {
            "probe": 1,
            "nonce": "n",
            "slots": [child.pid] if libfgpu else [],
            "behind": [],
            "running": [child.pid, 1],
            "lately": [child.pid] if libfgpu else [],
            "amounts": [[child.pid, 32 << 20, *[0] * 15]] if libfgpu else [],
            "held": [32 << 20 if libfgpu else 0, *[0] * 15],
        }
    gone = {"slots": [], "behind": [], "running": [1], "amounts": [], "held": [0] * 16}
    assert report(folder / "probe-static", *asked, env={}) == {**told, **gone}


def test_unreadable_account_is_an_error(tmp_path: Path, session_folder: MakePath) -> None:
    program = session_folder(devices=[(UUID, 2048)]) / "probe-static"
    short = tmp_path / "short"
    short.write_bytes(b"x" * 100)
    for path, slots in ((tmp_path / "none", []), (tmp_path, None), (short, None)):
        assert report(program, "--accounting", str(path), env={})["slots"] == slots


@pytest.mark.parametrize("name", ["probe", "probe-static"])
def test_in_a_container_the_preload_file_is_told(folder: Path, tmp_path: Path, name: str) -> None:
    done = in_container(folder, tmp_path, f"/run/fgpu/{name}")
    told = json.loads(done.stdout)
    assert told["preload"] == {
        "path": "/etc/ld.so.preload",
        "error": None,
        "content": "/run/fgpu/libfgpu.so\n",
        "complete": True,
        "device": told["preload"]["device"],
        "inode": (tmp_path / "ld.so.preload").stat().st_ino,
        "read_only": True,
        "mount": True,
    }
    paths = [entry["path"] for entry in told["libfgpu"]]
    assert paths == (["/run/fgpu/libfgpu.so"] if name == "probe" else [])
    if name == "probe":
        assert totals(told) == [2048 * MIB] * 5


def test_a_preload_file_of_the_image_is_told_as_that(folder: Path, tmp_path: Path) -> None:
    done = in_container(folder, tmp_path, "/run/fgpu/probe-static", without="preload")
    preload = json.loads(done.stdout)["preload"]
    assert (preload["error"], preload["content"]) == (None, "")
    assert (preload["mount"], preload["read_only"]) == (False, False)
