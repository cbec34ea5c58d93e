"""What is built runs in old images: `make check` says so of this build, and would not of others."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from sessionfolders import ISOLATION, MakePath


@pytest.fixture
def copied(isolation_build: Path, tmp_path: Path) -> Path:
    """A copy of what was built; newer than its sources, so that `make` leaves it as it is."""
    out = tmp_path / "out"
    for name in (
        "libfgpu.so",
        "probe",
        "probe-static",
        "simulated/libcuda.so.1",
        "simulated/libnvidia-ml.so.1",
    ):
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(isolation_build / name, out / name)
    return out


def check(out: Path) -> subprocess.CompletedProcess[str]:
    command = ["make", "--no-print-directory", "-C", str(ISOLATION), f"OUT={out}", "check"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


@pytest.fixture(scope="module")
def all_of_libfgpu(compile_c: MakePath) -> Path:
    """libfgpu's sources as one object."""
    first, *others = sorted((ISOLATION / "libfgpu").glob("*.c"))
    hidden = ["-fPIC", "-fvisibility=hidden", "-fno-strict-aliasing"]
    return compile_c(first, *others, "-std=gnu11", "-O0", *hidden, "-r")


def libfgpu_with(out: Path, source: str, *words: str | Path) -> None:
    """Put a library that has one function too many in libfgpu's place."""
    (out / "more.c").write_text(source)
    link = ["-fvisibility=hidden", "-fPIC", "-shared", "-Wl,-z,noexecstack", "-Wl,-soname,libfgpu.so", *words]
    command = ["gcc", *link, "-o", str(out / "libfgpu.so"), str(out / "more.c")]
    subprocess.run(command, check=True, capture_output=True)


def test_what_is_built_needs_an_old_c_library_only_and_exports_the_table(copied: Path) -> None:
    done = check(copied)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("source", "words", "complaint"),
    [
        (
            "#include <sys/random.h>\n__attribute__((constructor)) static void more(void) {\n"
            "    char byte;\n    if (getrandom(&byte, 1, 0) < 0)\n        __builtin_trap();\n}\n",
            [],
            "needs glibc 2.25, newer than 2.17",
        ),
        (
            "int cuInit(unsigned flags);\n__attribute__((constructor)) static void more(void) { cuInit(0); }\n",
            ["-Wl,--no-as-needed", "DRIVER"],
            "libfgpu.so needs libcuda.so.1",
        ),
        (
            '__attribute__((visibility("default"))) int more(void);\nint more(void) { return 0; }\n',
            [],
            "does not export what is in hooks.h",
        ),
        ("", ["-Wl,-z,execstack"], "wants an executable stack"),
    ],
    ids=["a newer C library", "the driver", "a name more", "an executable stack"],
)
def test_what_would_not_load_everywhere_is_complained_of(
    copied: Path, all_of_libfgpu: Path, source: str, words: list[str], complaint: str
) -> None:
    driver = str(copied / "simulated" / "libcuda.so.1")
    libfgpu_with(copied, source, all_of_libfgpu, *(driver if word == "DRIVER" else word for word in words))
    done = check(copied)
    assert done.returncode != 0
    assert complaint in done.stderr
