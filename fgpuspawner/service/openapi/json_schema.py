"""Words to say JSON schemas with."""

from __future__ import annotations

from typing import Any

Schema = dict[str, Any]

TEXT: Schema = {"type": "string"}
YES_NO: Schema = {"type": "boolean"}
WHOLE: Schema = {"type": "integer"}
COUNT: Schema = {"type": "integer", "minimum": 0}
NUMBER: Schema = {"type": "number", "minimum": 0}
AT_S: Schema = {"type": "integer", "description": "UTC, in seconds"}
AMOUNT: Schema = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]{1,3})?$", "description": "an exact decimal"}

KINDS = {
    "text": TEXT,
    "yes_no": YES_NO,
    "whole": WHOLE,
    "count": COUNT,
    "number": NUMBER,
    "at_s": AT_S,
    "amount": AMOUNT,
}


def kind(word: str) -> Schema:
    """Return what a word means: one of `KINDS`, or else the schema of that name; many of them with ``[]`` behind it.

    With ``?`` at its end it may be null.
    """
    if word.endswith("?"):
        return maybe(kind(word[:-1]))
    if word.endswith("[]"):
        return many(kind(word[:-2]))
    return KINDS[word] if word in KINDS else ref(word)


def maybe(schema: Schema) -> Schema:
    """Return a schema that null fits, too."""
    own = schema.get("type")
    if isinstance(own, str) and "enum" not in schema:
        return {**schema, "type": [own, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Schema) -> Schema:
    """Return a list of these."""
    return {"type": "array", "items": schema}


def one_of(*words: str) -> Schema:
    """Return one of these words."""
    return {"type": "string", "enum": list(words)}


def thing(fields: str = "", /, **others: Schema) -> Schema:
    """Return an object with exactly these fields: each in ``fields`` has its `kind` behind a colon."""
    said = (field.partition(":") for field in fields.split())
    known = {name: kind(word) for name, _, word in said} | others
    return {
        "type": "object",
        "properties": known,
        "required": list(known),
        "additionalProperties": False,
    }


def some_of(required: str = "", optional: str = "", /, **others: Schema) -> Schema:
    """Return an object in which the optional fields, and the others that are not named as required, may be missing."""
    needed = thing(required)
    known = needed["properties"] | thing(optional)["properties"] | others
    return {**needed, "properties": known}


def by_name(schema: Schema) -> Schema:
    """Return an object with any names, each with one of these."""
    return {"type": "object", "additionalProperties": schema}


def ref(name: str) -> Schema:
    """Return the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}
