"""fgpu-verify on the simulated driver: in a session, without libfgpu, as in a container."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from insession import SYSTEM_PYTHON, in_container
from sessionfolders import ROOT, UUID, MakePath, run_in

VERIFY = ROOT / "labextension/jupyterlab_fgpu/verify.py"

SEEN = ["visible-dlsym", "visible-legacy", "visible-per-thread", "visible-nvml-v1", "visible-nvml-v2"]
HELD = [*SEEN, "visible-program", "allocate", "recover", "other-gpus", "env-forged", "deepbind", "dlmopen"]
HELD += ["processes"]
LOCAL_ESCAPES = ["env-cleared", "preload-unset", "preload-changed", "preload-libc"]
KNOWN_ESCAPES = ["loader-copy"]
IN_CONTAINERS_ONLY = ["preload-file", "namespace"]


def verify(folder: Path, *words: str, libfgpu: bool = True, **more: str) -> subprocess.CompletedProcess[str]:
    env = {"FGPU_LIMITS_FILE": str(folder / "limits"), **more}
    return run_in(folder, sys.executable, VERIFY, *words, **env, **({} if libfgpu else {"LD_PRELOAD": ""}))


def told(done: subprocess.CompletedProcess[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Return verdicts and texts by check; the exit status must say the same."""
    assert done.stderr == ""
    whole = json.loads(done.stdout)
    verdicts = {check["name"]: check["verdict"] for check in whole["checks"]}
    assert whole["holds"] == ("FAILED" not in verdicts.values()) == (done.returncode == 0)
    return verdicts, {check["name"]: check["text"] for check in whole["checks"]}


def every_check() -> list[str]:
    done = subprocess.run([sys.executable, str(VERIFY), "--list"], capture_output=True, text=True, check=True)
    return [line.split()[0] for line in done.stdout.splitlines()]


def test_in_a_local_session_everything_holds_that_is_expected_to(folder: Path) -> None:
    verdicts, texts = told(verify(folder, "--json"))
    static = verdicts.pop("static")
    assert static in ("BYPASSED (expected)", "NOT TRIED")
    assert verdicts == (
        dict.fromkeys(HELD, "PROVED")
        | dict.fromkeys([*LOCAL_ESCAPES, *KNOWN_ESCAPES, "limits-file"], "BYPASSED (expected)")
        | dict.fromkeys([*IN_CONTAINERS_ONLY, "raw-ioctl", "compute"], "NOT TRIED")
    ), texts
    assert texts["visible-dlsym"] == "2048 MiB by cuDeviceTotalMem, cuMemGetInfo"
    assert texts["env-cleared"] == "8192 MiB by cuDeviceTotalMem, cuMemGetInfo"
    assert texts["allocate"] == (
        "2050 MiB refused with error 2 by cuMemAlloc_v2, cuMemAllocPitch_v2, cuMemAllocManaged, "
        "cuMemAllocAsync, cuMemCreate"
    )
    assert texts["recover"] == "then 512 MiB allocated, written and read back"
    assert texts["compute"] == "compute is not limited in this session"
    assert (folder / "log").read_text() == ""


def test_without_libfgpu_every_check_fails_that_proves_something(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 2048)], compute_percent=25, mode="memory+compute", slots="0-25")
    verdicts, texts = told(verify(folder, "--json", libfgpu=False))
    untried = {name for name, verdict in verdicts.items() if verdict == "NOT TRIED"}
    assert untried <= {*IN_CONTAINERS_ONLY, "raw-ioctl", "static"}
    proofs = set(every_check()) - untried
    assert {name: verdicts[name] for name in proofs} == dict.fromkeys(proofs, "FAILED"), texts
    assert proofs >= {*HELD, *LOCAL_ESCAPES, *KNOWN_ESCAPES, "limits-file", "compute"}


def test_in_a_container_the_environment_and_the_files_cannot_be_used_to_escape(
    folder: Path, tmp_path: Path
) -> None:
    verdicts, texts = told(in_container(folder, tmp_path, SYSTEM_PYTHON, str(VERIFY), "--json"))
    assert verdicts.pop("static") in ("BYPASSED (expected)", "NOT TRIED")
    assert verdicts == (
        dict.fromkeys([*HELD, *LOCAL_ESCAPES, *IN_CONTAINERS_ONLY, "limits-file"], "PROVED")
        | dict.fromkeys(KNOWN_ESCAPES, "BYPASSED (expected)")
        | dict.fromkeys(["raw-ioctl", "compute"], "NOT TRIED")
    ), texts
    assert texts["preload-file"].startswith("3 attempts refused on /etc/ld.so.preload; then 2048 MiB")
    assert texts["namespace"] == "refused: unshare: Operation not permitted"


