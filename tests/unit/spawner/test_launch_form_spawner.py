"""How many sessions one request may start, each but the first on a named server; and who it is that asks."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from fgpuspawner.form.offer import RequestRefused
from fgpuspawner.spawner import launch_form
from fgpuspawner.spawner.launch_form import LaunchFormSpawner, NotStarted, OnlyFilledIn, without_tracebacks


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


def test_simultaneous_request_of_the_owner_does_not_answer_for_another_user(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def of(name: str) -> SimpleNamespace:
        body = b"accept_image=old"
        return SimpleNamespace(current_user=SimpleNamespace(name=name), request=SimpleNamespace(body=body))

    spawner = asking()
    spawner.user.name, spawner.handler = "kay", of("kay")
    for name in ("kay", "lead"):
        monkeypatch.setattr(launch_form, "current_handler", lambda name=name: of(name), raising=False)
        with nullcontext() if name == "kay" else pytest.raises(RequestRefused, match="only kay can accept"):
            spawner.refuse_others_answer("old")


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (NotStarted("7 fGPU\nis too much", reason="above", html=""), ["Failed: 7 fGPU is too much"]),
        (OnlyFilledIn(), []),
    ],
)
def test_refused_form_is_one_line_in_the_log(
    error: Exception, lines: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    log = logging.Logger("hub")
    log.addHandler(caplog.handler)
    log.addFilter(without_tracebacks)
    try:
        raise error
    except type(error):
        log.exception("Failed")
    assert [logging.Formatter().format(record) for record in caplog.records] == lines
