"""The parts of fgpu-smi and fgpu-verify that need no driver; both run on any Python from 3.6 on."""

from __future__ import annotations

import ast
import ctypes
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import jupyterlab_fgpu
from jupyterlab_fgpu import smi, verify

PACKAGE = Path(jupyterlab_fgpu.__file__).parent
FILES = [PACKAGE / "smi.py", PACKAGE / "verify.py"]
OLD_PYTHONS = sorted((Path.home() / ".pyenv/versions").glob("3.[67].*/bin/python"))
LIMITS = """\
fgpu-limits 1
session=17
managed=charge
device=GPU-a memory_mib=2048 device_mib=8192 context_mib=0 compute_percent=0 mode=memory slots=-
end
"""


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_the_syntax_is_that_of_python_3_6(file: Path) -> None:
    ast.parse(file.read_text(), feature_version=(3, 6))


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_nothing_beyond_the_standard_library_is_imported(file: Path) -> None:
    tree = ast.walk(ast.parse(file.read_text()))
    names: set[str] = set()
    for node in tree:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add("." if node.level or node.module is None else node.module)
    standard = """argparse ctypes json os re shutil signal subprocess sys tempfile textwrap time
    typing xml.etree"""
    assert names <= set(standard.split())


@pytest.mark.parametrize("python", [*OLD_PYTHONS, sys.executable], ids=str)
@pytest.mark.parametrize("file", FILES, ids=lambda path: path.name)
def test_each_file_alone_is_a_program(file: Path, python: Path, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_bytes(file.read_bytes())
    command = [str(python), "-W", "error", str(program), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == f"fgpu-{file.stem} {jupyterlab_fgpu.__version__}\n"
    assert file.read_text().startswith("#!/usr/bin/env python3\n")


def test_the_digits_of_a_uuid_or_the_hash_of_a_name_are_its_bytes() -> None:
    spelled = "GPU-51A0c0de-0000-1111-2222-333344445555"
    assert verify.uuid_bytes(spelled) == "51a0c0de000011112222333344445555"
    # The published 128-bit FNV-1a hashes of "" and "a".
    assert verify.uuid_bytes("MIG-") == "6c62272e07bb014262b821756295c58d"
    assert verify.uuid_bytes("GPU-a") == "d228cb696f1a8caf78912b704e4a8964"


@pytest.mark.parametrize(
    "text",
    [
        "",
        LIMITS.replace("fgpu-limits 1", "fgpu-limits 2"),
        LIMITS[:-5],
        LIMITS.replace("memory_mib=2048 ", ""),
        LIMITS.replace("2048", "much"),
    ],
)
def test_limits_that_are_not_whole_are_refused_by_both(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "limits"
    file.write_text(text)
    with pytest.raises((ValueError, KeyError, IndexError)):
        verify.read_limits(str(file))
    monkeypatch.setenv("FGPU_LIMITS_FILE", str(file))
    limits = smi.read_limits()
    assert limits is not None
    assert limits.shares == []
    assert (limits.problem or "").startswith(f"{file} cannot be read: ")


def test_both_read_the_same_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "limits"
    file.write_text(LIMITS)
    monkeypatch.setenv("FGPU_LIMITS_FILE", str(file))
    limits = smi.read_limits()
    assert limits is not None
    assert (limits.session, limits.problem) == (17, None)
    assert limits.shares == [("GPU-a", 2048, 8192, 0, "memory", False)]
    assert verify.read_limits(str(file)).shares == [("GPU-a", 2048, 8192, 0, "memory", 0)]


def test_who_is_asked_to_end_ends_the_check_that_runs(tmp_path: Path) -> None:
    began = tmp_path / "pid"
    child = f"import os, time; open({str(began)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    code = (
        "import signal, sys\nfrom jupyterlab_fgpu import verify\n"
        "child = sys.argv.pop()\n"
        "verify.CHECKS = [('x', 'x', lambda s: s.run([sys.executable, '-c', child]))]\n"
        "verify.main()"
    )
    file = tmp_path / "limits"
    file.write_text(LIMITS)
    with subprocess.Popen([sys.executable, "-c", code, f"--limits={file}", child]) as program:
        while not (began.exists() and began.read_text()):
            assert program.poll() is None
        program.terminate()
    pid = int(began.read_text())
    # It was killed, and may not be gone at once.
    deadline = time.monotonic() + 30
    while not ended(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def session(**changes: Any) -> verify.Session:
    share = verify.Share("GPU-a", 2048, 8192, 0, "memory", 0)._replace(**changes)
    return verify.Session(verify.Limits("/x/limits", 17, "charge", [share]), 1)


@pytest.mark.parametrize(
    ("seen_mib", "changes", "bypass_expected", "verdict"),
    [
        (2048, {}, False, verify.PROVED),
        (2048, {}, True, verify.PROVED),
        (8192, {}, False, verify.FAILED),
        (8192, {}, True, verify.BYPASSED),
        # Less than the limit is not what was promised, and no way around it either.
        (1024, {}, True, verify.FAILED),
        (8000, {"memory_mib": 8192}, False, verify.PROVED),
        (8193, {"memory_mib": 8192}, False, verify.FAILED),
        (0, {"memory_mib": 8192}, False, verify.FAILED),
    ],
)
def test_a_total_is_judged_by_the_limit(
    seen_mib: int, changes: Any, bypass_expected: bool, verdict: str
) -> None:
    one = session(**changes)
    one._in_force = verify.Result(verify.PROVED, "")
    seen = {verify.uuid_bytes("GPU-a"): {"call": seen_mib * verify.MIB}}
    assert one.judge(seen, bypass_expected).verdict == verdict


def test_one_way_of_asking_that_tells_more_is_enough_to_fail() -> None:
    mib = verify.MIB
    seen = {verify.uuid_bytes("GPU-a"): {"first": 2048 * mib, "second": 8192 * mib}}
    result = session().judge(seen)
    assert result == (verify.FAILED, "2048 MiB by first; 8192 MiB by second")
    assert session().judge({}) == (verify.FAILED, "GPU-a is not shown")


def test_each_way_of_loading_is_one_of_its_own() -> None:
    def address(way: str) -> int | None:
        function = verify.open_library("libm.so.6", way).cos
        return ctypes.cast(function, ctypes.c_void_p).value

    assert address("dlsym") == address("deepbind")
    assert address("dlmopen") != address("dlsym")
    with pytest.raises(verify.NotThere, match=r"^dlmopen: libnone\.so"):
        verify.open_library("libnone.so", "dlmopen")


@pytest.mark.parametrize("code", [0, 1, 700])
def test_an_allocation_that_is_granted_or_fails_otherwise_is_no_proof(code: int) -> None:
    past = {"cuMemAlloc_v2": 2, "cuMemCreate": code}
    share = session().limits.shares[0]
    assert verify._refused(session(), share, {"past": past}).verdict == verify.FAILED
    # Without the plain way nothing was proved at all.
    missing = {"past": {"cuMemAlloc_v2": verify.NOT_SUPPORTED, "cuMemCreate": 2}}
    assert verify._refused(session(), share, missing).verdict == verify.FAILED


class FailingNvml:
    """NVML of a lost device: it reports names; all other calls fail or are missing."""

    def has(self, name: str) -> bool:
        return True

    def call(self, name: str, *arguments: Any) -> None:
        if "Memory" in name or "Processes" in name:
            raise smi.NvmlError(name, 15, "GPU is lost")
        raise smi.NvmlError(name, smi.NOT_SUPPORTED, "Not Supported")

    def fill(self, kind: Any, name: str, *before: Any) -> Any:
        if name == "nvmlDeviceGetCount_v2":
            return kind(1)
        if name == "nvmlDeviceGetHandleByIndex_v2":
            return kind()
        return self.call(name, *before)

    def text(self, name: str, *before: Any) -> str:
        return "Big GPU"


def test_what_fails_is_shown_as_that_and_never_as_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FGPU_LIMITS_FILE", raising=False)
    nvml: Any = FailingNvml()
    reading = smi.read_all(nvml, None)
    assert reading.problems == [
        *(f"GPU 0: memory.{name}: GPU is lost" for name in ("total", "used", "free")),
        "GPU 0: processes: GPU is lost",
    ]
    text = "\n".join(smi.table(reading))
    assert "ERR! / ERR!" in text
    assert "simulated" not in text
    assert "No running processes" not in text
    assert "0MiB" not in text
    options = smi.parse_options(["--query-gpu=memory.used,utilization.gpu", "--format=csv"])
    assert smi.csv_lines(reading, options, False) == ["[GPU is lost], [N/A]"]
    [gpu] = json.loads(smi.as_json(reading))["gpus"]
    assert gpu["memory_used_mib"] == gpu["processes"] == {"error": "GPU is lost"}
    assert gpu["utilization_gpu_percent"] is None
