from __future__ import annotations

from pathlib import Path

import pytest

TOGETHER = ("browser", "docker")
"""Folders whose tests share one Hub for each module."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With several workers, keep the tests that share something slow to make on one of them."""
    for item in items:
        path = Path(item.path)
        shares = path.parent.name in TOGETHER or "shared_hub" in getattr(item, "fixturenames", ())
        # Two marks would be a third group.
        if shares and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(f"{path.parent.name}/{path.name}"))


def pytest_make_parametrize_id(val: object) -> str | None:
    """Name long values by their length: a test's name is an environment variable of what it starts."""
    if isinstance(val, str | bytes) and len(val) > 200:
        return f"{len(val)} of them"
    return None
