"""The documentation: generated pages are current, nothing that there is goes unmentioned, every link leads somewhere."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from traitlets import HasTraits

from fgpu_scheduler import LEGAL, MOVED_BY, EndCause, SessionState, WaitReason
from fgpuspawner.engines.docker.spawner import FGPUSpawner
from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner
from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.settings import FGPU

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.glob("**/*.md")])
OWNERS: tuple[type[HasTraits], ...] = (FGPU, FGPUSpawner, KubernetesFGPUSpawner, LocalFGPUSpawner)
SOURCES = [
    path
    for folder in (ROOT / "fgpuspawner", ROOT / "scheduler" / "fgpu_scheduler")
    for path in sorted(folder.rglob("*.py"))
    if "testing" not in path.parts and path.name not in ("model.py", "lifecycle.py")
]


def load_generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fgpu_docs", ROOT / "scripts" / "docs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


generator = load_generator()


def prose(path: Path) -> str:
    """Return a page without its blocks of code, where brackets are no links."""
    return re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)


def anchors(path: Path) -> set[str]:
    """Return the anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ +(.+)$", prose(path), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def links() -> Iterator[tuple[Path, str]]:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
            if not re.match(r"[a-z]+:", target):
                yield page, target


@pytest.mark.parametrize("name", list(generator.PAGES))
def test_a_generated_page_is_what_the_code_says_now(name: str) -> None:
    assert (DOCS / name).read_text(encoding="utf-8") == generator.PAGES[name](), "run scripts/docs.py"


def test_every_state_with_its_changes_and_its_mover_is_in_the_life_cycle() -> None:
    text = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    assert set(generator.STATES) == set(SessionState)
    for state, following in LEGAL.items():
        row = next(line for line in text.splitlines() if line.startswith(f"| {state} |"))
        assert MOVED_BY[state] in row
        for to in following:
            assert to in row
            assert f"    {state} --> {to}\n" in text


@pytest.mark.parametrize(
    ("kind", "sentences"), [(WaitReason, generator.WAIT_REASONS), (EndCause, generator.END_CAUSES)]
)
def test_every_reason_and_cause_has_a_sentence_and_is_given_by_the_code(
    kind: type[WaitReason] | type[EndCause], sentences: dict[str, str]
) -> None:
    text = (DOCS / "lifecycle.md").read_text(encoding="utf-8")
    code = "\n".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert set(sentences) == set(kind)
    for member in kind:
        assert f"| {member} | {sentences[member]} |" in text
        assert f"{kind.__name__}.{member.name}" in code


@pytest.mark.parametrize("owner", OWNERS, ids=lambda owner: owner.__name__)
def test_every_setting_is_documented_with_its_help_default_and_an_example_that_sets_it(
    owner: type[HasTraits],
) -> None:
    text = (DOCS / "settings.md").read_text(encoding="utf-8")
    ours = {
        n
        for n, t in owner.class_traits(config=True).items()
        if t.this_class.__module__.startswith("fgpuspawner.")
    }
    assert generator.own_traits(owner).keys() == ours
    for name, trait in generator.own_traits(owner).items():
        example = str(trait.metadata.get("help", "")).partition("Example")[2]
        assert f"c.{owner.__name__}.{name} = " in example, name
        section = text.partition(f"### {owner.__name__}.{name}\n")[2].partition("\n### ")[0]
        default, _, said = section.strip().partition("\n")
        assert default == f"Default: `{generator.shown_default(owner, name)}`"
        assert said.strip(), f"{owner.__name__}.{name} has no help"


def test_every_relative_link_leads_to_a_file_and_a_heading() -> None:
    broken = []
    for page, target in links():
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(f"{page.relative_to(ROOT)}: {target}")
    assert broken == []


def test_every_test_and_bench_that_a_page_names_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r"`((?:tests|bench)/[\w/.-]+)`", page.read_text())}
    assert named
    assert [name for name in sorted(named) if not (ROOT / name).exists()] == []


def test_every_page_can_be_reached_from_the_readme() -> None:
    leads: dict[Path, set[Path]] = {}
    for page, target in links():
        leads.setdefault(page, set()).add((page.parent / target.partition("#")[0]).resolve())
    reached, new = set(), {ROOT / "README.md"}
    while new:
        reached |= new
        new = {p for page in new for p in leads.get(page, set()) if p.suffix == ".md"} - reached
    assert set(PAGES) - reached == set()


def test_every_decision_has_a_number_of_its_own() -> None:
    names = sorted(path.name for path in (DOCS / "decisions").glob("*.md") if path.name != "README.md")
    assert len({name[:4] for name in names}) == len(names)
    for name in names:
        text = (DOCS / "decisions" / name).read_text(encoding="utf-8")
        assert text.startswith(f"# {name[:4]} ")
        assert "## Why" in text


def test_the_readme_tells_what_make_run_takes() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    taken = re.findall(r"^export (\w+) \?=", makefile, flags=re.MULTILINE)
    assert taken
    for name in taken:
        assert f"`{name}`" in text


def test_page_begins_with_its_heading_and_has_no_line_to_be_written() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        assert text.startswith("# "), page
        assert not re.search(r"\b(TODO|TBD|FIXME|XXX)\b", text), page
