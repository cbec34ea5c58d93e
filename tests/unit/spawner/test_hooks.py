"""Functions of an administrator before a start: when one fails, its owner reads which, and what it says to users."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import pytest
from jupyterhub.spawner import SpawnException
from tornado.web import HTTPError
from traitlets.config import Config

from fgpuspawner.engines.local.spawner import LocalFGPUSpawner
from fgpuspawner.spawner.launch_form import NotStarted

FROM = "(from c.Spawner.pre_spawn_hook)"


class Worded(Exception):
    """Has words for users, as JupyterHub's documentation shows it, beside its own."""

    jupyterhub_message = "Your home is <full>"


@pytest.mark.parametrize(
    ("error", "words", "status"),
    [
        (HTTPError(403, "the <course> of %s has ended", "ann"), f"the <course> of ann has ended {FROM}", 403),
        (HTTPError(403), f"HTTP 403: Forbidden {FROM}", 403),
        (SpawnException("100 % full", reason="full", log_message="s3cret"), f"100 % full {FROM}", 400),
        (Worded("s3cret"), f"Your home is <full> {FROM}", 500),
        (
            RuntimeError("s3cret"),
            "c.Spawner.pre_spawn_hook failed (RuntimeError); the Hub's log says why",
            500,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
async def test_failed_hook_shows_its_message_and_logs_the_rest(
    error: Exception, words: str, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    def hook(spawner: Any) -> None:
        raise error

    spawner = LocalFGPUSpawner(config=Config({"Spawner": {"pre_spawn_hook": hook}}))
    with pytest.raises(NotStarted) as caught:
        await spawner.run_pre_spawn_hook()
    assert (caught.value.jupyterhub_message, caught.value.status_code) == (words, status)
    assert "<" not in re.sub("</?div[^<]*>", "", caught.value.jupyterhub_html_message)
    assert str(error) in caplog.text


async def test_group_overrides_do_not_change_the_start_timeout() -> None:
    override = {"groups": ["course"], "spawner_override": {"start_timeout": 60, "default_url": "/lab"}}
    config = Config({"Spawner": {"group_overrides": {"01": override}, "start_timeout": 90_000}})
    ann = SimpleNamespace(name="ann", groups=[SimpleNamespace(name="course")])
    spawner = LocalFGPUSpawner(config=config, user=ann)
    await spawner.apply_group_overrides()
    assert (spawner.start_timeout, spawner.default_url) == (90_000, "/lab")


async def test_asynchronous_hooks_are_awaited() -> None:
    ran = []

    async def hook(spawner: Any) -> None:
        ran.append(spawner)

    spawner = LocalFGPUSpawner(config=Config({"Spawner": {"pre_spawn_hook": hook}}))
    await spawner.run_pre_spawn_hook()
    assert ran == [spawner]
