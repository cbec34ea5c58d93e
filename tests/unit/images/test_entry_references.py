"""Names of private images: an engine takes them, and no two users share one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fgpu_scheduler.errors import BadImageName
from fgpu_scheduler.store import private_image as names
from fgpuspawner.images.entry import REFERENCE

INSTALLATION = "0123456789ab"


@pytest.mark.parametrize(
    ("user", "part"),
    [
        ("alice", "alice"),
        ("a.b-c_d", "a.b-c_d"),
        ("alice@lab.org", "alice__40lab.org"),
        ("Alice", "x__x416c696365"),
        ("aLice", "a__4cice"),
        ("a__40b", "a__5f__5f40b"),
        ("a..b", "a__2e__2eb"),
        ("a-", "a__2d"),
        ("é", "x__xc3a9"),
        ("x__x41", "x__5f__5fx41"),
        ("../root", "x__x2e2e2f726f6f74"),
    ],
)
def test_user_part_of_an_image_name_is_readable(user: str, part: str) -> None:
    assert names.owner_part(user) == part


@given(st.text(min_size=1, max_size=300))
def test_user_part_is_a_valid_reference(user: str) -> None:
    part = names.owner_part(user)
    assert names.PART.fullmatch(part)
    assert len(part) <= 2 * names.MOST_OWNER + 4
    assert REFERENCE.fullmatch(names.reference_of(INSTALLATION, f"{part}/torch:1"))


@given(
    st.text(alphabet="aA_-.@0x4", min_size=1, max_size=8),
    st.text(alphabet="aA_-.@0x4", min_size=1, max_size=8),
)
def test_two_users_never_have_the_same_part(one: str, other: str) -> None:
    assert (names.owner_part(one) == names.owner_part(other)) is (one == other)


def test_long_user_names_become_digests() -> None:
    one, other = names.owner_part("a" * 65), names.owner_part("a" * 66)
    assert one != other
    assert one.startswith("x__h")
    assert len(one) == 68


def room(owner: str) -> int:
    return 255 - len("docker.io/") - len(f"fgpu-{INSTALLATION}/") - len(owner) - 1


def test_image_name_above_the_limit_is_refused() -> None:
    longest = "n" * room("alice")
    assert names.checked_name(INSTALLATION, "alice", longest) == f"alice/{longest}"
    with pytest.raises(BadImageName, match=rf"{room('alice') + 1} characters; at most {room('alice')} are"):
        names.checked_name(INSTALLATION, "alice", longest + "n")
    assert names.checked_tag("t" * 128)
    with pytest.raises(BadImageName, match="129 characters; at most 128 are possible"):
        names.checked_tag("t" * 129)


@pytest.mark.parametrize(
    "name", ["", "Torch", "a/b", "a:1", "-a", "a-", "a..b", "a b", "a;rm", "$(x)", "é", "a\n", "a__"]
)
def test_invalid_image_name_is_refused_with_an_example(name: str) -> None:
    with pytest.raises(BadImageName, match="such as torch-more"):
        names.checked_name(INSTALLATION, "alice", name)


@pytest.mark.parametrize("tag", ["", ".1", "-1", "1:2", "a b", "1\n", "a/b", "é"])
def test_invalid_tag_is_refused(tag: str) -> None:
    with pytest.raises(BadImageName, match="cannot be a tag"):
        names.checked_tag(tag)
