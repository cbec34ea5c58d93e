"""The settings of sessions as local processes."""

from __future__ import annotations

from pathlib import Path

from jupyterhub.spawner import LocalProcessSpawner
from traitlets import Integer, default

from fgpuspawner.engines.base import Installation
from fgpuspawner.engines.local.engine import SERVER, LocalEngine
from fgpuspawner.engines.local.packages import folder_name
from fgpuspawner.settings import configured
from fgpuspawner.spawner.base import QueuedSpawner


class LocalFGPUSpawner(QueuedSpawner, LocalProcessSpawner):
    """Sessions as processes of the Hub's own user, beside each other and not separated.

    Fine for one person or a demo. CPU and memory limits are counted, not enforced. A program can drop its GPU limit
    with its environment; the watchdog sees what it then takes.
    """

    capabilities = LocalEngine.capabilities

    stop_timeout_s = Integer(
        10,
        help="""Seconds that a server may take to end after SIGTERM before it is killed.

        Example: ``c.LocalFGPUSpawner.stop_timeout_s = 5``
        """,
    ).tag(config=True)

    @default("cmd")
    def _own_server(self) -> list[str]:
        return [SERVER]

    @classmethod
    def make_engine(cls, installation: Installation) -> LocalEngine:
        own = configured(cls, installation.config)
        stop_timeout_s = own.get("stop_timeout_s", cls.stop_timeout_s.default_value)
        cmd = own.get("cmd") or SERVER
        server = cmd if isinstance(cmd, str) else cmd[0]
        return LocalEngine(installation, stop_timeout_s=float(stop_timeout_s), server=server)

    @property
    def home(self) -> Path:
        """The user's folder. The name is quoted, so it is always one folder below ``home``."""
        return self.runtime.settings.data_path() / "home" / folder_name(self.user.name)

    def user_env(self, env: dict[str, str]) -> dict[str, str]:
        """Return ``env`` with the user's home; there is no system user of that name."""
        env["USER"] = self.user.name
        env["HOME"] = str(self.home)
        env["SHELL"] = "/bin/bash"
        return env
