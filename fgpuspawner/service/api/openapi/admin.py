"""The administrators' part of the API: its objects and its paths."""

from __future__ import annotations

from typing import Any

from fgpu_scheduler import NodeState
from fgpuspawner.service.admin.banner import LATEST_S
from fgpuspawner.service.admin.queue_view import KEPT
from fgpuspawner.service.api.openapi.kinds import (
    AMOUNT,
    AT_S,
    COUNT,
    NUMBER,
    TEXT,
    WHOLE,
    YES_NO,
    Schema,
    by_name,
    many,
    maybe,
    one_of,
    ref,
    thing,
)
from fgpuspawner.service.api.openapi.operations import ID, LARGEST_ID, Operation, asks, body, operation
from fgpuspawner.service.api.openapi.schemas import SCHEMAS as OBJECTS

SCOPE = "custom:fgpu:admin"
BY = ("day", "user", "hub-group", "resource-group", "image")

DEVICE = thing(
    uuid=TEXT,
    index=COUNT,
    model=TEXT,
    memory_mib=COUNT,
    fgpu_total=AMOUNT,
    fgpu_used=AMOUNT,
    simulated=YES_NO,
    sessions=many(
        thing(
            id=COUNT,
            user=TEXT,
            server_name=TEXT,
            display_name=TEXT,
            state=TEXT,
            fgpu=AMOUNT,
            memory_mib=COUNT,
            compute_percent=COUNT,
        )
    ),
)
LIMITS: dict[str, Schema] = {
    "max_fgpu": AMOUNT,
    "max_sessions": COUNT,
    "max_pending": COUNT,
    "max_lifetime_s": COUNT,
}
FOR: dict[str, Schema] = {name: TEXT for name in ("user", "hub_group", "resource_group")}
NOTICE = thing(text=TEXT, level=one_of("info", "warning"), until_at_s=maybe(AT_S), set_by=TEXT, set_at_s=AT_S)

SCHEMAS: dict[str, Schema] = {
    "queue_entry": thing(
        **{name: OBJECTS["session"]["properties"][name] for name in KEPT},
        asked_priority=WHOLE,
        promised_at_s=maybe(AT_S),
        held=YES_NO,
        waited_s=COUNT,
        mark=maybe(one_of("long", "stuck")),
    ),
    "queues": thing(
        queues=many(
            thing(
                group=TEXT,
                length=COUNT,
                marked=COUNT,
                longest_wait_s=COUNT,
                nodes=COUNT,
                nodes_ready=COUNT,
                fgpu_used=AMOUNT,
                fgpu_free=AMOUNT,
                entries=many(ref("queue_entry")),
            )
        ),
        simulated=YES_NO,
    ),
    "one_queue_entry": thing(session=maybe(ref("queue_entry")), simulated=YES_NO),
    "nodes": thing(
        nodes=many(
            thing(
                name=TEXT,
                group=TEXT,
                state=one_of(*(state.value for state in NodeState)),
                state_text=TEXT,
                actions=many(TEXT),
                can_drain=YES_NO,
                isolation=maybe(TEXT),
                reason=maybe(TEXT),
                verified=maybe(
                    thing(session_id=COUNT, backend=TEXT, at_s=AT_S, in_force=YES_NO, problems=many(TEXT))
                ),
                cpu_total=AMOUNT,
                cpu_used=AMOUNT,
                memory_mib_total=COUNT,
                memory_mib_used=COUNT,
                sessions=COUNT,
                devices=many(DEVICE),
                warnings=many(thing(id=COUNT, user=TEXT, message=TEXT)),
            )
        ),
        simulated=YES_NO,
    ),
    "node_change": thing(
        node=TEXT, text=TEXT, failed=many(thing(session_id=COUNT, message=TEXT)), simulated=YES_NO
    ),
    "quota": thing(
        **{"for": by_name(TEXT)},
        name=TEXT,
        limits={**thing(**LIMITS), "required": []},
        text=TEXT,
        source=one_of("file", "edited", "added", "removed"),
        source_text=TEXT,
        file=maybe(TEXT),
        changed_by=maybe(TEXT),
        changed_at_s=maybe(AT_S),
        in_force=YES_NO,
        held=many(thing(name=TEXT, fgpu=AMOUNT, sessions=COUNT, waiting=COUNT, full=YES_NO)),
        held_by=COUNT,
    ),
    "one_quota": thing(quota=maybe(ref("quota")), simulated=YES_NO),
    "quotas": thing(quotas=many(ref("quota")), groups=many(TEXT), simulated=YES_NO),
    "notice": thing(banner=maybe(NOTICE), simulated=YES_NO),
    "usage_line": thing(
        name=TEXT,
        sessions=COUNT,
        starts=COUNT,
        gpu_hours=NUMBER,
        fgpu_hours=NUMBER,
        wait_mean_s=maybe(NUMBER),
        wait_p95_s=maybe(NUMBER),
    ),
    "usage": thing(
        **{"from": TEXT},
        to=TEXT,
        by=one_of(*BY),
        complete_from=maybe(TEXT),
        lines=many(ref("usage_line")),
        total=ref("usage_line"),
        simulated=YES_NO,
    ),
    "audit": thing(
        lines=many(thing(id=COUNT, at_s=AT_S, actor=TEXT, action=TEXT, target=TEXT, details=TEXT)),
        next=maybe(COUNT),
        simulated=YES_NO,
    ),
}

