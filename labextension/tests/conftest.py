"""A Jupyter server with the extension loaded, in the environment of a session."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from standin import StandIn
from support import SESSION_ENVIRONMENT, Caller

from jupyterlab_fgpu import app
from jupyterlab_fgpu.app import FGPUStatus, StatusHandler
from jupyterlab_fgpu.kernel_reading import SOCKET_VARIABLE
from jupyterlab_fgpu.kernel_socket import KernelSocket


@pytest.fixture
def standin(jp_asyncio_loop: Any) -> Iterator[StandIn]:
    """The service, listening on loopback."""
    service = StandIn()
    jp_asyncio_loop.run_until_complete(service.start())
    yield service
    jp_asyncio_loop.run_until_complete(service.stop())


@pytest.fixture
def session_environment(standin: StandIn) -> dict[str, str]:
    """What the spawner sets; a test that needs another environment overrides this fixture."""
    return {**SESSION_ENVIRONMENT, "FGPU_SERVICE_URL": standin.url}


@pytest.fixture
def jp_server_config(session_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The server's configuration, which is read after the environment is set."""
    for name in (*SESSION_ENVIRONMENT, "FGPU_SERVICE_URL"):
        monkeypatch.delenv(name, raising=False)
    for name, value in session_environment.items():
        monkeypatch.setenv(name, value)
    return {
        "ServerApp": {"jpserver_extensions": {"jupyterlab_fgpu": True}},
        "FGPUStatus": {"timeout_s": 20.0, "cache_s": 20.0},
    }


@pytest.fixture(autouse=True)
def no_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is refused stays refused as long as the process lives, and pytest runs files that it can write."""
    monkeypatch.setattr(app, "refuse_users_files", lambda *_: None)


@pytest.fixture(autouse=True)
def no_socket_is_left(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close what a server's end closes: here the servers end, and the process goes on."""
    made: list[KernelSocket] = []

    class Noted(KernelSocket):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(app, "KernelSocket", Noted)
    # Every server sets it; a test that has none must not find an earlier one's.
    monkeypatch.setenv(SOCKET_VARIABLE, "")
    yield
    for one in made:
        one.close()


@pytest.fixture
def extension(jp_serverapp: Any) -> FGPUStatus:
    """What the loaded extension's handlers share."""
    router = jp_serverapp.web_app.default_router
    found: list[FGPUStatus] = []
    groups = [rule.target for rule in router.rules if hasattr(rule.target, "rules")]
    for rule in (rule for group in groups for rule in group.rules):
        if rule.target is StatusHandler:
            found.append(rule.target_kwargs["status"])
    [status] = found
    return status


@pytest.fixture
def caller(jp_fetch: Any) -> Caller:
    """A logged-in tab."""
    return Caller(jp_fetch)
