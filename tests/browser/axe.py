"""Accessibility problems that axe-core finds on a page."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page

AXE = Path(__file__).parents[2] / ".node/node_modules/axe-core/axe.min.js"
COUNTS = ("serious", "critical")

RUN = """
async (within) => {
  const found = await axe.run(within || document, {resultTypes: ["violations"], preload: false});
  return found.violations.map((v) => ({
    id: v.id, impact: v.impact, help: v.help,
    nodes: v.nodes.map((n) => ({html: n.html, why: n.failureSummary}))
  }));
}
"""


@cache
def _source() -> str:
    if not AXE.exists():
        pytest.fail(f"no axe-core at {AXE}: scripts/setup.sh test installs it")
    return AXE.read_text()


def check_page(page: Page, *, within: str | None = None) -> None:
    """Fail with what is seriously or critically wrong on the page as it is now, or in the part ``within`` selects.

    Wait before until the page shows what it is to show. The page's own policy does not stand in the way.
    """
    if not page.evaluate("typeof axe === 'object'"):
        # Evaluated by the browser's own protocol, and not added to the page: policies forbid that.
        page.evaluate(_source())
    found: list[dict[str, Any]] = page.evaluate(RUN, within)
    wrong = [violation for violation in found if violation["impact"] in COUNTS]
    assert not wrong, f"{page.url}\n" + "\n".join(_told(violation) for violation in wrong)


def _told(violation: dict[str, Any]) -> str:
    where = "\n".join(f"    {node['html'][:300]}\n      {node['why']}" for node in violation["nodes"][:5])
    return f"{violation['impact']} {violation['id']}: {violation['help']}\n{where}"
