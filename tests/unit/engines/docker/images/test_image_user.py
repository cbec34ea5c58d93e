"""The user that an image's server runs as: root by any name is root."""

from __future__ import annotations

import pytest

from fgpuspawner.engines.docker.create import is_root
from fgpuspawner.engines.docker.images.inspection import numbers_of

PASSWD = b"root:x:0:0::/root:/bin/sh\ntoor:x:0:0::/:/bin/sh\njovyan:x:1000:100::/:/bin/sh\nodd:x:0x0:0::/:\nshort\n"


@pytest.mark.parametrize(
    ("name", "numbers"),
    [("toor", [0]), ("jovyan", [1000]), ("odd", [0]), ("nobody", []), ("short", [0])],
)
def test_user_numbers_come_from_the_images_passwd_file(name: str, numbers: list[int]) -> None:
    assert numbers_of(name, PASSWD) == numbers


def test_all_lines_of_a_user_count() -> None:
    assert numbers_of("a", b"a:x:1000:0:::\na:x:0:0:::\n") == [1000, 0]


@pytest.mark.parametrize(
    "line",
    [
        b"a",
        b"a:x",
        b"a:x:",
        b" a:x:0:0",
        b"\ta:x:0:0",
        b"a:x\x0b:0:0",
        b"a:x\xe2\x80\xa8:0:0",
        b"a:\r:0",
        b"\xc2\xa0a:x:+0",
    ],
)
def test_odd_passwd_line_that_the_engine_reads_as_root_counts(line: bytes) -> None:
    assert 0 in numbers_of("a", line + b"\na:x:1000:1000::/:\n")


@pytest.mark.parametrize(
    ("user", "root"), [("", True), ("root", True), ("00:0", True), ("1000:0", False), ("a", False)]
)
def test_missing_user_is_root(user: str, root: bool) -> None:
    assert is_root(user) is root
