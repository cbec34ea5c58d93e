"""The memory of kernel code by image, learnt from sessions: no single user sets what others are charged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fgpuspawner.isolation.code_memory import CODE, KEPT, MOST_IMAGES, MOST_MIB, MOST_USERS, CodeMemory

GPU = "NVIDIA A100, driver 580.65"


def learnt(path: Path, **by_user: list[int]) -> CodeMemory:
    memory = CodeMemory(path)
    for user, figures in by_user.items():
        for mib in figures:
            memory.learn(GPU, "torch", user, mib)
    return memory


@pytest.mark.parametrize(
    ("by_user", "user", "charged"),
    [
        pytest.param({}, "alice", 0, id="nothing is known"),
        pytest.param({"alice": [200]}, "alice", 200, id="one's own"),
        pytest.param({"alice": [200]}, "bob", 0, id="a single stranger's"),
        pytest.param({"alice": [200], "mallory": [1000]}, "bob", 200, id="the less of two"),
        pytest.param({"a": [210], "b": [200], "mallory": [1000] * 9}, "bob", 210, id="the middle"),
        pytest.param({"alice": [200, 900, 210]}, "alice", 210, id="one that does not belong"),
        pytest.param({"alice": [1, 1, 200, 210, 220]}, "alice", 210, id="the last three"),
        pytest.param({"alice": [MOST_MIB + 1, -1]}, "alice", 0, id="what makes no sense"),
    ],
)
def test_a_user_is_charged_by_their_own_sessions_or_by_the_middle_of_others(
    tmp_path: Path, by_user: dict[str, list[int]], user: str, charged: int
) -> None:
    memory = learnt(tmp_path, **by_user)
    assert memory.charged_mib(GPU, "torch", user) == charged
    assert memory.charged_mib(GPU, "other", user) == memory.charged_mib("H100", "torch", user) == 0
    assert CodeMemory(tmp_path).charged_mib(GPU, "torch", user) == charged, "it is kept"


def test_stored_figures_are_bounded_and_have_no_user_names(tmp_path: Path) -> None:
    memory = learnt(tmp_path, **{f"user-{n}": [n] * (KEPT + 1) for n in range(MOST_USERS + 2)})
    for n in range(MOST_IMAGES):
        memory.learn(GPU, f"image-{n}", "alice", 1)
    text = (tmp_path / CODE.name).read_text()
    assert "alice" not in text
    kept = json.loads(text)
    assert len(kept) == MOST_IMAGES
    assert memory.charged_mib(GPU, "torch", "user-5") == 0, "the oldest image is forgotten"
    (tmp_path / "full").mkdir()
    learnt(tmp_path / "full", **{f"user-{n}": [n] * (KEPT + 1) for n in range(MOST_USERS + 2)})
    (by_user,) = json.loads((tmp_path / "full" / CODE.name).read_text()).values()
    assert sorted(by_user.values()) == [[n] * KEPT for n in range(2, MOST_USERS + 2)]


@pytest.mark.parametrize("text", ["", "[]", '{"a": {"b": 1}}', '{"a": {"b": [-1]}}', '{"a": {"b": []}}'])
def test_figures_that_make_no_sense_are_learnt_again(tmp_path: Path, text: str) -> None:
    (tmp_path / CODE.name).write_text(text)
    memory = CodeMemory(tmp_path)
    assert memory.charged_mib("a", "", "b") == 0
    memory.learn(GPU, "torch", "alice", 7)
    assert CodeMemory(tmp_path).charged_mib(GPU, "torch", "alice") == 7


def test_what_is_set_is_charged_and_nothing_is_learnt(tmp_path: Path) -> None:
    memory = CodeMemory(tmp_path, fixed_mib=123)
    assert (memory.learns, memory.charged_mib(GPU, "torch", "alice")) == (False, 123)
