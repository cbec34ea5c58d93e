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

# How long an example takes says how busy the machine is. CI tries the same examples each time, others try new ones.
settings.register_profile("tests", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("tests")

TOGETHER = ("browser", "docker")
"""Folders whose tests share one Hub for each module; in tests/hub some do."""
HERE = Path(__file__).parent
LONGEST = ("kube", "docker", "browser", "faults", "engines", "hub", "isolation", "simulation")
"""Folders whose tests take longest: what is short is left for the end, when workers would wait for each other."""
LOG_SHOWN = 3000
NOT_TO_BE_HAD = (
    # What an engine, or a database, does not have, and says so.
    "limits of memory are not enforced here",
    "it always answers",
    "nothing stands between the Hub and this engine",
    "a thread has no limits of its own",
    "a file's lock is not cut by anybody",
    # Of NVIDIA's driver, which comes with a GPU.
    "no libcuda.so.1 is installed",
    # Debian 12 has one Python, and no PyTorch that is small.
    "no CPython ",
    "PyTorch for CPUs is in no folder",
    # Other processors, kernels and versions.
    "numbers of system calls for x86-64",
    "no system call numbers for",
    "processes can be led through atomic instructions on x86-64 only",
    "the sanitizer does not work with this kernel's layout of memory",
    "Kubernetes asks for it from 1.35 on",
    # Not tests: pictures for the documentation.
    "FGPU_DOCS_SHOTS=1 asks for pictures",
)
"""How a reason begins for which a test may be skipped with CI=true: no package would help."""
WRITERS = [f"schemathesis.reporting.{name}" for name in ("allure", "html.writer", "junitxml")]


def pytest_sessionstart() -> None:
    """Load now what schemathesis else loads as the session ends.

    pytest parses a plugin's modules itself, and Python 3.11's parser fails at times while objects that tests left are
    thrown away ("AST constructor recursion depth mismatch"): the session then fails with all its tests passed.
    """
    for name in WRITERS:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let `make test` choose: parts of tests/parts.toml, and `fast` for what belongs to none."""
    parser.addoption(
        "--part", action="append", help="run only this part (tests/parts.toml; fast: what is of none)"
    )


# First: what gives the groups to the workers is no later than this file, and reads the marks that are there.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With several workers, keep the tests that share something slow to make on one of them."""
    chosen = config.getoption("--part")
    if chosen:
        left = [i for i in items if (_part(i) or "fast") not in chosen]
        config.hook.pytest_deselected(items=left)
        gone = set(left)
        items[:] = [i for i in items if i not in gone]
    for item in items:
        path = Path(item.path)
        folder = path.parent.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else ""
        with_a_hub = folder == "hub" and _has_a_modules(item)
        shares = folder in TOGETHER or with_a_hub
        # Two marks would be a third group.
        if shares and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{folder}/{path.name}"))
    items.sort(key=_turn)


def _part(item: pytest.Item) -> str | None:
    path = Path(item.path)
    return parts.part_of(
        path.relative_to(HERE).as_posix() if path.is_relative_to(HERE) else "",
        {m.name for m in item.iter_markers()},
    )


def _has_a_modules(item: pytest.Item) -> bool:
    """Return whether a test of tests/hub uses what is made once for its module, which is a Hub mostly."""
    known = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
    return any(f.scope == "module" and f.baseid.startswith("tests/hub") for fs in known.values() for f in fs)


def _turn(item: pytest.Item) -> tuple[int, int]:
    """Return when a test's turn comes: those of Docker and the browser in turn, as these compute and those wait."""
    folder, _, name = Path(item.path).relative_to(HERE).as_posix().partition("/")
    if folder not in LONGEST:
        return len(LONGEST), 0
    return {"browser": LONGEST.index("docker")}.get(folder, LONGEST.index(folder)), crc32(name.encode())


def pytest_runtest_setup(item: pytest.Item) -> None:
    """See that the groups are kept: without them tests fail now and then, on a machine or two."""
    if item.config.getoption("loadgroup", False) and item.get_closest_marker("xdist_group") is not None:
        assert "@" in item.nodeid, "pytest-xdist does not know this test's group"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show of a failure what the Hubs of this process logged last; in CI a test that is skipped is one, but for some."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(NOT_TO_BE_HAD):
            report.outcome = "failed"
            report.longrepr = f"With CI=true nothing is skipped that could be had. {reason}"
    hubs = sys.modules.get("hubprocess")
    if report.failed and hubs is not None:
        for hub in tuple(hubs.RUNNING):
            if hub.log.exists():
                report.sections.append((f"log of {hub.url}", hub.log_text()[-LOG_SHOWN:]))
    return report


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long values by their length: a test's name is an environment variable of what it starts."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return f"{len(val)} of them"
    return None
