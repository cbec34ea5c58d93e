"""The REST API as an OpenAPI 3.1 document: ``docs/openapi.json``, and ``api/v1/openapi.json`` of a running service.

Every route of the API is in `CALLS` or `ADMIN_CALLS`, with its answer's object from `fgpuspawner.service.objects`;
tests compare both with the service. A new endpoint adds its lines there.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from pydantic import TypeAdapter
from pydantic.json_schema import GenerateJsonSchema

import fgpuspawner
from fgpu_scheduler import BannerLevel
from fgpuspawner import scopes
from fgpuspawner.form.own_setup import GIVEN
from fgpuspawner.meter.usage_report import By
from fgpuspawner.service import objects
from fgpuspawner.service.admin import objects as admin
from fgpuspawner.service.admin.banner import LATEST_S
from fgpuspawner.service.objects import AMOUNT, Error, OnePrivateImage, OneSession
from fgpuspawner.settings.queue import FGPU_AMOUNTS, QUOTA_AMOUNTS, QUOTA_SCOPES
from fgpuspawner.text.fields import FIELDS

Schema = dict[str, Any]

LARGEST_ID = 10**15 - 1
TEXT: Schema = {"type": "string"}
YES_NO: Schema = {"type": "boolean"}
COUNT: Schema = {"type": "integer", "minimum": 0}
FLAG: Schema = {"type": "string", "enum": ["0", "1"]}
MEANINGS = {
    "400": "what was sent cannot be read, or an argument is out of its bounds; `field` names it",
    "401": "no token, or one that JupyterHub does not know",
    "403": "the scope that the message names is missing, or the caller may not do this",
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


def request_body(*required: str, **fields: Schema) -> Schema:
    """Return a request's object: no other fields are allowed, and only some are required."""
    return {
        "type": "object",
        "properties": fields,
        "required": list(required),
        "additionalProperties": False,
    }


def nullable(schema: Schema) -> Schema:
    """Return a schema that also allows null."""
    return {"anyOf": [schema, {"type": "null"}]}


def query_parameter(name: str, schema: Schema, description: str) -> Schema:
    return {"name": name, "in": "query", "required": False, "schema": schema, "description": description}


def number(name: str, most: int, description: str) -> Schema:
    """Return a whole number of the query, from 1 on."""
    return query_parameter(name, {"type": "integer", "minimum": 1, "maximum": most}, description)


ALL = query_parameter("all", FLAG, "`1`: of all users; for administrators")
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
            status: {"description": "the answer", "content": {media: {"schema": answered}}},
            **{
                code: {"description": MEANINGS[code], "content": FAILED}
                for code in sorted({*ALWAYS, *errors, *(of_one if own else ())})
            },
        },
    }
    if status == "200" and media != "text/event-stream":
        found["responses"]["304"] = {"description": "unchanged since `If-None-Match`"}
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


NAME_AND_TAG: dict[str, Schema] = {"name": {**TEXT, "example": "torch-more"}, "tag": nullable(TEXT)}
MESSAGE = request_body(message={"type": "string", "maxLength": 500})
TEXTS = {"type": "array", "items": TEXT}
WHOSE = query_parameter("user", TEXT, "the user; others for administrators")
ENDED = query_parameter("ended", FLAG, "`1`: the last 50 ended ones, too")
GROUP = query_parameter("group", TEXT, "the first of the caller's by default")
FORECAST = [
    query_parameter(name, TEXT, field.label)
    for name, field in FIELDS.items()
    if name not in ("setup", *GIVEN)
]
LAST_EVENT = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "description": "the event to resume from",
}
EVENT = query_parameter("last_event_id", TEXT, "the same, for clients that cannot set a header")

of_owners = partial(call, scope=scopes.KEEP)
of_images = partial(call, scope=scopes.IMAGES)
of_admins = partial(call, scope=scopes.ADMIN)

