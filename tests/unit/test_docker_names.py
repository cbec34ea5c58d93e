from __future__ import annotations

import pytest

from fgpuspawner.docker import session_and_attempt


def test_a_container_of_ours_says_session_and_attempt() -> None:
    assert session_and_attempt("fgpu-a1b2c3-12-3", "a1b2c3") == (12, 3)


@pytest.mark.parametrize(
    "name",
    [
        "",
        "12-3",
        "fgpu-a1b2c3-12",
        "fgpu-a1b2c3-12-3-4",
        "fgpu-a1b2c3-0-1",
        "fgpu-a1b2c3-012-3",
        "fgpu-a1b2c3-x-1",
        "fgpu-a1b2c3-1-1 ",
        "fgpu-other-12-3",
        "fgpu-a1b2c3-" + "9" * 30 + "-1",
    ],
)
def test_any_other_name_is_not_ours(name: str) -> None:
    assert session_and_attempt(name, "a1b2c3") is None
