"""A user's own variables and start script, as the form and the API give them. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fgpuspawner.isolation.sealing import is_knob
from fgpuspawner.text.fields import Given, short

MOST_VARIABLES = 50
MOST_VALUE = 4096
MOST_SCRIPT = 8000
"""Characters. The whole request may have 16 KiB."""
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,99}")
SEALED = ("FGPU_", "NVIDIA_", "LD_", "JUPYTERHUB_", "JPY_", "CUDA_MPS_")
"""Beginnings of names that describe the slice or the server."""
SEALED_NAMES = frozenset(
    (
        *("HOME", "PATH", "USER", "LOGNAME", "SHELL", "BASH_ENV", "ENV", "PYTHONHOME", "PYTHONEXECUTABLE"),
        *("PYTHONPLATLIBDIR", "PYTHONSTARTUP", "PYTHONUSERBASE", "PYTHONNOUSERSITE", "PYTHONSAFEPATH"),
        *("PYTHONINSPECT", "PYTHONPYCACHEPREFIX"),
    )
)
"""Names that programs of the session rely on."""
GIVEN = ("variables", "script")


@dataclass(frozen=True, slots=True)
class GivenSetup:
    """What was given with a request. A variable whose value is None keeps the value that it has in the saved setup."""

    variables: Mapping[str, str | None] = field(default_factory=dict, repr=False)
    script: str = field(default="", repr=False)


def read_setup(given: Given) -> GivenSetup | None:
    """Return the given variables and script; None if neither is given. Values are in no message."""
    if all(name not in given.raw for name in GIVEN):
        return None
    script = given.raw.get("script", "")
    script = script.replace("\r\n", "\n").strip("\n") if isinstance(script, str) else None
    if script is None or not _is_text(script, MOST_SCRIPT):
        problem = f"give a text of at most {MOST_SCRIPT} characters; clone longer scripts, and run them"
        given.refuse("script", "bad_script", problem, limit=str(MOST_SCRIPT))
    variables = _pairs(given)
    if len(variables) > MOST_VARIABLES:
        given.refuse("variables", "too_many", f"give at most {MOST_VARIABLES}", limit=str(MOST_VARIABLES))
    for name, value in variables.items():
        if (wrong := _wrong(name, value)) is not None:
            given.refuse("variables", "bad_variable", wrong)
            break
    return GivenSetup(variables, script or "")


def _pairs(given: Given) -> dict[str, str | None]:
    found = given.raw.get("variables", "")
    if isinstance(found, Mapping):
        return dict(found)
    if not isinstance(found, str):
        given.refuse(
            "variables", "not_a_text", 'give lines NAME=value, or an object such as {"NAME": "value"}'
        )
        return {}
    lines = [line.strip() for line in found.splitlines()]
    pairs = [line.partition("=") for line in lines if line and not line.startswith("#")]
    return {name.strip(): value if equals else None for name, equals, value in pairs}


def _wrong(name: object, value: object) -> str | None:
    """Return why a variable cannot be set; without its value."""
    if not isinstance(name, str) or NAME.fullmatch(name) is None:
        return f"{short(name)} is no name; use letters, digits and _, such as WANDB_PROJECT=vision"
    if is_knob(name) or name.startswith(SEALED) or name in SEALED_NAMES:
        return f"{name} is set by the session; leave it out"
    if value is not None and not _is_text(value, MOST_VALUE):
        return f"the value of {name} must be a text of at most {MOST_VALUE} characters"
    return None


def _is_text(value: object, most: int) -> bool:
    """Return whether a value is text that a database and an environment can hold."""
    # Half a surrogate pair, which JSON can write, is no character.
    return isinstance(value, str) and len(value) <= most and not re.search("[\0\ud800-\udfff]", value)


def names_text(variables: Mapping[str, str]) -> str:
    """Return the form's text for saved variables: names alone, which keep their values."""
    return "\n".join(variables)
