"""Words that every page uses."""

from __future__ import annotations

from fgpuspawner.text.sessions import mib


def test_memory_is_shown_exactly() -> None:
    assert [mib(n) for n in (128, 512, 2048, 1152, 16160)] == [
        "128 MiB",
        "0.5 GiB",
        "2 GiB",
        "1.125 GiB",
        "16160 MiB",
    ]
