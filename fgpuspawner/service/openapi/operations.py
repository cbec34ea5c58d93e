"""Words to say with what an endpoint is asked and what it answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

from fgpuspawner import scopes
from fgpuspawner.service.objects import Error

Schema = dict[str, Any]

LARGEST_ID = 10**15 - 1
TEXT: Schema = {"type": "string"}
YES_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "string", "enum": ["0", "1"]}
MEANINGS = {
    "400": "what was sent cannot be read, or an argument is out of its bounds; `field` names it",
    "401": "no token, or one that JupyterHub does not know",
    "403": "the scope that the message names is missing, or it is not the caller's to do",
    "404": "not there, or not for the caller",
    "409": "it cannot be done now; the message says why",
    "429": "too many of these at once",
    "502": "JupyterHub failed",
    "503": "the database or JupyterHub does not answer",
}
FAILED = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
ALWAYS = ("400", "401", "403", "429", "503")


class Call(NamedTuple):
    """One operation, and the type of its answer, whose schema is to come to ``answered``."""

    path: str
    method: str
    operation: Schema
    answer: TypeAdapter[Any]
    answered: Schema


class _Schemas(GenerateJsonSchema):
    """Without titles: names say the same. Of a dict that need not have all its keys none is required."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field.get("required", True)) and super().field_is_required(field, total)


def sent(*required: str, **fields: Schema) -> Schema:
    """Return an object that is sent: with no other fields, of which only the required ones have to be there."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def maybe(schema: Schema) -> Schema:
    """Return a schema that null fits, too."""
    return {"anyOf": [schema, {"type": "null"}]}


def asks(name: str, schema: Schema, description: str) -> Schema:
    """Return a parameter of the query."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def number(name: str, most: int, description: str) -> Schema:
    """Return a whole number of the query, from 1 on."""
    return asks(name, {"type": "integer", "minimum": 1, "maximum": most}, description)


ALL = asks("all", FLAG, "`1`: everybody's; for administrators")
IN_PATH: dict[str, Schema] = {
    "id": {"schema": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}, "example": 1},
    # No address has these parts: "." and ".." lead elsewhere.
    "name": {
        "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_-])?$"},
        "example": "local",
    },
}


def call(
    address: str,
    name: str,
    summary: str,
    answer: Any = str,
    *parameters: Schema,
    status: str = "200",
    media: str = "application/json",
    body: Schema | None = None,
    may_be_empty: bool = False,
    errors: tuple[str, ...] = (),
    scope: str | None = scopes.QUEUE_READ,
) -> Call:
    """Return one call, such as ``GET /sessions/{id}``: what it is asked, the type that it answers, and which errors.

    What is named by its address may not be there; and where it is to be changed, that may be impossible now.
    """
    method, path = address.split()
    own = [part for part in IN_PATH if f"{{{part}}}" in path]
    of_one = ("404",) if method == "GET" else ("404", "409")
    media = "text/csv" if path.endswith(".csv") else media
    needs = f"Needs the scope `{scope}`." if scope else "Needs no scope beside access to the service."
    answered: Schema = {}
    found: Schema = {
        "operationId": name,
        "summary": summary,
        "description": needs,
        "parameters": [
            *({"name": part, "in": "path", "required": True, **IN_PATH[part]} for part in own),
            *parameters,
        ],
        "responses": {
            status: {"description": "what was asked for", "content": {media: {"schema": answered}}},
            **{
                code: {"description": MEANINGS[code], "content": FAILED}
                for code in sorted({*ALWAYS, *errors, *(of_one if own else ())})
            },
        },
    }
    if status == "200" and media != "text/event-stream":
        found["responses"]["304"] = {"description": "it is as `If-None-Match` says"}
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": not may_be_empty, "content": content}
    return Call(path, method.lower(), found, TypeAdapter(answer), answered)


def described(calls: Sequence[Call]) -> tuple[Schema, Schema]:
    """Return the calls by their paths and methods, and the schemas of what they answer, by name."""
    answers = [call.answer for call in calls]
    schemas, found = TypeAdapter.json_schemas(
        [(number, "serialization", one) for number, one in enumerate([*answers, TypeAdapter(Error)])],
        ref_template="#/components/schemas/{model}",
        schema_generator=_Schemas,
    )
    paths: dict[str, Schema] = {}
    for number, call in enumerate(calls):
        call.answered.update(schemas[number, "serialization"])
        paths.setdefault(call.path, {})[call.method] = call.operation
    return paths, found["$defs"]
