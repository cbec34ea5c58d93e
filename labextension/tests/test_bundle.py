"""What a browser loads of the extension."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

BUILT = Path(__file__).resolve().parents[1] / "jupyterlab_fgpu" / "labextension"
MOST_BYTES = 150_000


@pytest.fixture
def files() -> list[Path]:
    """All files of the built extension."""
    if not (BUILT / "package.json").exists():
        pytest.skip("the extension is not built here (jlpm build:prod)")
    return [path for path in BUILT.rglob("*") if path.is_file()]


def test_the_extension_is_small(files: list[Path]) -> None:
    if any("development" in path.name or path.suffix == ".map" for path in files):
        pytest.skip("this is a build for development (jlpm build:prod)")
    assert sum(path.stat().st_size for path in files) <= MOST_BYTES


def test_the_browser_is_sent_nowhere_else(files: list[Path]) -> None:
    scripts = [path.read_text() for path in files if path.suffix == ".js"]
    assert scripts
    found = {url for text in scripts for url in re.findall(r"https?://[\w.-]+", text)}
    # A namespace's name: no page requests it.
    assert found <= {"http://www.w3.org"}


def test_colours_are_the_themes(files: list[Path]) -> None:
    style = (Path(__file__).resolve().parents[1] / "style" / "base.css").read_text()
    assert not re.findall(r"#[0-9a-fA-F]{3,8}\b|\brgba?\(|\bhsla?\(", style)
