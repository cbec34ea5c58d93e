"""The wheel: libfgpu is built with it where there is a compiler, and the install works, loudly, where there is none."""

from __future__ import annotations

import json
import os
import runpy
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from fgpuspawner import __version__

ROOT = Path(__file__).parents[2]
SOURCES = (
    "fgpuspawner",
    "scheduler",
    "isolation",
    "scripts",
    "images",
    "labextension/package.json",
    "labextension/jupyterlab_fgpu/smi.py",
    "labextension/jupyterlab_fgpu/verify.py",
    "pyproject.toml",
    "hatch_build.py",
    "README.md",
    "LICENSE",
    ".gitignore",
)
BUILT = {
    "libfgpu.so",
    "probe",
    "probe-static",
    "simulated/libcuda.so.1",
    "simulated/libnvidia-ml.so.1",
}
COMMANDS = {"commands/fgpu-smi", "commands/fgpu-verify"}


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the sources, as what is built lands among them."""
    copy = tmp_path / "checkout"
    for name in SOURCES:
        source, target = ROOT / name, copy / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("native", "build", "__pycache__"))
        else:
            shutil.copy(source, target)
    return copy


def build(checkout: Path, **env: str) -> tuple[Path, str]:
    """Build the wheel as pip would; return it, and what was said."""
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(checkout / "dist")],
        cwd=checkout,
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = (checkout / "dist").glob("*.whl")
    return wheel, done.stdout + done.stderr


def native_in(wheel: Path) -> dict[str, int]:
    """Return what the wheel has in fgpuspawner/native, with the files' modes."""
    prefix = "fgpuspawner/native/"
    with zipfile.ZipFile(wheel) as archive:
        return {
            info.filename.removeprefix(prefix): (info.external_attr >> 16) & 0o777
            for info in archive.infolist()
            if info.filename.startswith(prefix)
        }


@pytest.mark.skipif(shutil.which("gcc") is None or shutil.which("make") is None, reason="no gcc, or no make")
def test_a_wheel_carries_libfgpu_and_is_of_one_platform_and_any_python(checkout: Path) -> None:
    wheel, _ = build(checkout)
    assert wheel.name.startswith("fgpuspawner-0.1.0-py3-none-linux_")
    found = native_in(wheel)
    assert set(found) == BUILT | COMMANDS
    assert {found[name] for name in BUILT} == {0o755}
    # An editable install leaves the same in the checkout.
    assert (checkout / "fgpuspawner" / "native" / "libfgpu.so").is_file()


def test_without_a_compiler_the_wheel_is_built_and_says_loudly_what_is_missing(checkout: Path) -> None:
    wheel, said = build(checkout, CC="/no/such/gcc")
    assert wheel.name == "fgpuspawner-0.1.0-py3-none-any.whl"
    assert set(native_in(wheel)) == COMMANDS
    assert "WARNING: fgpuspawner is installed WITHOUT libfgpu: there is no C compiler (/no/such/gcc)" in said
    assert "apt-get install gcc make libc6-dev" in said
    assert "a Hub with real GPUs does not start" in said


def test_a_compiler_that_fails_is_an_error_and_not_a_wheel_without(checkout: Path) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("no gcc")
    for source in (checkout / "isolation" / "libfgpu").glob("*.c"):
        source.unlink()
    (checkout / "isolation" / "libfgpu" / "broken.c").write_text("int broken(void) { return; }\n")
    done = subprocess.run(
        [sys.executable, "scripts/build_isolation.py"],
        cwd=checkout,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1
    assert "broken.c" in done.stderr
    assert not (checkout / "fgpuspawner" / "native").exists()


def test_the_version_is_that_of_the_jupyterlab_extension() -> None:
    assert __version__ == json.loads((ROOT / "labextension/package.json").read_text())["version"]


def test_missing_build_tool_is_named(checkout: Path) -> None:
    def check(**env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "scripts/build_isolation.py", "--check"],
            cwd=checkout,
            env={**os.environ, **env},
            capture_output=True,
            text=True,
            check=False,
        )

    absent = check(CC="/no/such/gcc")
    assert (absent.returncode, absent.stdout) == (1, "")
    assert absent.stderr == "there is no C compiler (/no/such/gcc): apt-get install gcc make libc6-dev\n"
    headless = check(CC="false")
    assert "the C library's headers, or its static library, are missing" in headless.stderr


def test_the_proxys_packages_are_pinned_by_their_digests_and_no_address_is_named() -> None:
    text = (ROOT / "scripts" / "node" / "package-lock.json").read_text()
    packages = {path: own for path, own in json.loads(text)["packages"].items() if path}
    assert "node_modules/configurable-http-proxy" in packages
    assert [path for path, own in packages.items() if not own["integrity"].startswith("sha512-")] == []
    assert "://" not in text
    assert '"resolved"' not in text


def test_files_that_did_not_change_stay_the_same_files(tmp_path: Path) -> None:
    put = runpy.run_path(str(ROOT / "scripts/build_isolation.py"))["put_commands"]
    put(tmp_path)
    (tmp_path / "commands/fgpu-verify").write_text("an older version")
    before = {path.name: path.stat().st_ino for path in (tmp_path / "commands").iterdir()}
    put(tmp_path)
    after = {path.name: path.stat().st_ino for path in (tmp_path / "commands").iterdir()}
    assert {name for name in after if after[name] != before[name]} == {"fgpu-verify"}
    assert (tmp_path / "commands/fgpu-verify").read_bytes() == (
        ROOT / "labextension/jupyterlab_fgpu/verify.py"
    ).read_bytes()
