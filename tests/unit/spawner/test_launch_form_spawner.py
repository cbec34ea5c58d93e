"""How many sessions one request may start: each but the first needs a named server of the Hub."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from fgpuspawner.spawner.launch_form import LaunchFormSpawner


def asking(*known: str, active: tuple[str, ...] = (), name: str = "", **settings: Any) -> LaunchFormSpawner:
    """Return a spawner of a user with these named servers; some of them are active."""
    found = LaunchFormSpawner()
    found.name, found.handler = name, None
    found.user = SimpleNamespace(
        settings={"allow_named_servers": True} | settings,
        orm_spawners=dict.fromkeys(["", *known]),
        spawners={server: SimpleNamespace(active=server in active) for server in ["", *known]},
    )
    return found


@pytest.mark.parametrize(
    ("spawner", "most"),
    [
        (asking(), 8),
        (asking(allow_named_servers=False), 1),
        (asking(named_server_limit_per_user=2), 3),
        # Their names are used again, once nothing has them.
        (asking("gpu-2", "gpu-3", named_server_limit_per_user=2), 3),
        (asking("gpu-2", "mine", named_server_limit_per_user=3), 3),
        (asking("gpu-2", active=("gpu-2",), named_server_limit_per_user=2), 2),
        (asking("mine", name="mine", named_server_limit_per_user=2), 2),
        # What a request decides is found out at the start where there is none.
        (asking(named_server_limit_per_user=lambda handler: 1), 8),
    ],
)
def test_offered_sessions_respect_the_limit_of_named_servers(spawner: LaunchFormSpawner, most: int) -> None:
    assert spawner.most_sessions(8) == most
    assert spawner.most_sessions(1) == 1


def test_callable_limit_of_named_servers_is_called() -> None:
    spawner = asking(named_server_limit_per_user=lambda handler: 1 if handler == "this" else 5)
    spawner.handler = "this"
    assert spawner.most_sessions(8) == 2
