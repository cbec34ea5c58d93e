"""Each way in which a program gets at a driver's function leads to libfgpu, and every other function stays what it is."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from sessionfolders import ISOLATION, MakePath, output_of, renamed

SHARED = ("-shared", "-fPIC")
SOURCE = "tests/hooks_library.c"


@dataclass(slots=True)
class Ways:
    """Programs and libraries to look functions up in, below one folder."""

    folder: Path
    compile_c: MakePath
    libfgpu: Path
    _made: dict[str, Path] = field(default_factory=dict)

    def library(self, name: str, source: str, *flags: str) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.symlink_to(self.compile_c(source, *SHARED, *flags))
        return path

    def driver(self, name: str = "libcuda.so.1", soname: str = "libcuda.so.1", variant: int = 901) -> Path:
        return self.library(
            name, "tests/hooks_driver.c", "-Wl,-Bsymbolic", f"-Wl,-soname,{soname}", f"-DVARIANT={variant}"
        )

    def run(
        self, *words: str | Path, before: tuple[Path, ...] = (), after: tuple[Path, ...] = ()
    ) -> list[str]:
        """Run the client with libfgpu loaded, between other libraries, and return its lines."""
        program = self.compile_c("tests/hooks_resolve.c", "-ldl")
        preload = " ".join(str(path) for path in (*before, self.libfgpu, *after))
        return output_of(self.libfgpu.parent, program, *words, LD_PRELOAD=preload).splitlines()


@pytest.fixture
def ways(tmp_path: Path, compile_c: MakePath, session_folder: MakePath) -> Ways:
    """A session without use for its limits: without a context, libfgpu leaves each call to the driver."""
    return Ways(tmp_path, compile_c, session_folder(simulated=False) / "libfgpu.so")


HOOKED = [
    "cuMemAlloc_v2 libfgpu.so",
    "cuDriverGetVersion {driver}",
    # No function of this driver, so there is none with libfgpu either, and dlerror() says so.
    "cuMemAllocAsync nothing",
    "error undefined symbol",
]


def same(lines: list[str], driver: Path) -> None:
    assert lines == [line.format(driver=driver.name) for line in HOOKED]


@pytest.mark.parametrize("way", ["handle", "default", "next"])
def test_dlsym_finds_the_hook_of_a_driver_that_was_opened(ways: Ways, way: str) -> None:
    driver = ways.driver()
    same(ways.run(way, driver)[:4], driver)


@pytest.mark.parametrize("way", ["default", "next"])
def test_dlsym_finds_nothing_without_a_driver(ways: Ways, way: str) -> None:
    lines = ways.run(way)
    assert lines[:4] == [
        "cuMemAlloc_v2 nothing",
        "cuDriverGetVersion nothing",
        "cuMemAllocAsync nothing",
        HOOKED[3],
    ]


def test_dlsym_next_of_another_function_is_libcs(ways: Ways) -> None:
    assert ways.run("next", ways.driver())[-1] == "a64l libc.so.6"


def test_a_driver_is_known_by_its_soname_and_not_by_its_file(ways: Ways) -> None:
    driver = ways.driver(name="renamed.so")
    same(ways.run("handle", driver), driver)


def test_a_function_of_the_same_name_in_another_library_stays_what_it_is(ways: Ways) -> None:
    other = ways.driver(name="libcuda.so.1", soname="libother.so.1")
    assert ways.run("handle", other)[0] == "cuMemAlloc_v2 libcuda.so.1"


def test_a_copy_of_the_driver_under_another_name_is_hooked_and_refused_beside_it(
    ways: Ways, isolation_build: Path
) -> None:
    driver = isolation_build / "simulated" / "libcuda.so.1"
    lines = ways.run("copies", renamed(driver, ways.folder, "libmuda.so.1"), driver)
    assert lines[:3] == ["copy libfgpu.so", "driver libfgpu.so", "copy nothing"]
    assert "cuMemAlloc_v2 (refused by libfgpu: this is not the driver in use)" in lines[3]
    assert lines[4] == "copy libmuda.so.1"  # what is no hook stays what it is
    assert "libmuda.so.1 has the functions of libcuda.so.1" in (ways.libfgpu.parent / "log").read_text()


def test_a_version_that_is_not_known_is_missing(ways: Ways) -> None:
    assert ways.run("newer", ways.driver(name="other.so", soname="libother.so.1")) == [
        "cuMemAlloc_v9 other.so",
        "no error",
    ]
    lines = ways.run("newer", ways.driver())
    assert lines[0] == "cuMemAlloc_v9 nothing"
    assert "cuMemAlloc_v9 (refused by libfgpu: this version is not known to it)" in lines[1]
    assert (
        "has cuMemAlloc_v9, a version that this libfgpu does not know"
        in (ways.libfgpu.parent / "log").read_text()
    )


def test_dlvsym_finds_the_hooks_and_libcs_own_functions_are_hooked_too(ways: Ways) -> None:
    machine = {"x86_64": "GLIBC_2.2.5", "aarch64": "GLIBC_2.17"}[_machine()]
    lines = ways.run("version", ways.driver(), machine)
    at_home = [line for line in lines if line.split()[0] in ("dlsym", "dlvsym", "dlopen")]
    assert at_home == [f"{name} libfgpu.so" for name in ("dlsym", "dlvsym", "dlopen") for _ in range(2)]
    assert "dlmopen libfgpu.so" in lines  # its old version has another name
    assert lines[-2:] == ["a64l libc.so.6", "cuMemAlloc_v2 nothing"]


def _machine() -> str:
    return subprocess.run(["uname", "-m"], capture_output=True, text=True, check=True).stdout.strip()


def test_cuGetProcAddress_gives_the_hook_and_refuses_versions_that_are_not_known(ways: Ways) -> None:
    assert ways.run("driver", ways.driver()) == [
        "0 0 cuMemAlloc libfgpu.so",
        "0 1 cuMemAlloc nothing",
        "0 0 cuMemFree libfgpu.so",
        "0 0 cuSomethingElse libcuda.so.1",
        "0 0 cuGetProcAddress libfgpu.so",
        "0 1 cuNothing nothing",
    ]
    log = (ways.libfgpu.parent / "log").read_text()
    assert "cuMemAlloc that this libfgpu does not know" in log


def test_a_library_linked_against_the_driver_calls_the_hook_even_if_bound_deeply(ways: Ways) -> None:
    driver = ways.driver()
    library = ways.library("liblinked.so", SOURCE, "-DPART=1", str(driver), f"-Wl,-rpath,{driver.parent}")
    # 901 is what the driver says: the hook has found it, and left the call to it.
    assert ways.run("library", library) == ["cuMemAlloc_v2 libfgpu.so", "result 901"]


def test_another_namespace_is_the_first_one(ways: Ways) -> None:
    driver = ways.driver()
    same(ways.run("apart", driver), driver)


def test_dlopen_finds_what_its_callers_runpath_leads_to(ways: Ways) -> None:
    inner = ways.library("inner/libinner.so", SOURCE, "-DPART=3")
    outer = ways.folder / "outer" / "libouter.so"
    outer.parent.mkdir()
    compiled = ways.compile_c(
        SOURCE, *SHARED, "-DPART=2", "-ldl", "-Wl,--enable-new-dtags,-rpath,$ORIGIN/../inner"
    )
    outer.hardlink_to(compiled)  # $ORIGIN follows links
    assert inner.exists()
    assert ways.run("runpath", outer, "libinner.so") == ["program nothing", "library found", "apart found"]
    assert ways.run("runpath", outer, "$ORIGIN/../inner/libinner.so")[1] == "library found"


def test_a_hook_calls_the_driver_that_was_found_last_and_keeps_it_loaded(ways: Ways) -> None:
    lines = ways.run("two", ways.driver(), ways.driver(name="compat/libcuda.so.1", variant=951))
    assert lines == ["first 901", "closed 901", "second 951"]


def test_a_library_preloaded_after_libfgpu_is_passed_over(ways: Ways) -> None:
    beside = ways.library("libbeside.so", SOURCE, "-DPART=4", "-ldl")
    lines = ways.run("preloaded", ways.driver(), "7", after=(beside,))
    assert lines == ["a64l 1009", "cuMemAlloc_v2 libfgpu.so", "result 901", "next libfgpu.so"]


def test_a_library_preloaded_before_libfgpu_wraps_it(ways: Ways) -> None:
    beside = ways.library("libbeside.so", SOURCE, "-DPART=4", "-ldl")
    lines = ways.run("preloaded", ways.driver(), "7", before=(beside,))
    assert lines == ["a64l 1009", "cuMemAlloc_v2 libbeside.so", "result 10901", "next libfgpu.so"]


def test_no_function_of_libc_is_asked_for_that_libfgpu_stands_before(ways: Ways) -> None:
    undefined = subprocess.run(
        ["nm", "-D", "--undefined-only", ways.libfgpu], capture_output=True, text=True, check=True
    ).stdout
    names = set(re.findall(r" U (\w+)", undefined))
    assert names
    assert not names & {"dlsym", "dlvsym", "dlopen", "dlmopen", "dlerror", "dladdr"}


def test_the_table_has_each_version_of_a_function_that_cuda_abi_has() -> None:
    table = (ISOLATION / "libfgpu" / "hooks.h").read_text()
    names = set(re.findall(r"HOOK\(CUDA, (\w+)", table))
    declared = set(
        re.findall(r"^CUresult (\w+)\(", (ISOLATION / "include" / "cuda_abi.h").read_text(), flags=re.M)
    )

    def base(name: str) -> str:
        return re.sub(r"(_v\d)?(_ptsz)?$", "", name)

    assert {name for name in declared if base(name) in set(map(base, names))} == names