DAY: Schema = {"type": "string", "pattern": "^(20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))?$"}
SPAN = (
    asks("from", DAY, "the first day, UTC"),
    asks("to", DAY, "the last day; today by default"),
    asks("by", one_of(*BY), "what there is a line for; day by default"),
)
FILTERS = (
    asks("actor", TEXT, "who did it"),
    asks("action", TEXT, "what was done; `node` finds all of nodes"),
    asks("text", TEXT, "in the target or the details"),
    asks(
        "before",
        {"type": "integer", "minimum": 1, "maximum": LARGEST_ID + 1},
        "the `next` of the page before",
    ),
)
NODE: Schema = {
    "name": "name",
    "in": "path",
    "required": True,
    # No address has these parts: "." and ".." lead elsewhere.
    "schema": {"type": "string", "pattern": "^[A-Za-z0-9_-]{1,60}$"},
    "example": "local",
}


def admins(summary: str, answer: str | Schema, *parameters: Schema, name: str, **more: Any) -> Operation:
    """Return an operation that only administrators may call."""
    return operation(summary, answer, *parameters, name=name, scope=SCOPE, **more)


PATHS: dict[str, dict[str, Operation]] = {
    "/admin/queue": {"get": admins("Every queue, with who waits too long", "queues", name="queues")},
    "/admin/sessions/{id}/priority": {
        "put": admins(
            "Give a waiting session another priority",
            "one_queue_entry",
            ID,
            name="setPriority",
            body=body(("priority",), priority={"type": "integer", "minimum": 0, "maximum": 1000}),
            errors=("404", "409"),
        ),
    },
    "/admin/nodes": {"get": admins("Every node with what is on it", "nodes", name="nodes")},
    "/admin/nodes/{name}": {
        "post": admins(
            "Cordon, uncordon or drain a node, or say that it is gone",
            "node_change",
            NODE,
            name="changeNode",
            body=body(
                ("action",),
                action=one_of("cordon", "uncordon", "gone", "drain"),
                message={"type": "string", "maxLength": 500},
            ),
            errors=("404", "409"),
        ),
    },
    "/admin/quotas": {
        "get": admins("Every quota, and who has how much of it", "quotas", name="quotas"),
        "put": admins(
            "Set a quota in place of one for the same",
            "one_quota",
            name="setQuota",
            body={**body(), "properties": {**FOR, **LIMITS}},
            errors=("409",),
        ),
        "delete": admins(
            "Take a quota out of force",
            "one_quota",
            *(asks(name, TEXT, "whom and what it is for") for name in FOR),
            asks("back", one_of("0", "1"), "`1`: it is as in the file again"),
            name="removeQuota",
            errors=("409",),
        ),
    },
    "/admin/banner": {
        "get": admins("The announcement", "notice", name="banner"),
        "put": admins(
            "Announce something on every page",
            "notice",
            name="setBanner",
            body=body(
                ("text",),
                text={"type": "string", "maxLength": 500},
                level=one_of("info", "warning"),
                until_at_s=maybe({"type": "integer", "minimum": 0, "maximum": LATEST_S}),
            ),
        ),
        "delete": admins("Take the announcement down", "notice", name="clearBanner"),
    },
    "/admin/usage": {"get": admins("GPU-hours and waits", "usage", *SPAN, name="usage")},
    "/admin/usage.csv": {
        "get": admins("GPU-hours and waits, as a file", TEXT, *SPAN, name="usageFile", media="text/csv")
    },
    "/admin/audit": {
        "get": admins(
            "Who did what, newest first",
            "audit",
            *FILTERS,
            asks("limit", {"type": "integer", "minimum": 1, "maximum": 500}, "so many, 50 by default"),
            name="audit",
        )
    },
    "/admin/audit.csv": {
        "get": admins("Who did what, as a file", TEXT, *FILTERS, name="auditFile", media="text/csv")
    },
}