CALLS = (
    call("GET /openapi.json", "openapi", "This document", dict[str, Any], scope=None),
    call("GET /me", "me", "The caller", objects.Me, scope=None),
    call("GET /sessions", "sessions", "Live sessions", objects.Sessions, ALL, ENDED),
    call("GET /sessions/{id}", "session", "One session, live or ended", OneSession),
    call(
        "DELETE /sessions/{id}",
        "endSession",
        "End or cancel a session",
        OneSession,
        body=MESSAGE,
        may_be_empty=True,
        status="202",
        errors=("502",),
    ),
    of_owners(
        "PATCH /sessions/{id}",
        "changeSession",
        "Give a running session another amount of its GPU, or a live one another name",
        OneSession,
        body=request_body(fgpu=AMOUNT, gpu_memory_mib=COUNT, compute_percent=COUNT, name=TEXT),
        status="202",
    ),
    of_owners("POST /sessions/{id}/keep", "keepSession", "Keep an idle session", OneSession),
    of_owners(
        "POST /sessions/{id}/park",
        "parkSession",
        "Move a session's GPU memory to the machine's memory, and give its GPU to others",
        OneSession,
        status="202",
    ),
    of_owners(
        "POST /sessions/{id}/wake", "wakeSession", "Ask for a parked session's GPU", OneSession, status="202"
    ),
    of_owners(
        "POST /sessions/{id}/never-park",
        "neverParkSession",
        "Choose that a session is never parked",
        OneSession,
    ),
    of_owners("POST /sessions/{id}/may-park", "mayParkSession", "Let a session be parked again", OneSession),
    of_owners(
        "POST /sessions/{id}/extend",
        "extendSession",
        "Extend a session's time limit",
        OneSession,
    ),
    of_images(
        "POST /sessions/{id}/image",
        "saveSession",
        "Save a session as a private image",
        OnePrivateImage,
        status="202",
        body=request_body("name", end=YES_NO, **NAME_AND_TAG),
    ),
    call(
        "GET /sessions/{id}/meter",
        "sessionMeter",
        "GPU use of a session",
        objects.SessionMeter,
    ),
    call(
        "GET /sessions/{id}/log",
        "sessionLog",
        "What a session's server has printed, for its owner",
        objects.SessionLog,
        number("lines", 1000, "how many of the last lines; 200 by default"),
    ),
    call(
        "GET /sessions/{id}/setup",
        "sessionSetup",
        "A session's own variables and start script, for its server's token only",
        objects.SessionSetup,
    ),
    call("GET /sessions/{id}/receipt", "receipt", "A session's receipt", objects.OneReceipt),
    call("GET /meters", "meters", "GPU use of running sessions", objects.Meters, ALL),
    call(
        "GET /history",
        "history",
        "Receipts of ended sessions, newest first",
        objects.History,
        number("limit", 200, "number of entries; 50 by default"),
        number("before", 10**15, "the `next` of the page before"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /history.csv",
        "historyFile",
        "Receipts of ended sessions, as a file",
        str,
        number("limit", 10_000, "number of entries; 10,000 by default"),
        number("before", 10**15, "sessions with ids below this"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /advice",
        "advice",
        "Smaller amounts that are enough for the caller's last runs",
        objects.AllAdvice,
        query_parameter("image", TEXT, "of this image only"),
    ),
    of_images(
        "GET /private-images", "privateImages", "The caller's private images", objects.PrivateImages, ALL
    ),
    of_images("GET /private-images/{id}", "privateImage", "One private image", OnePrivateImage),
    of_images(
        "DELETE /private-images/{id}", "deleteImage", "Delete a private image", OnePrivateImage, status="202"
    ),
    of_images(
        "PUT /private-images/{id}/name",
        "renameImage",
        "Rename a private image",
        OnePrivateImage,
        body=request_body("name", **NAME_AND_TAG),
    ),
    of_images(
        "PUT /private-images/{id}/shares",
        "shareImage",
        "Set the users and groups that may start a private image",
        OnePrivateImage,
        body=request_body(users=TEXTS, groups=TEXTS),
    ),
    of_images(
        "PUT /private-images/{id}/answer",
        "answerImage",
        "Accept or decline a private image that is offered to the caller",
        OnePrivateImage,
        body=request_body(accepted=YES_NO),
    ),
    of_images(
        "GET /private-images/{id}/recipe", "recipe", "A private image's Dockerfile", str, media="text/plain"
    ),
    call("GET /queue", "queue", "The queue of a resource group", objects.Queue, GROUP, errors=("404",)),
    call(
        "GET /capacity",
        "capacity",
        "Total, used and free capacity",
        objects.Capacity | objects.CapacityForAdmins,
    ),
    call(
        "GET /forecast",
        "forecast",
        "The forecast of a request",
        objects.Forecast,
        *FORECAST,
        query_parameter("instead_of", TEXT, "a session of the caller that counts as ended"),
        errors=("404",),
    ),
    call("GET /images", "images", "Images that the caller may start", objects.Images, scope=None),
    call("GET /events", "events", "Server-sent events", str, LAST_EVENT, EVENT, media="text/event-stream"),
)

LIMITS = {name: AMOUNT if name in FGPU_AMOUNTS else COUNT for name in QUOTA_AMOUNTS}
FOR = dict.fromkeys((*QUOTA_SCOPES, "resource_group"), TEXT)
DAY: Schema = {"type": "string", "pattern": "^(20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))?$"}
SPAN = (
    query_parameter("from", DAY, "the first day, UTC"),
    query_parameter("to", DAY, "the last day; today by default"),
    query_parameter("by", {"type": "string", "enum": list(By)}, "what each line is about; day by default"),
)
FILTERS = (
    query_parameter("actor", TEXT, "the actor"),
    query_parameter("action", TEXT, "the action; `node` finds all actions on nodes"),
    query_parameter("text", TEXT, "in the target or the details"),
    query_parameter("group", TEXT, "of this resource group; all that you administer by default"),
    number("before", LARGEST_ID + 1, "the `next` of the page before"),
)
WORDS: Schema = {"type": "string", "maxLength": 500}

ADMIN_CALLS = (
    of_admins("GET /admin/overview", "overview", "Use, queues, idle sessions and problems", admin.Overview),
    of_admins("GET /admin/queue", "queues", "Every queue, with marks for long waits", admin.Queues),
    of_admins(
        "PUT /admin/sessions/{id}/priority",
        "setPriority",
        "Give a waiting session another priority",
        admin.OneWaiting,
        body=request_body("priority", priority={"type": "integer", "minimum": 0, "maximum": 1000}),
    ),
    of_admins("GET /admin/nodes", "nodes", "Every node with its GPUs and sessions", admin.Nodes),
    of_admins(
        "POST /admin/nodes/{name}",
        "changeNode",
        "Cordon, uncordon or drain a node, or say that it is gone; or cordon or uncordon one of its GPUs",
        admin.NodeChange,
        body=request_body(
            "action",
            action={"type": "string", "enum": ["cordon", "uncordon", "gone", "drain"]},
            message=WORDS,
            gpu=TEXT,
        ),
    ),
    of_admins("GET /admin/quotas", "quotas", "Every quota with its use", admin.Quotas),
    of_admins(
        "PUT /admin/quotas",
        "setQuota",
        "Set a quota, instead of the one for the same users",
        admin.OneQuota,
        body=request_body(**FOR, **LIMITS),
        errors=("409",),
    ),
    of_admins(
        "DELETE /admin/quotas",
        "removeQuota",
        "Remove a quota",
        admin.OneQuota,
        *(query_parameter(name, TEXT, "the users or the resource group of the quota") for name in FOR),
        query_parameter("back", FLAG, "`1`: restore the file's quota"),
        errors=("409",),
    ),
    of_admins("GET /admin/banner", "banner", "The banner", admin.OneBanner),
    of_admins(
        "PUT /admin/banner",
        "setBanner",
        "Set the banner of every page",
        admin.OneBanner,
        body=request_body(
            "text",
            text=WORDS,
            level={"type": "string", "enum": list(BannerLevel)},
            until_at_s=nullable({"type": "integer", "minimum": 0, "maximum": LATEST_S}),
        ),
    ),
    of_admins("DELETE /admin/banner", "clearBanner", "Remove the banner", admin.OneBanner),
    of_admins("GET /admin/usage", "usage", "GPU-hours and waits", admin.Usage, *SPAN),
    of_admins("GET /admin/usage.csv", "usageFile", "GPU-hours and waits, as a file", str, *SPAN),
    of_admins(
        "GET /admin/audit",
        "audit",
        "The audit log, newest first",
        admin.AuditLines,
        *FILTERS,
        number("limit", 500, "number of entries; 50 by default"),
    ),
    of_admins("GET /admin/audit.csv", "auditFile", "The audit log, as a file", str, *FILTERS),
)


BASE = "/services/fgpu/api/v1"


def document(base: str = BASE) -> dict[str, Any]:
    """Return the document, with the address below which the paths are."""
    calls, schemas = described([*CALLS, *ADMIN_CALLS])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fgpu",
            "version": fgpuspawner.__version__,
            "description": "GPU sessions: the queue, what runs, and what has run. docs/rest-api.md explains it.",
            "license": {"name": "BSD-3-Clause", "identifier": "BSD-3-Clause"},
        },
        "servers": [{"url": base.rstrip("/")}],
        "security": [{"token": []}],
        "paths": calls,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "`token ...`, of a user, a server or a service of JupyterHub",
                }
            },
        },
    }
