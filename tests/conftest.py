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
        if shares:
            item.add_marker(pytest.mark.xdist_group(f"{path.parent.name}/{path.name}"))
