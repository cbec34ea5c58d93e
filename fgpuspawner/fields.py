"""One field of the form, the link or the API, read: a value, or a refusal that names the field. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fgpu_scheduler import BadAmount, Refusal, parse_milli

Raw = Mapping[str, object]

LONGEST_TIME_LIMIT_S = 10_000 * 3600


def choice(raw: Raw, name: str, known: Sequence[str], default: str, refusals: list[Refusal]) -> str:
    """Return which of ``known`` was chosen."""
    value = raw.get(name, default)
    if isinstance(value, str) and value in known:
        return value
    # The same words whether it exists for others or not: what one may not see does not exist.
    message = f"{name}: there is no {short(value)}; choose one of {', '.join(known)}"
    refusals.append(Refusal(name, "unknown_choice", message, None, default))
    return default


def amount(raw: Raw, name: str, default: int, refusals: list[Refusal]) -> int:
    """Return an amount in thousandths."""
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        refusals.append(Refusal(name, "not_a_number", f"{name}: {short(value)} is not a number such as 0.5"))
        return default
    try:
        return parse_milli(str(value), field=name)
    except BadAmount as e:
        refusals.append(Refusal(name, "bad_amount", str(e)))
        return default


def whole(raw: Raw, name: str, default: int, refusals: list[Refusal]) -> int:
    """Return a whole number, not negative."""
    found = maybe_whole(raw, name, default, refusals)
    return default if found is None else found


def maybe_whole(raw: Raw, name: str, example: int, refusals: list[Refusal]) -> int | None:
    """Return a whole number, not negative, or None where there is none."""
    value = raw.get(name)
    if value is None:
        return None
    text = str(value)
    if (
        not isinstance(value, bool)
        and isinstance(value, str | int)
        and text.isascii()
        and text.isdigit()
        and len(text) < 10
    ):
        return int(text)
    refusals.append(
        Refusal(name, "not_a_number", f"{name}: {short(value)} is not a whole number such as {example}")
    )
    return None


def time_limit(raw: Raw, default_s: int | None, longest_s: int | None, refusals: list[Refusal]) -> int | None:
    """Return for how long a session may run, in seconds; None: for as long as sessions may.

    ``time_limit_s`` is in seconds, ``time_limit`` in hours and minutes; 0 is no limit of its own, so ``longest_s``.
    """
    if raw.get("time_limit_s") is not None and raw.get("time_limit") is not None:
        message = "time_limit_s: given in seconds, and in hours and minutes as time_limit; give one of them"
        refusals.append(Refusal("time_limit_s", "given_twice", message))
        return default_s
    name = "time_limit" if raw.get("time_limit") is not None else "time_limit_s"
    if raw.get(name) is None:
        return default_s
    found_s = (
        _hours_minutes(raw, refusals) if name == "time_limit" else maybe_whole(raw, name, 3600, refusals)
    )
    if found_s is None:
        return default_s
    return found_s or longest_s


def _hours_minutes(raw: Raw, refusals: list[Refusal]) -> int | None:
    value = raw["time_limit"]
    found = re.fullmatch(r"([0-9]{1,5}):([0-5][0-9])", value) if isinstance(value, str) else None
    if found is None:
        message = f"time_limit: {short(value)} is not hours:minutes such as 2:30"
        refusals.append(Refusal("time_limit", "bad_time", message))
        return None
    return int(found[1]) * 3600 + int(found[2]) * 60


def short(value: object) -> str:
    """Return ``value`` for a message: quoted, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
