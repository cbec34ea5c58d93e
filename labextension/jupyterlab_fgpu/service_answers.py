"""The service's answers (docs/rest-api.md): the parts that are shown, and their types checked."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SCHEMAS: dict[str, Any] = json.loads(
    Path(__file__).with_name("service_schema.json").read_text(encoding="utf-8")
)
"""Of the API's objects; written by the service's own build."""
TYPES = {
    "array": list,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
    "object": dict,
    "string": str,
}


class ServiceError(Exception):
    """A call without a usable answer. `message` is safe to show; `code` is stable."""

    def __init__(self, code: str, message: str, *, status: int = 502, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.field = field


class Unreachable(ServiceError):
    """The service is down, too slow, failing, or its answer is not understood."""


class Forbidden(ServiceError):
    """The service does not accept this server's token for this call."""


class Refused(ServiceError):
    """The service understood the call and said no; its code and message are passed on."""


Session = dict[str, Any]
"""An object `Session` of the API, as all others below; service_schema.json has its fields."""


def parse(name: str, raw: Any) -> dict[str, Any]:
    """Return an object of the API by its known fields; a wrong type raises Unreachable."""
    return dict(_value({"$ref": name}, raw, name))


def _value(schema: dict[str, Any], raw: Any, name: str) -> Any:
    if "$ref" in schema:
        schema = SCHEMAS[schema["$ref"].rpartition("/")[2]]
    if "anyOf" in schema:
        # Null is allowed, and an older service's missing field counts as null.
        return None if raw is None else _value(schema["anyOf"][0], raw, name)
    if raw is None:
        raise malformed(f"{name} is missing")
    kind = schema["type"]
    # bool is a kind of int in Python, but `true` is no number in JSON.
    if not isinstance(raw, TYPES[kind]) or isinstance(raw, bool) != (kind == "boolean"):
        raise malformed(f"{name} is not of the type that docs/rest-api.md gives it")
    if kind == "array":
        return [_value(schema["items"], one, name) for one in raw]
    if kind == "object":
        return {key: _value(own, raw.get(key), key) for key, own in schema["properties"].items()}
    return raw


def is_mine(raw: Any) -> bool:
    """Return whether a session of the answer is the caller's own."""
    # An administrator's answer could hold others' sessions; they are not for this panel.
    return not isinstance(raw, dict) or raw.get("mine") is not False


def items(raw: dict[str, Any], name: str) -> list[Any]:
    """Return a member that must be a list."""
    value = raw.get(name)
    if not isinstance(value, list):
        raise malformed(f"{name} is not a list")
    return value


def malformed(why: str) -> Unreachable:
    """Return what to raise for an answer that this version does not understand."""
    return Unreachable("bad_answer", f"The fGPU service's answer was not understood: {why}.")
