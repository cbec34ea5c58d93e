"""Builders for the description of an endpoint: its arguments and its answers."""

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
    """One operation, and the type of its answer. ``answered`` gets the schema."""

    path: str
    method: str
    operation: Schema
    answer: TypeAdapter[Any]
    answered: Schema


class _Schemas(GenerateJsonSchema):
    """Leaves out titles, which repeat the names, and required keys of a dict that may lack some."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False

    def field_is_required(self, field: Any, total: bool) -> bool:
        return bool(field.get("required", True)) and super().field_is_required(field, total)


def sent(*required: str, **fields: Schema) -> Schema:
    """Return a request's object: no other fields are allowed, and only some are required."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def maybe(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def asks(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def number(name: str, most: int, description: str) -> Schema:
    """Return a whole number of the query, from 1 on."""
    return asks(name, {"type": "integer", "minimum": 1, "maximum": most}, description)


ALL = asks("all", FLAG, "`1`: everybody's; for administrators")
IN_PATH: dict[str, Schema] = {
    "id": {"schema": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID}, "example": 1},
    # Addresses cannot contain the parts "." and "..", which browsers resolve.
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
    """Return one call, such as ``GET /sessions/{id}``: its arguments, the type of its answer, and its errors.

    If the address names an object, 404 is possible; if the call changes it, 409.
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
    """Return the calls by their paths and methods, and their answers' schemas by name."""
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
