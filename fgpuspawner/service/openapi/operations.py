"""Words to say with what an endpoint is asked and what it answers."""

from __future__ import annotations

from typing import Any

from fgpuspawner import scopes
from fgpuspawner.service.openapi.json_schema import TEXT, Schema, one_of, ref

Call = tuple[str, str, dict[str, Any]]
Paths = dict[str, dict[str, dict[str, Any]]]

LARGEST_ID = 10**15 - 1
FLAG: Schema = one_of("0", "1")
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
ALWAYS = ("400", "401", "403", "429", "503")


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
    answer: str | Schema = TEXT,
    *parameters: Schema,
    status: str = "200",
    media: str = "application/json",
    body: Schema | None = None,
    may_be_empty: bool = False,
    errors: tuple[str, ...] = (),
    scope: str | None = scopes.QUEUE_READ,
) -> Call:
    """Return one call, such as ``GET /sessions/{id}``: what it is asked, what it answers, and which errors.

    What is named by its address may not be there; and where it is to be changed, that may be impossible now.
    """
    method, path = address.split()
    own = [part for part in IN_PATH if f"{{{part}}}" in path]
    of_one = ("404",) if method == "GET" else ("404", "409")
    media = "text/csv" if path.endswith(".csv") else media
    schema = ref(answer) if isinstance(answer, str) else answer
    needs = f"Needs the scope `{scope}`." if scope else "Needs no scope beside access to the service."
    error = {"application/json": {"schema": ref("error")}}
    found: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "description": needs,
        "parameters": [
            *({"name": part, "in": "path", "required": True, **IN_PATH[part]} for part in own),
            *parameters,
        ],
        "responses": {
            status: {"description": "what was asked for", "content": {media: {"schema": schema}}},
            **{
                code: {"description": MEANINGS[code], "content": error}
                for code in sorted({*ALWAYS, *errors, *(of_one if own else ())})
            },
        },
    }
    if status == "200" and media != "text/event-stream":
        found["responses"]["304"] = {"description": "it is as `If-None-Match` says"}
    if body is not None:
        content = {"application/json": {"schema": body}}
        found["requestBody"] = {"required": not may_be_empty, "content": content}
    return path, method.lower(), found


def paths(*calls: Call) -> Paths:
    """Return the calls by their paths and methods."""
    found: Paths = {}
    for path, method, said in calls:
        found.setdefault(path, {})[method] = said
    return found
