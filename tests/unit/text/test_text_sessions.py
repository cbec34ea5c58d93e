"""Other people's words in sentences of ours, and amounts in words."""

from __future__ import annotations

import pytest

from fgpuspawner.text.sessions import isolated, mib


@pytest.mark.parametrize("text", ["", "ana", "<b>&\"'", "Zoë 3"])
def test_left_to_right_text_is_unchanged(text: str) -> None:
    assert isolated(text) == text


@pytest.mark.parametrize("text", ["\u05d0\u05d1", "a\u202eb", "\u0627 x", "a\u202ab"])
def test_right_to_left_text_is_isolated(text: str) -> None:
    assert isolated(text) == f"\u2068{text}\u2069"


def test_isolation_cannot_be_closed_by_the_text() -> None:
    assert isolated("a\u2069\u202eb\u2067") == "\u2068a\u202eb\u2069"


def test_memory_text_is_exact() -> None:
    assert [mib(n) for n in (128, 512, 2048, 1152, 16160)] == [
        "128 MiB",
        "0.5 GiB",
        "2 GiB",
        "1.125 GiB",
        "16160 MiB",
    ]
