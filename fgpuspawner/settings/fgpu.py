"""``c.FGPU``: all settings together, and the checks that stop the Hub on a wrong one."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from traitlets import HasTraits
from traitlets.config import Config
from traitlets.config.loader import LazyConfigValue

from fgpu_scheduler import BadSettings
from fgpuspawner.settings.folders import FolderSettings
from fgpuspawner.settings.form import FormSettings
from fgpuspawner.settings.images import ImageSettings
from fgpuspawner.settings.isolation import DiskSettings, IsolationSettings
from fgpuspawner.settings.network import NetworkSettings
from fgpuspawner.settings.nodes import is_elsewhere
from fgpuspawner.settings.queue import QueueSettings
from fgpuspawner.settings.service import ServiceSettings
from fgpuspawner.settings.traits import nearest

_asks_engine = ContextVar("fgpu_asks_engine", default=True)


class FGPU(
    ServiceSettings,
    FolderSettings,
    QueueSettings,
    ImageSettings,
    FormSettings,
    NetworkSettings,
    IsolationSettings,
    DiskSettings,
):
    """What the administrator sets. `checked` refuses what cannot work, with one line that names it."""

    @classmethod
    def from_config(cls, config: Config) -> FGPU:
        """Return the settings of a Hub's configuration.

        Raises:
            BadSettings: a value of the wrong kind or outside its limits, or a name that is no setting.
        """
        known = cls.class_traits(config=True)
        for name, value in config.get("FGPU", {}).items():
            if name not in known:
                words = nearest(name, known) or "; docs/settings.md has them all"
                raise BadSettings(f"c.FGPU.{name} is not a setting{words}")
            if isinstance(value, LazyConfigValue) and _has_no_effect(value, known[name].default()):
                raise BadSettings(
                    f"c.FGPU.{name} cannot be added to so; set it as a whole: c.FGPU.{name} = ..."
                )
        return cls(config=config)

    @classmethod
    def from_json(cls, text: str) -> FGPU:
        """Return the settings that `to_json` wrote."""
        return cls(**json.loads(text))

    def to_json(self) -> str:
        """Return every setting as JSON, for the service. It can hold the database's password."""
        return json.dumps({name: getattr(self, name) for name in self.trait_names(config=True)})

    def checked(self) -> FGPU:
        """Return these settings if all of them can work together.

        Raises:
            BadSettings: one line that names the setting, the limit and what would work.
        """
        groups = self.resource_groups()
        self._check_database()
        self._check_notice_command()
        self._check_amounts()
        self._check_cluster()
        away = [spec["name"] for spec in self.nodes if is_elsewhere(spec)]
        if away and not self.hub_address:
            raise BadSettings(
                f"c.FGPU.hub_address is empty, and node {away[0]!r} is another machine; set the address of this one "
                "at which sessions there reach the Hub"
            )
        self._check_queue(groups)
        self._check_network()
        self._check_images()
        self._check_folders(self.data_path())
        self._check_form(groups, tuple(self.folders))
        return self


def _has_no_effect(change: LazyConfigValue, default: object) -> bool:
    """Return whether traitlets would silently ignore ``append``, ``update`` and the like of a setting."""
    try:
        return bool(change.to_dict()) and change.get_value(default) == default
    except (TypeError, ValueError):
        return True


def configured(cls: type[HasTraits], config: Config) -> dict[str, Any]:
    """Return what the configuration says for a class: its own section over those of its bases.

    What is only added to (``c.X.name.update(...)``) is added to the section below, or to the default.
    """
    merged = Config()
    for base in reversed(cls.mro()):
        # A copy: merging changes both.
        merged.merge(copy.deepcopy(config.get(base.__name__, Config())))
    traits = cls.class_traits()
    return {
        name: value.get_value(traits[name].default())
        if isinstance(value, LazyConfigValue) and name in traits
        else value
        for name, value in merged.items()
    }


def engine_is_asked() -> bool:
    """Return whether loading may ask the engine. If not, values that only the engine knows keep their defaults."""
    return _asks_engine.get()


@contextmanager
def without_engine() -> Iterator[None]:
    """Load configurations in this block without asking an engine, so that `fgpu status` works while that is down."""
    token = _asks_engine.set(False)
    try:
        yield
    finally:
        _asks_engine.reset(token)
