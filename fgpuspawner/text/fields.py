"""The fields of a request, shared by launch form, links, presets and API, and how they are read.

Pure. An invalid value is refused with a line that names the field and what would work.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal

from fgpu_scheduler import BadAmount, Refusal, parse_milli
from fgpuspawner.text.times import seconds_of

LONGEST_TIME_LIMIT_S = 10_000 * 3600
MOST_NAME = 60
"""Characters of a session's name."""
GIB = r"[0-9]{1,6}(\.[0-9]{1,4})?"
"""A number of GiB: four decimals are exact to a MiB."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field: ``label`` is its name in the form, ``words`` the text of a preset's value."""

    name: str
    label: str
    words: str = ""
    example: int = 0
    """A valid whole number, for messages."""
    is_optional: bool = False
    """Whether the form's field may be empty."""


FIELDS = {
    field.name: field
    for field in (
        Field("image", "Image"),
        Field("group", "Resource group"),
        Field("account", "Account"),
        Field("gpu", "GPU"),
        Field("fgpu", "GPU (fGPU)", "{} fGPU", is_optional=True),
        Field("gpu_memory_mib", "GPU memory (MiB)", "{} MiB of GPU memory", 4096, is_optional=True),
        Field("compute_percent", "Compute (%)", "{} %", 25, is_optional=True),
        Field("gpu_models", "GPU model", "{}", is_optional=True),
        Field("gpu_model", "GPU model"),
        Field("cpu", "CPU (cores)", "{} CPU"),
        Field("memory_mib", "Memory", "{} MiB", 4096),
        Field("memory_gib", "Memory (GiB)", "{} GiB"),
        Field("count", "Sessions", "{} sessions", 1),
        Field("time_limit", "Time limit", "{} hours", is_optional=True),
        Field("time_limit_s", "Time limit", "", 3600),
        Field("priority", "Priority", is_optional=True),
        Field("name", "Name", is_optional=True),
        Field("folders", "Folders", "folders {}", is_optional=True),
        Field("setup", "Saved variables and script", is_optional=True),
        Field("variables", "Variables", is_optional=True),
        Field("script", "Start script", is_optional=True),
    )
}
NOT_OF_PRESETS = ("account", "time_limit_s", "memory_gib", "priority", "name", "setup", "variables", "script")
PRESET_FIELDS = tuple(name for name in FIELDS if name not in NOT_OF_PRESETS)
"""Fields that a preset may set."""


