"""The documentation as a site: every page has its place, a mistake in one is an error, and it needs no other server."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]


class Settings(yaml.SafeLoader):
    """Reads mkdocs.yml, where a function is named too."""


Settings.add_multi_constructor("tag:yaml.org,2002:python/", lambda *_: None)


def placed(entry: object) -> list[str]:
    """Return the pages of a part of the navigation, in order."""
    if isinstance(entry, str):
        return [entry]
    parts = entry if isinstance(entry, list) else list(entry.values()) if isinstance(entry, dict) else []
    return [page for part in parts for page in placed(part)]


def test_every_page_has_one_place_in_the_sites_navigation() -> None:
    settings = yaml.load((ROOT / "scripts/mkdocs.yml").read_text(encoding="utf-8"), Settings)
    pages = {str(path.relative_to(ROOT)) for path in (ROOT / "docs").glob("*.md")}
    found = placed(settings["nav"])
    assert len(found) == len(set(found))
    assert pages - set(found) == set()
    assert [page for page in found if not (ROOT / page).is_file()] == []


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_page_begins_with_its_readers(page: str) -> None:
    lines = (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines()[1:]
    first = next(line for line in lines if line and not line.startswith("<!--"))
    assert first.startswith("For "), first


def build(root: Path) -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(root / "scripts/site.py")]
    return subprocess.run(words, cwd=root, capture_output=True, text=True, timeout=300)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The pages and what builds them, where they can be changed."""
    for name in ("docs", "images", "isolation", "labextension", "bench"):
        ignored = shutil.ignore_patterns("node_modules", "build", "lib", "*.py", "*.c", "*.h")
        shutil.copytree(ROOT / name, tmp_path / name, ignore=ignored)
    for path in (*ROOT.glob("*.md"), ROOT / "scripts/site.py", ROOT / "scripts/mkdocs.yml"):
        target = tmp_path / path.relative_to(ROOT)
        target.parent.mkdir(exist_ok=True)
        shutil.copy(path, target)
    return tmp_path


@pytest.mark.slow
def test_site_builds_without_external_resources(copied: Path) -> None:
    done = build(copied)
    assert done.returncode == 0, done.stdout + done.stderr
    site = copied / "build/docs"
    shown = {path: path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert len(shown) > 50
    for path, text in shown.items():
        fetched = re.findall(r"<(?:script|img|iframe|source)\b[^>]*\bsrc=\"?([^\s\">]+)", text)
        fetched += re.findall(
            r"<link\b(?=[^>]*\brel=\"?(?:stylesheet|icon|preload|preconnect))[^>]*\bhref=\"?([^\s\">]+)", text
        )
        assert fetched
        assert [url for url in fetched if re.match(r"(?:https?:)?//", url)] == [], path
        # The theme would fetch what draws these from elsewhere.
        assert not re.search(r"class=\"?[^\">]*\bmermaid\b", text), path
    styles = "".join(path.read_text(encoding="utf-8") for path in site.rglob("*.css"))
    assert re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)", styles) == []


@pytest.mark.slow
@pytest.mark.parametrize("mistake", ["[gone](gone.md)", "[gone](user.md#gone)", "[elsewhere](/gone.html)"])
def test_a_link_that_leads_nowhere_is_an_error(copied: Path, mistake: str) -> None:
    with (copied / "docs/user.md").open("a", encoding="utf-8") as page:
        page.write(f"\n{mistake}\n")
    done = build(copied)
    assert done.returncode != 0
    assert "docs/user.md" in done.stderr
