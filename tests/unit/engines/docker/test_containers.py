"""How our containers are recognised, and the session of a process that uses a GPU."""

from __future__ import annotations

import os
from typing import Any

import pytest

from fgpuspawner.engines.docker import containers
from fgpuspawner.engines.docker.containers import Containers, container_ids, session_and_attempt


def test_container_name_has_session_and_attempt() -> None:
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
def test_other_names_are_not_ours(name: str) -> None:
    assert session_and_attempt(name, "a1b2c3") is None


OWN, INNER = "1f" * 32, "2a" * 32


@pytest.mark.parametrize(
    ("cgroup", "ids"),
    [
        (f"0::/system.slice/docker-{OWN}.scope\n", [OWN]),
        (f"0::/docker/{OWN}\n", [OWN]),
        # Seen from a cgroup namespace beside it.
        (f"0::/../{OWN}\n", [OWN]),
        (f"12:memory:/docker/{OWN}\n11:cpu,cpuacct:/docker/{OWN}\n0::/\n", [OWN, OWN]),
        # A container in a container: the outer one is the session.
        (f"0::/docker/{OWN}/docker/{INNER}\n", [OWN, INNER]),
        ("0::/user.slice/user-1000.slice/session-3.scope\n", []),
        (f"0::/docker/{OWN}0\n", []),
        ("0::/\n", []),
        ("", []),
    ],
)
def test_cgroup_names_the_container_of_a_process(cgroup: str, ids: list[str]) -> None:
    assert container_ids(cgroup) == ids


# --- Where process numbers here may not be the engine's ---

ID = "a" * 64


class Engine:
    """One container of session 7, in which the machine's process with this test's number runs."""

    asked = 0

    def containers(self, filters: dict[str, str]) -> list[dict[str, Any]]:
        labels = {"fgpu.installation": "abc", "fgpu.session": "7", "fgpu.attempt": "1"}
        return [{"Id": ID, "Names": ["/fgpu-abc-7-1"], "Labels": labels}]

    def top(self, container: str, ps_args: str) -> dict[str, Any]:
        self.asked += 1
        return {"Processes": [[str(os.getpid())]]}


@pytest.mark.parametrize(("same", "found", "asked"), [(True, {}, 0), (False, {os.getpid(): 7}, 1)])
def test_process_numbers_of_another_namespace_are_asked_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, same: bool, found: dict[int, int], asked: int
) -> None:
    monkeypatch.setattr(containers, "numbers_are_the_hosts", lambda: same)
    engine: Any = Engine()
    assert Containers(engine, installation="abc").sessions_of([os.getpid()]) == found
    assert engine.asked == asked
