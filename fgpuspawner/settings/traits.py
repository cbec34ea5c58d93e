"""The kinds of values that settings have, and the one line that refuses another.

traitlets checks a value as it is set, but its words name no limit and no remedy. This module rewords them for all of
`FGPU`.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Collection, Iterable, Mapping
from difflib import get_close_matches
from itertools import pairwise
from pathlib import Path
from typing import Any

from traitlets import Bool, Dict, Enum, Integer, List, TraitError, TraitType, Unicode
from traitlets.config import Configurable

from fgpu_scheduler import BadAmount, BadSettings, parse_milli

KINDS = {Bool: "True or False", Dict: "a dict", Integer: "a whole number", List: "a list", Unicode: "text"}
LARGEST_MIB = 2**31
"""Two PiB: more is a typing mistake."""


class BadValue(BadSettings, TraitError):
    """A setting's value is of the wrong kind, or outside its limits; one line."""


class Settings(Configurable):
    """A part of `FGPU`: the settings of one subject, with their help under each.

    What is set must be of its kind and inside its limits. ``example`` of a setting is what it may be; ``remedy`` ends
    the line that refuses a value: what would work.
    """

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        texts = _texts_under(cls)
        for name, trait in vars(cls).items():
            if isinstance(trait, TraitType):
                example = trait.metadata.get("example")
                end = f"\n\nExample: ``c.FGPU.{name} = {example}``" if example else ""
                trait.help = trait.metadata["help"] = texts.get(name, "") + end
                trait.tag(config=True)

    def __setattr__(self, name: str, value: Any) -> None:
        try:
            super().__setattr__(name, _whole(value))
        except BadSettings:
            # What was set is the configuration, and this is of one setting in it.
            raise
        except TraitError:
            remedy = _remedy(self.traits()[name], value)
            if name.endswith("_mib") and isinstance(value, str) and "MiB" not in remedy:
                remedy += ". Write MiB, such as 8192 for 8 GiB"
            raise BadValue(f"c.FGPU.{name} is {value!r}; {remedy}") from None


def _whole(value: Any) -> Any:
    """Return a value in which 512.0 is 512, also within a list or a dict."""
    if type(value) is dict:
        return {key: _whole(part) for key, part in value.items()}
    if type(value) is list:
        return [_whole(part) for part in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _texts_under(cls: type) -> dict[str, str]:
    """Return the text under each assignment of a class; empty without the source."""
    try:
        (found,) = ast.parse(inspect.getsource(cls)).body
    except OSError:
        return {}
    assert isinstance(found, ast.ClassDef)
    return {
        ast.unparse(above.targets[0]): inspect.cleandoc(str(ast.literal_eval(text.value)))
        for above, text in pairwise(found.body)
        if isinstance(above, ast.Assign) and isinstance(text, ast.Expr)
    }


def _remedy(trait: TraitType[Any, Any], value: object) -> str:
    if trait.metadata.get("remedy"):
        return str(trait.metadata["remedy"])
    match trait:
        case Enum():
            return f"use one of {', '.join(trait.values or ())}"
        case Integer(min=int()):
            kind = "" if isinstance(value, int) else f"{KINDS[Integer]}, "
            unit = " s" * str(trait.name).endswith("_s")
            if trait.max is None:
                return f"it must be {kind}at least {trait.min}{unit}"
            none = ", or 0 for none" * (trait.default_value == 0 < trait.min)
            return f"it must be {kind}between {trait.min} and {trait.max}{unit}{none}"
        case List():
            return f"it must be a list, each entry {KINDS[type(trait._trait)]}"
    return f"it must be {KINDS.get(type(trait), trait.info_text)}"


class Whole(Integer[int, int]):
    """A whole number inside its limits, and no truth value; or its default, which stands for none."""

    def validate(self, obj: Any, value: Any) -> int:
        """Refuse what is outside, and True and False, which are numbers in Python."""
        if isinstance(value, bool):
            self.error(obj, value)
        return value if value == self.default_value else super().validate(obj, value)


class AbsolutePath(Unicode[str, str]):
    """An absolute path; "" is none."""

    info_text = "an absolute path"

    def validate(self, obj: Any, value: Any) -> str:
        """Refuse a path that depends on where the Hub was started."""
        path = super().validate(obj, value)
        if path and not Path(path).is_absolute():
            self.error(obj, value)
        return path


class AmountTrait(TraitType[Any, Any]):
    """An amount of fGPU or CPU: a number or text, kept as it is given. "" leaves it open where that is the default."""

    info_text = "a number such as 0.5"

    def validate(self, obj: Any, value: Any) -> Any:
        """Refuse what is no amount above 0, with at most three decimals."""
        if value == "" == self.default_value:
            return value
        if not isinstance(value, int | float | str):
            self.error(obj, value)
        if milli(value, self.name or "") == 0:
            instead = 'or "" to leave it open' if self.default_value == "" else "such as 0.1"
            raise BadSettings(f"c.FGPU.{self.name} is 0; it must be above 0, {instead}")
        return value


def nearest(name: str, known: Iterable[str]) -> str:
    """Return the known name that is most like a wrong one, as the end of a line; "" where none is."""
    found = get_close_matches(name, list(known), n=1)
    return f"; did you mean {found[0]}?" if found else ""


def milli(value: object, name: str) -> int:
    """Return a setting's amount in thousandths."""
    try:
        return parse_milli(str(value), field=f"c.FGPU.{name}")
    except BadAmount as e:
        raise BadSettings(str(e)) from None


def is_whole(value: object, least: int, most: int) -> bool:
    """Return whether this is a whole number between these, and no truth value."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def check_keys(where: str, given: Mapping[Any, object], known: Collection[str]) -> None:
    """Refuse a key of a dict that there is not; ``where`` begins the line."""
    for key in given:
        if key not in known:
            raise BadSettings(f"{where} has an unknown key {key!r}; known are {', '.join(known)}")