def test_a_container_that_may_make_user_namespaces_is_told_so(folder: Path, tmp_path: Path) -> None:
    words = [SYSTEM_PYTHON, str(VERIFY), "--json", "--only", "namespace"]
    done = in_container(folder, tmp_path, *words, without="seccomp")
    verdicts, texts = told(done)
    if texts["namespace"].startswith("refused: "):
        pytest.skip("this machine allows no user namespaces")
    assert verdicts == {"namespace": "FAILED"}
    assert texts["namespace"] == "8192 MiB by cuDeviceTotalMem, cuMemGetInfo"


def test_with_its_own_share_of_time_compute_is_proved(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 2048)], compute_percent=25, mode="memory+compute", slots="0-25")
    verdicts, texts = told(verify(folder, "--json", "--only", "compute"))
    assert verdicts == {"compute": "PROVED"}, texts


def test_every_device_is_looked_at(session_folder: MakePath) -> None:
    folder = session_folder(devices=[("GPU-a", 1024), ("GPU-b", 2048)])
    wanted = ["visible-dlsym", "visible-nvml-v2", "allocate", "recover", "processes"]
    verdicts, texts = told(verify(folder, "--json", *(w for name in wanted for w in ("--only", name))))
    assert set(verdicts.values()) == {"PROVED"}, texts
    assert texts["visible-dlsym"] == (
        "1024 MiB by cuDeviceTotalMem, cuMemGetInfo; 2048 MiB by cuDeviceTotalMem, cuMemGetInfo"
    )
    assert texts["recover"].startswith("then 256 MiB")
    assert "then 512 MiB" in texts["recover"]


def test_one_device_of_two_that_is_not_limited_fails(session_folder: MakePath) -> None:
    folder = session_folder(devices=[("GPU-a", 1024), ("GPU-b", 2048)])
    limits = (folder / "limits").read_text().replace("memory_mib=2048", "memory_mib=1536")
    other = folder / "believed"
    other.write_text(limits)
    verdicts, texts = told(verify(folder, "--json", "--only", "visible-dlsym", "--limits", str(other)))
    assert verdicts == {"visible-dlsym": "FAILED"}
    assert "2048 MiB" in texts["visible-dlsym"]


def test_memory_on_gpus_of_others_is_refused(session_folder: MakePath) -> None:
    machine = "".join(f"gpu uuid=GPU-{n} memory_mib=8192 name=Simulated GPU\n" for n in "ab")
    folder = session_folder(devices=[("GPU-a", 2048)], machine=machine)
    done = verify(folder, "--json", "--only", "other-gpus", CUDA_VISIBLE_DEVICES="GPU-a")
    verdicts, texts = told(done)
    assert (verdicts, texts) == (
        {"other-gpus": "PROVED"},
        {"other-gpus": "no other GPU is visible"},
    )
    verdicts, texts = told(verify(folder, "--json", "--only", "other-gpus", libfgpu=False))
    assert (verdicts, texts) == (
        {"other-gpus": "FAILED"},
        {"other-gpus": "memory granted on GPUs that are not this session's: 1"},
    )


def test_a_share_that_is_the_whole_gpu_has_nothing_to_get_around(session_folder: MakePath) -> None:
    folder = session_folder(devices=[(UUID, 8192)])
    verdicts, texts = told(verify(folder, "--json"))
    assert {verdicts[name] for name in SEEN} == {"PROVED"}
    tricks = [*LOCAL_ESCAPES, "env-forged", "deepbind", "dlmopen"]
    assert {verdicts[name] for name in tricks} == {"NOT TRIED"}, texts
    assert texts["deepbind"] == "the share is the whole GPU: nothing could be told apart"


def test_while_the_limits_cannot_be_read_by_libfgpu_nothing_is_proved(session_folder: MakePath) -> None:
    folder = session_folder("fgpu-limits 9\n")
    other = folder / "believed"
    other.write_text(session_folder(devices=[(UUID, 2048)]).joinpath("limits").read_text())
    words = ("--only", "visible-dlsym", "--only", "allocate", "--only", "env-cleared")
    verdicts, _ = told(verify(folder, "--json", "--limits", str(other), *words))
    assert set(verdicts.values()) == {"FAILED"}


