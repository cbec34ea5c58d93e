"""docs/kubernetes.md says of every dialect what the code says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from dialectworlds import ALL, gpu, instance, patch_of, share
from fgpuspawner.engines.kubernetes.dialects.base import Dialect

PAGE = (Path(__file__).resolve().parents[5] / "docs" / "kubernetes.md").read_text()


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of a section's table, by dialect."""
    section = PAGE.split(f"### {heading}\n")[1].split("\n#")[0]
    found = re.findall(r"^\| `(\w+)` \| (.*) \|$", section, re.M)
    return {name: cells.split(" | ") for name, cells in found}


def test_both_tables_have_every_dialect_in_order() -> None:
    names = [dialect.name for dialect in ALL]
    assert list(rows("What each needs and writes")) == names
    assert list(rows("What each holds, and what it cannot")) == names


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_the_page_says_what_enforces_shares(dialect: Dialect) -> None:
    held_to, held_by, _ = rows("What each holds, and what it cannot")[dialect.name]
    assert held_to == ("its GPU" if dialect.pins_card else "its node")
    assert held_by == dialect.held_by


@pytest.mark.parametrize("dialect", ALL, ids=lambda d: d.name)
def test_the_page_names_every_written_key(dialect: Dialect) -> None:
    device = instance() if dialect.name == "mig" else gpu()
    patches = [patch_of(dialect, share(device, device.memory_mib, 100), of=[device])]
    if dialect.name != "mig":
        patches.append(patch_of(dialect, share(device, 5120, 50), of=[device]))
    _, writes = rows("What each needs and writes")[dialect.name]
    for patch in patches:
        keys = {*patch.annotations, *patch.limits} | {c["kind"] for c in patch.claims}
        for key in keys:
            assert key.replace("1g.10gb", "PROFILE") in writes
        if scheduler := patch.spec.get("schedulerName"):
            assert f"`schedulerName: {scheduler}`" in writes
