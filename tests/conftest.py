from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Generator
from pathlib import Path
from zlib import crc32

import parts
import pytest
from hypothesis import settings

from fgpuspawner.isolation import native

# No deadline: the time of an example depends on the machine's load. CI uses the same examples in each run.
settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tests")

TOGETHER = ("browser", "docker")
"""Folders in which the tests of a module share a Hub; in tests/hub only some do."""
HERE = Path(__file__).parent
LONGEST = ("kube", "docker", "browser", "faults", "engines", "hub", "isolation", "simulation")
"""Folders with the longest tests, which run first, so that short tests keep all workers busy at the end."""
LOG_SHOWN = 3000
ALLOWED_SKIPS = (
    # Features that an engine or a database lacks.
    "limits of memory are not enforced here",
    "it always answers",
    "nothing stands between the Hub and this engine",
    "a thread has no limits of its own",
    "a file's lock is not cut by anybody",
    # NVIDIA's driver, which needs a GPU.
    "no libcuda.so.1 is installed",
    # Debian 12 has one Python version and no small PyTorch.
    "no CPython ",
    "PyTorch for CPUs is in no folder",
    # Other processors, kernels and versions.
    "numbers of system calls for x86-64",
    "no system call numbers for",
    "processes can be led through atomic instructions on x86-64 only",
    "the sanitizer does not work with this kernel's layout of memory",
    "Kubernetes asks for it from 1.35 on",
    # Pictures for the documentation, which are no tests.
    "FGPU_DOCS_SHOTS=1 asks for pictures",
)
"""The beginnings of reasons for which a test may be skipped with CI=true, because no package would help."""
WRITERS = [f"schemathesis.reporting.{name}" for name in ("allure", "html.writer", "junitxml")]


def pytest_sessionstart() -> None:
    """Import modules now that schemathesis would import when the session ends.

    pytest parses a plugin's modules, and Python 3.11's parser sometimes fails while the garbage collector deletes objects
    of tests ("AST constructor recursion depth mismatch"). The session would then fail though all its tests passed.
    """
    for name in WRITERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option by which `make test` chooses parts of tests/parts.toml, or `fast` for all other tests."""
    parser.addoption(
        "--part", action="append", help="run only this part (tests/parts.toml; fast: what is of none)"
    )


# First, because pytest-xdist reads the group marks in this hook too.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Select the chosen parts, and run tests that share a slow fixture on one worker."""
    chosen = config.getoption("--part")
    if chosen:
        left = [i for i in items if (_part(i) or "fast") not in chosen]
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [i for i in items if i not in gone]
    for item in items:
        path = Path(item.path)
        folder = path.parent.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
        with_a_hub = folder == "hub" and _uses_module_fixture(item)
        shares = folder in TOGETHER or with_a_hub
        # A second mark would make another group.
        if shares and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{folder}/{path.name}"))
    items.sort(key=_sort_key)


def _part(item: pytest.Item) -> str | None:
    path = Path(item.path)
    return parts.part_of(
        path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else "",
        {m.name for m in item.iter_markers()},
    )


def _uses_module_fixture(item: pytest.Item) -> bool:
    """Return whether a test of tests/hub uses a module's fixture, usually a Hub."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(f.scope == "module" and f.baseid.startswith("tests/hub") for fs in known.values() for f in fs)


def _sort_key(item: pytest.Item) -> tuple[int, int]:
    """Return the sort key of a test. Docker and browser tests are mixed: the first mostly wait, the others compute."""
    folder, _, name = Path(item.path).relative_to(HERE).as_posix().partition("/")
    if folder not in LONGEST:
        return len(LONGEST), 0
    return {"browser": LONGEST.index("docker")}.get(folder, LONGEST.index(folder)), crc32(name.encode())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Check that pytest-xdist uses the groups: without them tests fail sometimes."""
    if item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group") is not None:
        assert "@" in item.nodeid, "pytest-xdist does not know this test's group"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the end of the Hubs' logs to a failure. With CI=true a skipped test fails unless `ALLOWED_SKIPS` has it."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"With CI=true nothing is skipped that could be had. {reason}"
    hubs = sys.modules.get("hubprocess")
    if report.failed and hubs is not None:
        for hub in tuple(hubs.RUNNING):
            if hub.log.exists():
                report.sections.append((f"log of {hub.url}", hub.log_text()[-LOG_SHOWN:]))
    return report


@pytest.fixture(scope="session")
def libfgpu_built() -> None:
    """libfgpu has to be there; in CI it is a failure when it is not."""
    if native.find() is None:
        pytest.skip(native.NOT_BUILT)


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long values by their length, because a test's name becomes an environment variable of its processes."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return f"{len(val)} of them"
    return None
