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
def test_a_users_part_is_as_readable_as_an_engine_lets_it_be(user: str, part: str) -> None:
    assert names.owner_part(user) == part


@given(st.text(min_size=1, max_size=300))
def test_every_user_has_a_part_that_engines_take_and_that_is_theirs_alone(user: str) -> None:
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


def test_of_users_whose_names_are_too_long_each_has_a_digest() -> None:
    one, other = names.owner_part("a" * 65), names.owner_part("a" * 66)
    assert one != other
    assert one.startswith("x__h")
    assert len(one) == 68


def room(owner: str) -> int:
    return 255 - len("docker.io/") - len(f"fgpu-{INSTALLATION}/") - len(owner) - 1


def test_a_name_as_long_as_an_engine_allows_will_do_and_one_longer_names_the_limit() -> None:
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
def test_a_name_that_no_engine_takes_is_refused_with_one_that_would_do(name: str) -> None:
    with pytest.raises(BadImageName, match="such as torch-more"):
        names.checked_name(INSTALLATION, "alice", name)


@pytest.mark.parametrize("tag", ["", ".1", "-1", "1:2", "a b", "1\n", "a/b", "é"])
def test_a_tag_that_no_engine_takes_is_refused(tag: str) -> None:
    with pytest.raises(BadImageName, match="cannot be a tag"):
        names.checked_tag(tag)
