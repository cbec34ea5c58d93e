"""Functions of an administrator that run before a start: when one fails, its owner reads its words and its name."""

from __future__ import annotations

from typing import Any

import pytest
from jupyterhub.spawner import SpawnException
from tornado.web import HTTPError
from traitlets.config import Config

from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.spawner.launch_form import NotStarted


@pytest.mark.parametrize(
    ("error", "words", "status"),
    [
        (RuntimeError("no <home> on the filer"), "RuntimeError: no <home> on the filer", 500),
        (HTTPError(403, "the course of %s has ended", "ann"), "the course of ann has ended", 403),
        (SpawnException("the lab is closed", reason="closed"), "the lab is closed", 400),
        (KeyError("group"), "KeyError: 'group'", 500),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_failure_of_a_hook_tells_its_own_words_and_its_setting(
    error: Exception, words: str, status: int
) -> None:
    def hook(spawner: Any) -> None:
        raise error

    spawner = LocalFGPUSpawner(config=Config({"Spawner": {"pre_spawn_hook": hook}}))
    with pytest.raises(NotStarted) as caught:
        await spawner.run_pre_spawn_hook()
    said = f"{words} (from c.Spawner.pre_spawn_hook)"
    assert (caught.value.jupyterhub_message, caught.value.status_code) == (said, status)
    assert "<home>" not in caught.value.jupyterhub_html_message


async def test_hooks_that_wait_are_waited_for() -> None:
    ran = []

    async def hook(spawner: Any) -> None:
        ran.append(spawner)

    spawner = LocalFGPUSpawner(config=Config({"Spawner": {"pre_spawn_hook": hook}}))
    await spawner.run_pre_spawn_hook()
    assert ran == [spawner]
