"""How our containers are recognised, whose a process that uses a GPU is, and what owners read of an engine's refusal."""

from __future__ import annotations

import os
from typing import Any

import pytest
from docker.errors import APIError

from fgpuspawner.engines.docker import containers
from fgpuspawner.engines.docker.containers import Containers, container_ids, session_and_attempt
from fgpuspawner.engines.docker.endings import refusal_words


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


@pytest.mark.parametrize(
    ("engine_says", "owner_reads"),
    [
        (
            'could not select device driver "nvidia" with capabilities: [[gpu compute utility]]',
            "this server's Docker engine has no GPU runtime; ask an administrator to install it",
        ),
        (
            "unknown or invalid runtime name: nvidia",
            "this server's Docker engine has no GPU runtime; ask an administrator to install it",
        ),
        (
            "failed to create shim: write /var/lib/docker/x: no space left on device: unknown",
            "the server's disk is full; ask an administrator",
        ),
        (
            'unable to start container process: exec: "jupyterhub-singleuser": executable file not found in $PATH',
            "this image has no server environment: jupyterhub-singleuser is not in it, or cannot run; ask an "
            "administrator to build it with `fgpu images build` (docs/images.md), or choose another image",
        ),
        (
            'exec: "/no/such/program": stat /no/such/program: no such file or directory',
            'the container could not be started: exec: "/no/such/program": stat /no/such/program: no such file or '
            "directory",
        ),
        ("invalid mount config", "the container could not be started: invalid mount config"),
    ],
)
def test_refusal_of_the_engine_is_explained_to_the_owner(engine_says: str, owner_reads: str) -> None:
    assert refusal_words(APIError("500 Server Error", explanation=engine_says)) == owner_reads
