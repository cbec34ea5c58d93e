"""Settings that spawner classes inherit from JupyterHub, DockerSpawner and KubeSpawner: used, refused or without
effect.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from traitlets import HasTraits
from traitlets.config import Config

from fgpu_scheduler import BadSettings
from fgpuspawner.isolation.sealing import as_text, is_knob
from fgpuspawner.settings import configured

TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
USED, REFUSED, NO_EFFECT = "used", "refused", "no_effect"
UNFORESEEN = "the launch failed"
"""First words of an unexpected launch failure."""
LOG_SAYS_WHY = "the Hub's log says why"


def rows_of(kind: type[HasTraits]) -> dict[str, tuple[str, str]]:
    """Return for each setting that a class inherits its use and its replacement."""
    rows: dict[str, tuple[str, str]] = {}
    for table in (TABLES[base.__name__] for base in reversed(kind.mro()) if base.__name__ in TABLES):
        rows |= dict.fromkeys(table[USED].split(), (USED, ""))
        for use in (REFUSED, NO_EFFECT):
            rows |= {name: (use, words) for names, words in table[use].items() for name in names.split()}
    return rows


def overruled(kind: type[HasTraits], config: Config) -> list[str]:
    """Return a line for each setting of a spawner class that has no effect.

    Raises:
        BadSettings: a setting is refused; the line names it and its replacement.
    """
    lines, rows, traits = [], rows_of(kind), kind.class_traits()
    # KubeSpawner also takes references to secrets as values.
    references = any(base.__name__ == "KubeSpawner" for base in kind.mro())
    for where, name, value in _given(kind, config):
        setting, _, key = name.partition(".")
        use, instead = rows.get(name, (USED, ""))
        if setting == "environment" and is_knob(key):
            lines.append(f"{where} has no effect: it is set for each session by what the session has")
        elif (
            setting == "environment"
            and key
            and not (callable(value) or (references and isinstance(value, Mapping)))
        ):
            as_text(where, value)
        elif not value or (name in traits and value == traits[name].default()):
            continue
        elif use == REFUSED:
            raise BadSettings(f"{where} does not go with queued sessions; take it out: {instead}")
        elif use == NO_EFFECT:
            lines.append(f"{where} has no effect: {instead}")
    return lines


def suspects(kind: type[HasTraits], config: Config, words: str) -> list[str]:
    """Return the settings that may have caused a launch failure with this message."""

    def may_be(name: str, value: Any) -> bool:
        if callable(value):
            return words.startswith(UNFORESEEN) and not name.endswith("_hook")
        if name == "cmd":
            return bool(value) and (value if isinstance(value, str) else str(value[0])) in words
        # Values without an effect, and those that Zero to JupyterHub always sets.
        usual = value in (None, "", {}, []) or (name, value) == ("uid", 1000)
        return name in TABLES["shapes_launch"] and not usual

    return [where for where, name, value in _given(kind, config) if may_be(name, value)]


def _given(kind: type[HasTraits], config: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield each setting of a class and each key of a dict setting: as written, its name, its value."""
    for name, value in configured(kind, config).items():
        section = next(base.__name__ for base in kind.mro() if name in config.get(base.__name__, {}))
        where = f"c.{section}.{name}"
        yield where, name, value
        for key, part in value.items() if isinstance(value, Mapping) else ():
            yield f"{where}[{key!r}]", f"{name}.{key}", part
            more = part.get("spawner_override") if isinstance(part, Mapping) else None
            for own, given in more.items() if isinstance(more, Mapping) else ():
                yield f"{where}[{key!r}] for {own}", own, given
