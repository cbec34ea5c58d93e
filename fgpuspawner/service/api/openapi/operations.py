"""Words to say with what an endpoint is asked and what it answers."""

from __future__ import annotations

from typing import Any

from fgpuspawner.service.api.openapi.kinds import Schema, ref

Operation = dict[str, Any]

LARGEST_ID = 10**15 - 1
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
ALWAYS = ("400", "401", "403", "503")


def asks(name: str, schema: Schema, description: str) -> Schema:
    """Return a parameter of the query."""
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def number(name: str, most: int, description: str) -> Schema:
    """Return a whole number of the query, from 1 on."""
    return asks(name, {"type": "integer", "minimum": 1, "maximum": most}, description)


ID: Schema = {
    "name": "id",
    "in": "path",
    "required": True,
    "schema": {"type": "integer", "minimum": 0, "maximum": LARGEST_ID},
    "example": 1,
}
ALL = asks("all", FLAG, "`1`: everybody's; for administrators")


def operation(
    summary: str,
    answer: str | Schema,
    *parameters: Schema,
    name: str,
    status: str = "200",
    media: str = "application/json",
    body: Schema | None = None,
    may_be_empty: bool = False,
    errors: tuple[str, ...] = (),
    scope: str | None = "custom:fgpu:queue:read",
) -> Operation:
    """Return one method of a path: what it answers, and which errors."""
    schema = ref(answer) if isinstance(answer, str) else answer
    found: Operation = {
        "operationId": name,
        "summary": summary,
        "description": f"Needs the scope `{scope}`."
        if scope
        else "Needs no scope beside access to the service.",
        "parameters": list(parameters),
        "responses": {
            status: {"description": "what was asked for", "content": {media: {"schema": schema}}},
            **{
                code: {
                    "description": MEANINGS[code],
                    "content": {"application/json": {"schema": ref("error")}},
                }
                for code in sorted({*ALWAYS, *errors})
            },
        },
    }
    if status == "200" and media != "text/event-stream":
        found["responses"]["304"] = {"description": "it is as `If-None-Match` says"}
    if body is not None:
        found["requestBody"] = {
            "required": not may_be_empty,
            "content": {"application/json": {"schema": body}},
        }
    return found


def body(required: tuple[str, ...] = (), **fields: Schema) -> Schema:
    """Return an object that is sent."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }
