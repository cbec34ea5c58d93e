"""What LD_PRELOAD puts before libfgpu does not get around it, and what does no harm there is left where it is."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from insession import in_container
from sessionfolders import UUID, MakePath, preloaded, renamed, run_in

Compile = MakePath
LIMIT, WHOLE = 2048, 8192


@pytest.fixture
def folder(session_folder: MakePath) -> Path:
    return session_folder(devices=[(UUID, LIMIT)])


@pytest.fixture
def client(compile_c: Compile, isolation_build: Path) -> Path:
    simulated = isolation_build / "simulated"
    return compile_c("tests/order_client.c", f"-L{simulated}", "-l:libcuda.so.1", "-ldl")


def front(kind: str, folder: Path, tmp_path: Path) -> str:
    """Return what is to stand before libfgpu."""
    simulated = folder / "simulated"
    if kind == "the driver, copied":
        return str(shutil.copy(simulated / "libcuda.so.1", tmp_path / "copy.so"))
    if kind == "the driver, renamed":
        return str(renamed(simulated / "libcuda.so.1", tmp_path, "libmuda.so.1"))
    return {"libc": "libc.so.6", "the driver": "libcuda.so.1", "NVML": str(simulated / "libnvidia-ml.so.1")}[
        kind
    ]


FRONTS = ["libc", "the driver", "the driver, copied", "NVML"]


def start(folder: Path, preload: str, *words: str | Path, **more: str) -> subprocess.CompletedProcess[str]:
    machine = str(folder / "simulated")
    return run_in(folder, *words, LD_PRELOAD=preload, FGPU_SIMULATED_MACHINE=machine, **more)


@pytest.mark.parametrize("kind", FRONTS)
def test_what_would_be_found_first_is_put_behind_libfgpu(
    folder: Path, client: Path, tmp_path: Path, kind: str
) -> None:
    first = front(kind, folder, tmp_path)
    assert f"linked {WHOLE}" in start(folder, first, client).stdout  # alone, nothing is held
    done = start(folder, f"{first}:{folder}/libfgpu.so", client, "a", "", "b c", KEPT="x=y")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[:2] == [f"linked {LIMIT}", f"found {LIMIT}"]
    assert lines[3:] == [
        f"name {client.name[:15]}",
        "kept x=y",
        f"word {client}",
        "word a",
        "word ",
        "word b c",
    ]
    assert "stood before libfgpu" in (folder / "log").read_text()


def test_a_driver_under_another_name_is_held_too(folder: Path, client: Path, tmp_path: Path) -> None:
    first = front("the driver, renamed", folder, tmp_path)
    assert f"linked {WHOLE}" in start(folder, first, client).stdout
    done = start(folder, f"{first}:{folder}/libfgpu.so", client)
    assert done.stdout.splitlines()[:2] == [f"linked {LIMIT}", f"found {LIMIT}"]


def test_it_is_the_same_process_that_goes_on(folder: Path, client: Path) -> None:
    env = preloaded(folder, LD_PRELOAD=f"libc.so.6 {folder}/libfgpu.so")
    with subprocess.Popen([client], env=env, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert f"pid {process.pid}\n" in process.stdout.read()


@pytest.mark.parametrize("kind", ["libc", "the driver"])
def test_in_a_container_neither_the_c_library_nor_the_driver_stands_before_it(
    folder: Path, client: Path, tmp_path: Path, kind: str
) -> None:
    first = front(kind, folder, tmp_path)
    (tmp_path / "scratch").mkdir()
    done = in_container(folder, tmp_path / "scratch", "env", f"LD_PRELOAD={first}", str(client))
    assert done.stdout.splitlines()[:2] == [f"linked {LIMIT}", f"found {LIMIT}"], done.stderr


def test_a_program_that_needs_no_gpu_goes_on(folder: Path) -> None:
    preload = f"libc.so.6 {folder}/libfgpu.so"
    done = start(folder, preload, "/bin/sh", "-c", 'echo "$0" "$LD_PRELOAD"; exit 7', "word")
    assert (done.returncode, done.stderr) == (7, "")
    assert done.stdout == f"word {folder}/libfgpu.so:{preload}\n"


@pytest.mark.parametrize(
    ("functions", "changed"), [(["dlopen"], False), (["malloc_usable_size"], False), (["dlsym"], True)]
)
def test_only_libraries_with_these_functions_are_moved_behind(
    folder: Path, compile_c: Compile, tmp_path: Path, functions: list[str], changed: bool
) -> None:
    source = tmp_path / "wrapper.c"
    source.write_text("".join(f"void {name}(void); void {name}(void) {{}}\n" for name in functions))
    wrapper = compile_c(source, "-shared", "-fPIC", "-fno-builtin")
    done = start(folder, f"{wrapper} {folder}/libfgpu.so", "/bin/sh", "-c", "echo $LD_PRELOAD")
    first = f"{folder}/libfgpu.so:{wrapper}" if changed else str(wrapper)
    assert done.stdout == f"{first} {folder}/libfgpu.so\n"


def test_another_libfgpu_with_limits_of_its_own_ends_the_program(
    folder: Path, client: Path, session_folder: MakePath
) -> None:
    own = session_folder(devices=[(UUID, WHOLE)], machine=folder)
    copy = own / "libfgpu.so"
    image = copy.read_bytes()
    copy.unlink()
    copy.write_bytes(image)
    assert f"linked {WHOLE}" in start(folder, str(copy), client).stdout
    done = start(folder, f"{copy} {folder}/libfgpu.so", client)
    assert (done.returncode, done.stdout) == (127, "")
    assert done.stderr.startswith(
        f"fgpu: {copy} is loaded before libfgpu, so this session's GPU limits would not hold;"
    )
    assert "Start it without that library in LD_PRELOAD." in done.stderr
    assert "the program was ended" in (folder / "log").read_text()


def test_a_program_started_through_the_loader_is_ended(folder: Path, client: Path) -> None:
    loader = {"x86_64": "/lib64/ld-linux-x86-64.so.2", "aarch64": "/lib/ld-linux-aarch64.so.1"}[
        platform.machine()
    ]
    preload = f"libc.so.6 {folder}/libfgpu.so"
    done = start(folder, preload, loader, client)
    assert (done.returncode, done.stdout) == (127, "")
    assert "the program was started through the dynamic loader" in done.stderr
    assert f"linked {LIMIT}" in start(folder, f"{folder}/libfgpu.so", loader, client).stdout


def test_a_program_that_opens_libfgpu_itself_is_left_alone(folder: Path) -> None:
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]); print('on')"
    env = os.environ | {"LD_PRELOAD": "libc.so.6"}
    words = [sys.executable, "-c", code, str(folder / "libfgpu.so")]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "on\n", "")


@pytest.mark.parametrize("kind", ["address", "thread"])
def test_programs_with_a_sanitizer_run(folder: Path, tmp_path: Path, kind: str) -> None:
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text('#include <stdio.h>\nint main(void) { return puts("on") < 0; }\n')
    built = subprocess.run(["gcc", f"-fsanitize={kind}", "-o", program, source], capture_output=True)
    if built.returncode != 0:
        pytest.skip(f"this compiler has no {kind} sanitizer")
    # Libraries before its own are an error to the first one, which can be told to bear it.
    done = start(folder, f"{folder}/libfgpu.so", program, ASAN_OPTIONS="verify_asan_link_order=0")
    if "unexpected memory mapping" in done.stderr:
        pytest.skip("the sanitizer does not work with this kernel's layout of memory")
    assert (done.returncode, done.stdout) == (0, "on\n"), done.stderr
