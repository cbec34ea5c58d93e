"""A Hub's configuration file, loaded without its Hub by the command ``fgpu``."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from traitlets import TraitError
from traitlets.config import Config
from traitlets.config.loader import ConfigError, PyFileConfigLoader

from fgpu_scheduler import BadSettings, FGPUError, Policy, group_policy
from fgpuspawner.cli.command import UsageError, default_config
from fgpuspawner.settings import FGPU, without_engine


def load_config(path: str) -> Config:
    """Return what a Hub's configuration file sets."""
    file = Path(path).absolute()
    if not file.is_file():
        raise UsageError(f"there is no file {path}; --config names the Hub's configuration")
    try:
        return PyFileConfigLoader(file.name, path=str(file.parent)).load_config()
    except SystemExit as e:
        # `configure` ends the Hub with its one line.
        said = e.code if isinstance(e.code, str) else f"{path} ends the process with status {e.code}"
        raise BadSettings(said.removeprefix("fgpuspawner: ")) from None
    except (FGPUError, TraitError, ConfigError) as e:
        raise BadSettings(f"{path}: {e}") from None
    except Exception as e:
        # The file is a program: it can raise anything.
        raise BadSettings(f"{_place(e, file)}: {type(e).__name__}: {e}") from None


def loaded(path: str) -> tuple[Config, FGPU]:
    """Return a Hub's configuration and its checked settings, without connecting to an engine."""
    with without_engine():
        config = load_config(path)
        return config, FGPU.from_config(config).checked()


def named(config: str | None, db: str | None) -> tuple[str, Policy, FGPU | None]:
    """Return an installation's database URL and policy, and its settings where a configuration names it."""
    if db:
        return db, Policy(group_policy()), None
    _, settings = loaded(config or default_config())
    return settings.database_url(), settings.policy(), settings


def _place(error: Exception, file: Path) -> str:
    if isinstance(error, SyntaxError):
        return f"{file.name}:{error.lineno}"
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == str(file)]
    return f"{file.name}:{lines[-1]}" if lines else file.name


def checked_like_the_hub(config: Config, path: str) -> tuple[FGPU, Any]:
    """Return the settings and the Hub's application, after the checks that the Hub makes when it starts."""
    # Imported here: `fgpu status --db` needs no Hub, and these take a second.
    from jupyterhub.app import JupyterHub

    from fgpuspawner.hub.checks import check_hub
    from fgpuspawner.scopes import SERVICE
    from fgpuspawner.spawner.base import QueuedSpawner

    config.JupyterHub.log_level = "CRITICAL"
    if lacks_proxy_token(config):
        # It is in the environment of the Hub's unit, and this command reaches no proxy.
        config.ConfigurableHTTPProxy.auth_token = "not known here"
    try:
        app = JupyterHub(config=config)
        app.hub = None
        app.proxy = app.proxy_class(parent=app, app=app)
        spawner_class = app.spawner_class
    except (TraitError, ValueError) as e:
        words = f"{path}: {e}"
        if found := re.match(r"The '(\w+)' trait of .*JupyterHub .* '(.+)' could not be imported", str(e)):
            known = ", ".join(sorted(JupyterHub.class_traits()[found[1]].load_entry_points()))
            words = f"c.JupyterHub.{found[1]} is {found[2]!r}, which cannot be imported; use one of {known}"
        raise BadSettings(words) from None
    configured = any(service.get("name") == SERVICE for service in app.services)
    if not configured or not issubclass(spawner_class, QueuedSpawner):
        raise BadSettings(f"{path} does not set up fgpuspawner: call fgpuspawner.config.configure(c) in it")
    settings = FGPU.from_config(config).checked()
    check_hub(app, settings)
    return settings, app


def lacks_proxy_token(config: Config) -> bool:
    """Return whether the Hub would not start from this environment, as the proxy beside it has a token."""
    proxy = config.ConfigurableHTTPProxy
    return (
        proxy.get("should_start") is False
        and not proxy.get("auth_token")
        and not os.environ.get("CONFIGPROXY_AUTH_TOKEN")
    )


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep off the screen what the Hub's classes log and warn of while they only are made."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)
