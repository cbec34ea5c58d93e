"""The charts of the administrators' pages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fgpuspawner.service.admin.charts import Chart, Series

ROOT = Path(__file__).parents[3]


def chart(*values: float | None, unit: str = "") -> Chart:
    return Chart(
        "Held", "steps", unit, range(0, 3600 * len(values), 3600), 3600, [Series("GPUs", "accent", values)]
    )  # type: ignore[arg-type]


def test_chart_is_told_in_words_and_gaps_stay_gaps() -> None:
    found = chart(0.5, None, 2.0, None)
    assert found.words == "Held. GPUs: from 0.5 to 2, last 2"
    assert json.loads(found.data)["series"][0]["values"] == [0.5, None, 2.0, None]
    assert chart(60, 5400, unit="s").words == "Held. GPUs: from 1 min to 1 h 30 min, last 1 h 30 min"


def test_chart_without_a_value_is_empty() -> None:
    assert chart(None, None).is_empty
    assert chart(None).words == "Held. GPUs: unknown"
    assert not chart(0.0).is_empty


def test_charting_library_is_the_one_that_the_lock_file_names() -> None:
    own, package = ROOT / "fgpuspawner/service/static/uplot", ROOT / ".node/node_modules/uplot"
    locked = json.loads((ROOT / "scripts/node/package-lock.json").read_text())
    version = locked["packages"]["node_modules/uplot"]["version"]
    assert f"(v{version})" in (own / "uPlot.iife.min.js").read_text()[:80]
    if not package.exists():
        pytest.skip("no .node: scripts/setup.sh test installs it")
    assert json.loads((package / "package.json").read_text())["version"] == version
    for file, original in (("uPlot.iife.min.js", "dist"), ("uPlot.min.css", "dist"), ("LICENSE", "")):
        assert (own / file).read_bytes() == (package / original / file).read_bytes()