class Given:
    """A request's given fields, read by name. Errors are in ``refusals``."""

    def __init__(self, raw: Mapping[str, object]) -> None:
        self.raw = raw
        self.refusals: list[Refusal] = []

    def refuse(
        self, name: str, code: str, problem: str, *, limit: str | None = None, nearest: str | None = None
    ) -> None:
        self.refusals.append(Refusal(name, code, f"{name}: {problem}", limit, nearest))

    def choice(self, name: str, known: Sequence[str], default: str) -> str:
        """Return the choice, if it is one of ``known``."""
        value = self.raw.get(name, default)
        if isinstance(value, str) and value in known:
            return value
        # The message is the same whether or not it exists for others, so that users learn nothing about what they may not
        # see.
        problem = f"there is no {short(value)}; choose one of {', '.join(known)}"
        self.refuse(name, "unknown_choice", problem, nearest=default)
        return default

    def models(self, known: Sequence[str] | None = None) -> tuple[str, ...]:
        """Return the named GPU models in order of preference; none: any model.

        ``gpu_models`` is a list, or a text with commas; ``gpu_model`` is one. ``known=None`` accepts any.
        """
        one, found = self.raw.get("gpu_model"), self.raw.get("gpu_models")
        name = "gpu_models" if one is None else "gpu_model"
        if one is not None and found is not None:
            self.refuse("gpu_models", "given_twice", "given, and one as gpu_model; give one of them")
            return ()
        found = [one] if one is not None else found.split(",") if isinstance(found, str) else found
        if found is None or (found == [""] and one is None):
            return ()
        if not isinstance(found, list | tuple) or not all(isinstance(model, str) for model in found):
            problem = f"{short(self.raw[name])} is no name of a GPU model, nor a list of them"
            self.refuse(name, "not_a_text", problem)
            return ()
        return self._once_each(name, "model", found, known)

    def folders(self, known: Sequence[str]) -> tuple[str, ...]:
        """Return the chosen folders, in the order of ``known``: a list of names, or a text with commas."""
        found = self.raw.get("folders")
        if isinstance(found, str):
            found = [name for name in map(str.strip, found.split(",")) if name]
        if not isinstance(found, list | tuple) or not all(isinstance(name, str) for name in found):
            if found is not None:
                self.refuse("folders", "not_a_text", f"{short(found)} is no list of names of folders")
            return ()
        chosen = self._once_each("folders", "folder", found, known)
        return tuple(name for name in known if name in chosen)

    def _once_each(
        self, field: str, what: str, found: Sequence[str], known: Sequence[str] | None
    ) -> tuple[str, ...]:
        names = tuple(name.strip() for name in found)
        unknown = [name for name in names if not name or (known is not None and name not in known)]
        twice = next((name for at, name in enumerate(names) if name in names[:at]), None)
        if unknown:
            instead = f"choose one of {', '.join(known)}" if known else "leave it out"
            self.refuse(field, "unknown_choice", f"there is no {short(unknown[0])}; {instead}", nearest="")
        elif twice is not None:
            nearest = joined(dict.fromkeys(names))
            problem = f"{short(twice)} is named twice; name each {what} once: {nearest}"
            self.refuse(field, "named_twice", problem, nearest=nearest)
        else:
            return names
        return ()

    def name(self) -> str:
        """Return a session's name; "" for a default one."""
        found = clean_name(value) if isinstance(value := self.raw.get("name", ""), str) else None
        if found is None:
            self.refuse("name", "bad_name", BAD_NAME, limit=str(MOST_NAME))
        return found or ""

    def amount(self, name: str, default: int) -> int:
        """Return an amount in thousandths."""
        value = self.raw.get(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, str | int | float):
            self.refuse(name, "not_a_number", f"{short(value)} is not a number such as 0.5")
            return default
        try:
            return parse_milli(str(value), field=name)
        except BadAmount as e:
            self.refusals.append(Refusal(name, "bad_amount", str(e)))
            return default

    def whole(self, name: str, default: int) -> int:
        """Return a whole number, not negative."""
        found = self.maybe_whole(name, default)
        return default if found is None else found

    def maybe_whole(self, name: str, example: int | None = None) -> int | None:
        """Return a whole number, not negative, or None if missing."""
        value = self.raw.get(name)
        if value is None:
            return None
        # 512.0, as some programs write it, is a whole number, too.
        found = re.fullmatch(r"(\d{1,9})(\.0*)?", str(value), re.ASCII)
        if found and isinstance(value, str | int | float):
            return int(found[1])
        example = FIELDS[name].example if example is None else example
        self.refuse(name, "not_a_number", f"{short(value)} is not a whole number such as {example}")
        return None

    def memory_mib(self, default: int) -> int:
        """Return an amount of memory in MiB: ``memory_mib`` is in MiB, ``memory_gib`` in GiB."""
        value = self.raw.get("memory_gib")
        if value is None:
            return self.whole("memory_mib", default)
        if self.raw.get("memory_mib") is not None:
            self.refuse(
                "memory_gib", "given_twice", "given in GiB, and in MiB as memory_mib; give one of them"
            )
        elif not isinstance(value, bool) and (found := re.fullmatch(GIB, str(value).strip())):
            return round(Decimal(found[0]) * 1024)
        else:
            self.refuse(
                "memory_gib", "not_a_number", f"{short(value)} is not a number of GiB such as 4 or 0.5"
            )
        return default

    def time_limit(self, default_s: int | None, longest_s: int | None) -> int | None:
        """Return a session's time limit in seconds; None: as long as sessions may run.

        ``time_limit_s`` is in seconds, ``time_limit`` in hours and minutes; 0 means no limit of its own, so
        ``longest_s``.
        """
        seconds, hours = (self.raw.get(name) is not None for name in ("time_limit_s", "time_limit"))
        if seconds and hours:
            problem = "given in seconds, and in hours and minutes as time_limit; give one of them"
            self.refuse("time_limit_s", "given_twice", problem)
            return default_s
        if not seconds and not hours:
            return default_s
        found_s = None
        if seconds:
            found_s = self.maybe_whole("time_limit_s")
        elif (found_s := seconds_of(str(self.raw["time_limit"]))) is None:
            problem = f"{short(self.raw['time_limit'])} is not hours:minutes such as 2:30"
            self.refuse("time_limit", "bad_time", problem)
        return default_s if found_s is None else found_s or longest_s


BAD_NAME = f"give a text of at most {MOST_NAME} characters, without control characters"


def clean_name(text: str) -> str | None:
    """Return a name without needless spaces; None if it is too long, or has invisible or control characters."""
    found = " ".join(unicodedata.normalize("NFC", text).split())
    # Category C: control and format characters, which could hide or reorder the text beside the name.
    bad = len(found) > MOST_NAME or any(unicodedata.category(c).startswith("C") for c in found)
    return None if bad else found


def joined(values: Iterable[str]) -> str:
    """Return several texts as a field's one; empty ones are left out."""
    return ", ".join(value for value in map(str.strip, values) if value)


def in_gib(amount_mib: int) -> str:
    """Return MiB as the number of GiB that `Given.memory_mib` reads back exactly."""
    return f"{Decimal(amount_mib) / 1024:.4f}".rstrip("0").rstrip(".")


def short(value: object) -> str:
    """Return ``value`` for a message: quoted, and shortened if long."""
    try:
        text = repr(value)
    except RecursionError:
        text = "what is nested so deep"
    return text if len(text) <= 60 else text[:57] + "..."