@pytest.mark.parametrize(
    ("what", "text"),
    [
        ("raise(SIGSEGV)", "crashed by SIGSEGV"),
        ("hang()", "no answer in 1 s"),
        ("return 100", "cuInit: an unnamed error (100)"),
        ("atexit(hang); return 100", "cuInit: an unnamed error (100)"),
    ],
)
def test_a_driver_that_misbehaves_is_a_verdict(
    folder: Path, compile_c: MakePath, tmp_path: Path, what: str, text: str
) -> None:
    library = compile_c("tests/probe_driver.c", "-shared", "-fPIC", f"-DMISBEHAVIOUR={what}")
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        (tmp_path / name).symlink_to(library)
    words = ("--json", "--timeout", "1", "--only", "visible-dlsym", "--only", "allocate")
    done = verify(folder, *words, LD_LIBRARY_PATH=str(tmp_path), libfgpu=False)
    verdicts, texts = told(done)
    assert set(verdicts.values()) == {"FAILED"}
    assert {seen.strip() for seen in texts.values()} == {text}


def test_an_old_driver_without_cugetprocaddress_is_not_blamed(
    session_folder: MakePath, compile_c: MakePath, tmp_path: Path
) -> None:
    library = compile_c("tests/probe_driver.c", "-shared", "-fPIC", "-DMISBEHAVIOUR=return 0")
    (tmp_path / "libcuda.so.1").symlink_to(library)
    words = ("--json", "--only", "visible-legacy", "--only", "visible-per-thread")
    done = verify(session_folder(), *words, LD_LIBRARY_PATH=str(tmp_path), libfgpu=False)
    verdicts, texts = told(done)
    assert set(verdicts.values()) == {"NOT TRIED"}
    assert set(texts.values()) == {"the driver has no cuGetProcAddress"}


def test_the_report_begins_with_what_holds_and_folds_known_bypasses(folder: Path) -> None:
    done = verify(folder, COLUMNS="40")
    assert done.returncode == 0, done.stdout
    lines = done.stdout.splitlines()
    assert lines[0] == (
        f"fgpu-verify: session 17, a local process, which can leave its limits; limits in {folder}/limits"
    )
    assert lines[1] == f"  {UUID}: 2048 of 8192 MiB, compute not limited"
    assert lines[3] == f"Holds ({len(HELD)})"
    assert lines[4].split()[0] == "visible-dlsym"
    folded = done.stdout[done.stdout.index("known ways around libfgpu") :]
    known, untried = folded.split("not tried here")
    assert all(name in known for name in (*LOCAL_ESCAPES, *KNOWN_ESCAPES, "limits-file"))
    assert "8192 MiB" not in folded
    assert all(name in untried for name in (*IN_CONTAINERS_ONLY, "raw-ioctl", "compute"))
    assert all(name in done.stdout for name in every_check())
    assert lines[-1] == "Your limits are in force."
    assert max(map(len, lines[3:])) <= 80
    assert done.stdout.isascii()


def test_details_show_what_a_known_bypass_saw(folder: Path) -> None:
    lines = verify(folder, "--details", "--only", "env-cleared").stdout.splitlines()
    assert lines[3] == "1 known way around libfgpu; containers close some, MIG all"
    assert lines[4].split() == [
        "env-cleared",
        "env",
        "-i:",
        "8192",
        "MiB",
        "by",
        "cuDeviceTotalMem,",
        "cuMemGetInfo",
    ]


def test_a_failed_check_comes_first(folder: Path) -> None:
    done = verify(folder, "--only", "visible-dlsym", libfgpu=False)
    assert done.returncode == 1
    lines = done.stdout.splitlines()
    assert lines[3] == "DOES NOT HOLD (1)"
    assert lines[-1] == "Your limits are NOT fully in force: tell your administrator what does not hold."


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (["--only", "nothing"], 2, "invalid choice"),
        (["--timeout", "0"], 2, "--timeout takes 1 to 600 seconds"),
        (["--limits", "/nowhere/limits"], 1, "/nowhere/limits cannot be read: [Errno 2]"),
        (["--limits", "/dev/null"], 1, "not a whole limits file of version 1"),
        ([], 1, "this is no session: there is no /run/fgpu/limits"),
    ],
)
def test_what_cannot_be_done_is_said(words: list[str], status: int, text: str) -> None:
    if Path("/run/fgpu").exists():
        pytest.skip("this is a session")
    env = {k: v for k, v in os.environ.items() if k != "FGPU_LIMITS_FILE"}
    command = [sys.executable, str(VERIFY), *words]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (status, "")
    assert text in done.stderr
