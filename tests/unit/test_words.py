"""Texts for people have none of the words that docs/words.toml replaces; docstrings and comments few of its riddles."""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROSE = (*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "labextension/README.md")
PYTHON = (
    *ROOT.glob("fgpuspawner/**/*.py"),
    *ROOT.glob("scheduler/fgpu_scheduler/**/*.py"),
    *ROOT.glob("scripts/*.py"),
)
PAGES = (*ROOT.glob("fgpuspawner/**/templates/**/*.html"), *ROOT.glob("fgpuspawner/**/*.js"))
KNOWN = tomllib.loads((ROOT / "docs/words.toml").read_text())
RIDDLES = re.compile(KNOWN["prose"]["words"], re.I)
CODE = re.compile("`[^`]*`")
FOLDERS = sorted(
    {
        path.parent.relative_to(ROOT).as_posix()
        for folder in ("bench", "fgpuspawner", "images", "labextension", "scheduler", "scripts", "tests")
        for path in (ROOT / folder).rglob("*.py")
        if "node_modules" not in path.parts
    }
)
WORDS = {re.compile(rf"\b{word}\b", re.I): better for word, better in KNOWN.items() if word != "prose"}
NOT_READ = re.compile(r"<!--.*?-->|\{#.*?#\}|/\*.*?\*/|^\s*//.*?$", re.S | re.M)


def parsed(source: str) -> ast.Module:
    # CPython counts the depth of two parsers in one place (gh-106905): a collected object with a traceback, which is
    # parsed, would fail this one.
    gc.disable()
    try:
        return ast.parse(source)
    finally:
        gc.enable()


def strings(source: str) -> Iterator[str]:
    """Return the texts of a program that are not its documentation, each as one line."""
    tree = parsed(source)
    documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
            yield node.value


def prose(source: str) -> Iterator[str]:
    """Return the docstrings and comments of a program."""
    for node in ast.walk(parsed(source)):
        if (
            isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            yield node.value.value
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


def found(text: str) -> list[str]:
    text = " ".join(text.split())
    return [
        f"{match[0]!r}: write {better!r}"
        for word, better in WORDS.items()
        for match in [word.search(text)]
        if match
    ]


@pytest.mark.parametrize("path", PROSE, ids=lambda path: path.name)
def test_documentation_is_easy_to_read(path: Path) -> None:
    assert found(re.sub(r"```.*?```", "", path.read_text(), flags=re.S)) == []


def test_messages_are_easy_to_read() -> None:
    hard = {
        f"{path.relative_to(ROOT)}: {text[:60]}": words
        for path in PYTHON
        if "testing" not in path.parts
        for text in strings(path.read_text())
        if (words := found(text))
    }
    assert hard == {}


def test_pages_are_easy_to_read() -> None:
    hard = {path.name: words for path in PAGES if (words := found(NOT_READ.sub("", path.read_text())))}
    assert hard == {}


def test_every_module_says_what_it_is_for() -> None:
    texts = {path: ast.get_docstring(parsed(source)) for path in PYTHON if (source := path.read_text())}
    assert [str(path) for path, text in texts.items() if len((text or "").split()) < 3] == []


@pytest.mark.parametrize("folder", FOLDERS)
def test_docstrings_and_comments_are_easy_to_read(folder: str) -> None:
    texts = {path: list(prose(path.read_text())) for path in (ROOT / folder).glob("*.py")}
    assert texts
    words = sum(len(text.split()) for of_path in texts.values() for text in of_path)
    read = [(path, CODE.sub("", text)) for path, of_path in texts.items() for text in of_path]
    hard = [f"{path}: {text}" for path, text in read if RIDDLES.search(text)]
    assert len(hard) <= words / 1000, hard


def test_a_hard_word_is_found_in_a_message_and_not_in_a_docstring() -> None:
    (message,) = strings('def f():\n    """Begins anew."""\n    return "it begins anew"\n')
    assert found(message) == ["'anew': write 'again'"]
