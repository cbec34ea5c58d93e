"""The messages that docs/troubleshooting.md quotes are those of the code."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/troubleshooting.md"
CODE = [
    path
    for folder in ("fgpuspawner", "scheduler/fgpu_scheduler")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
OF_OTHERS = {"CERTIFICATE_VERIFY_FAILED"}
"""What the page quotes of Python's, not of ours."""
VARIES = re.compile(r"%[-0-9.]*[sdrf]")


def text_of(node: ast.expr) -> str | None:
    """Return what a literal says, with … for what is put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return VARIES.sub("…", node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
    return None


def said() -> str:
    found = []
    for path in CODE:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        found += [text for node in ast.walk(tree) if isinstance(node, ast.expr) and (text := text_of(node))]
    return "\n".join(found)


def quoted() -> list[str]:
    """Return what the page quotes in the first column of its tables: of words of ours, four or more."""
    rows = [
        line.split(" | ")[0]
        for line in PAGE.read_text(encoding="utf-8").splitlines()
        if line.startswith("| ")
    ]
    found = [text for row in rows for text in re.findall(r"`([^`]+)`", row)]
    return [text for text in found if text not in OF_OTHERS]


def test_what_is_quoted_is_what_the_code_says() -> None:
    code = said()
    assert len(quoted()) > 30
    assert [message for message in quoted() if message not in code] == []


def test_messages_are_found_with_what_varies_in_them() -> None:
    (literal,) = ast.parse('f"GPU {gpu} of " f"{node!r} is gone"').body
    assert isinstance(literal, ast.Expr)
    assert text_of(literal.value) == "GPU … of … is gone"
    assert text_of(ast.Constant("Node %s does not answer")) == "Node … does not answer"
