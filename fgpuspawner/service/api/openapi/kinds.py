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


def maybe(schema: Schema) -> Schema:
    """Return a schema that null fits, too."""
    kind = schema.get("type")
    if isinstance(kind, str) and "enum" not in schema:
        return {**schema, "type": [kind, "null"]}
    return {"anyOf": [schema, {"type": "null"}]}


def many(schema: Schema) -> Schema:
    """Return a list of these."""
    return {"type": "array", "items": schema}


def one_of(*words: str) -> Schema:
    """Return one of these words."""
    return {"type": "string", "enum": list(words)}


def thing(**fields: Schema) -> Schema:
    """Return an object with exactly these fields."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


def by_name(schema: Schema) -> Schema:
    """Return an object with any names, each with one of these."""
    return {"type": "object", "additionalProperties": schema}


def ref(name: str) -> Schema:
    """Return the schema of this name."""
    return {"$ref": f"#/components/schemas/{name}"}
