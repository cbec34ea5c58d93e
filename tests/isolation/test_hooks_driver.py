"""What libfgpu believes of a driver, asked of the simulated one and of NVIDIA's where it is installed."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from sessionfolders import ISOLATION, MakePath

SUFFIX = re.compile(r"(_v\d)?(_ptsz|_ptds)?$")


def installed() -> Path:
    """Return NVIDIA's libcuda.so.1, as the loader would find it, or skip."""
    for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":"):
        if folder and Path(folder, "libcuda.so.1").exists():
            return Path(folder, "libcuda.so.1")
    cache = subprocess.run(["ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    for path in re.findall(r"libcuda\.so\.1 .*=> (\S+)", cache):
        return Path(path)
    pytest.skip("no libcuda.so.1 is installed, nor in LD_LIBRARY_PATH")


@pytest.fixture(params=["simulated", "installed"])
def driver(request: pytest.FixtureRequest, session_folder: MakePath) -> Path:
    return session_folder() / "simulated" / "libcuda.so.1" if request.param == "simulated" else installed()


def exports(driver: Path) -> dict[str, int]:
    out = subprocess.run(
        ["nm", "-D", "--defined-only", driver], capture_output=True, text=True, check=True
    ).stdout
    found = re.findall(r"^(\w+) [TW] (cu[A-Z]\w+)(?:@\S+)?$", out, flags=re.M)
    return {name: int(address, 16) for address, name in found}


def base(name: str) -> str:
    return SUFFIX.sub("", name)


def hooked() -> set[str]:
    return set(re.findall(r"HOOK\(CUDA, (\w+)", (ISOLATION / "libfgpu" / "hooks.h").read_text()))


def gated() -> set[str]:
    return set(re.findall(r"GATED\((cu\w+)\)", (ISOLATION / "libfgpu" / "gated.h").read_text()))


def answers(driver: Path, compile_c: MakePath, names: set[str], **env: str) -> list[tuple[str, str]]:
    done = subprocess.run(
        [compile_c("tests/hooks_equality.c", "-ldl"), driver],
        input="\n".join(sorted(names)),
        env={"LC_ALL": "C", **env},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    return [(" ".join(line[:3]), line[3]) for line in lines]


def test_each_answer_of_cuGetProcAddress_is_an_exported_address(driver: Path, compile_c: MakePath) -> None:
    exported = exports(driver)
    asked = answers(driver, compile_c, {base(name) for name in exported})
    assert len(asked) > 1000
    known = set(exported.values())
    assert [what for what, where in asked if int(where, 16) not in known] == []


def test_no_two_hooks_of_different_functions_share_an_address(driver: Path) -> None:
    exported = exports(driver)
    owners: dict[int, set[str]] = {}
    for name in hooked() & set(exported):
        owners.setdefault(exported[name], set()).add(base(name))
    assert [names for names in owners.values() if len(names) > 1] == []


def test_no_function_that_is_not_hooked_shares_the_address_of_a_hook(driver: Path) -> None:
    exported = exports(driver)
    at_hooks = {exported[name] for name in hooked() & set(exported)}
    assert {n for n, address in exported.items() if address in at_hooks} - hooked() == set()


def test_each_answer_for_a_hooked_function_is_a_hook(
    driver: Path, compile_c: MakePath, session_folder: MakePath
) -> None:
    library = session_folder() / "libfgpu.so"
    bases = {base(name) for name in hooked()}
    waiting = {base(name) for name in gated()} - bases
    others = {base(name) for name in exports(driver)} - bases - waiting
    asked = answers(driver, compile_c, bases, LD_PRELOAD=str(library))
    assert len(asked) > 500
    assert {where for _, where in asked} == {"libfgpu.so"}
    # Of a function that only waits, a version that is not in the table is the driver's.
    known = answers(driver, compile_c, waiting & set(exports(driver)), LD_PRELOAD=str(library))
    assert "libfgpu.so" in {where for _, where in known}
    # Nothing else is a hook, except functions with another name in newer versions.
    aliases = {"cuGraphInstantiateWithFlags"}
    left_alone = answers(driver, compile_c, others - aliases, LD_PRELOAD=str(library))
    assert [what for what, where in left_alone if where == "libfgpu.so"] == []


def test_the_answers_are_those_without_libfgpu(
    driver: Path, compile_c: MakePath, session_folder: MakePath
) -> None:
    """As many, for the same versions: nothing is refused that the driver has."""
    names = {base(name) for name in exports(driver)}
    preload = str(session_folder() / "libfgpu.so")
    with_it = answers(driver, compile_c, names, LD_PRELOAD=preload)
    without = answers(driver, compile_c, names)
    assert [what for what, _ in with_it] == [what for what, _ in without]
    untouched = dict(without)
    assert all(where in ("libfgpu.so", untouched[what]) for what, where in with_it)
