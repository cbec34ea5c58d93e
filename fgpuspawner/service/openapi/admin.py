"""The calls of the administrators' part of the API."""

from __future__ import annotations

from functools import partial

from fgpu_scheduler import BannerLevel
from fgpuspawner import scopes
from fgpuspawner.meter.usage_report import By
from fgpuspawner.service.admin import objects
from fgpuspawner.service.admin.banner import LATEST_S
from fgpuspawner.service.objects import AMOUNT
from fgpuspawner.service.openapi import operations
from fgpuspawner.service.openapi.operations import (
    COUNT,
    FLAG,
    LARGEST_ID,
    TEXT,
    Schema,
    asks,
    maybe,
    number,
    sent,
)

BY: Schema = {"type": "string", "enum": list(By)}
LIMITS: dict[str, Schema] = {
    "max_fgpu": AMOUNT,
    "max_sessions": COUNT,
    "max_pending": COUNT,
    "max_lifetime_s": COUNT,
}
FOR = dict.fromkeys(("user", "hub_group", "resource_group"), TEXT)
DAY: Schema = {"type": "string", "pattern": "^(20[0-9]{2}-(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8]))?$"}
SPAN = (
    asks("from", DAY, "the first day, UTC"),
    asks("to", DAY, "the last day; today by default"),
    asks("by", BY, "what there is a line for; day by default"),
)
FILTERS = (
    asks("actor", TEXT, "who did it"),
    asks("action", TEXT, "what was done; `node` finds all of nodes"),
    asks("text", TEXT, "in the target or the details"),
    asks("group", TEXT, "of this resource group; all that you administer by default"),
    number("before", LARGEST_ID + 1, "the `next` of the page before"),
)
WORDS: Schema = {"type": "string", "maxLength": 500}
call = partial(operations.call, scope=scopes.ADMIN)

CALLS = (
    call("GET /admin/overview", "overview", "Use, queues, the idle, and what is wrong", objects.Overview),
    call("GET /admin/queue", "queues", "Every queue, with who waits too long", objects.Queues),
    call(
        "PUT /admin/sessions/{id}/priority",
        "setPriority",
        "Give a waiting session another priority",
        objects.OneWaiting,
        body=sent("priority", priority={"type": "integer", "minimum": 0, "maximum": 1000}),
    ),
    call("GET /admin/nodes", "nodes", "Every node with what is on it", objects.Nodes),
    call(
        "POST /admin/nodes/{name}",
        "changeNode",
        "Cordon, uncordon or drain a node, or say that it is gone; or cordon or uncordon one of its GPUs",
        objects.NodeChange,
        body=sent(
            "action",
            action={"type": "string", "enum": ["cordon", "uncordon", "gone", "drain"]},
            message=WORDS,
            gpu=TEXT,
        ),
    ),
    call("GET /admin/quotas", "quotas", "Every quota, and who has how much of it", objects.Quotas),
    call(
        "PUT /admin/quotas",
        "setQuota",
        "Set a quota in place of one for the same",
        objects.OneQuota,
        body=sent(**FOR, **LIMITS),
        errors=("409",),
    ),
    call(
        "DELETE /admin/quotas",
        "removeQuota",
        "Take a quota out of force",
        objects.OneQuota,
        *(asks(name, TEXT, "whom and what it is for") for name in FOR),
        asks("back", FLAG, "`1`: it is as in the file again"),
        errors=("409",),
    ),
    call("GET /admin/banner", "banner", "The announcement", objects.OneBanner),
    call(
        "PUT /admin/banner",
        "setBanner",
        "Announce something on every page",
        objects.OneBanner,
        body=sent(
            "text",
            text=WORDS,
            level={"type": "string", "enum": list(BannerLevel)},
            until_at_s=maybe({"type": "integer", "minimum": 0, "maximum": LATEST_S}),
        ),
    ),
    call("DELETE /admin/banner", "clearBanner", "Take the announcement down", objects.OneBanner),
    call("GET /admin/usage", "usage", "GPU-hours and waits", objects.Usage, *SPAN),
    call("GET /admin/usage.csv", "usageFile", "GPU-hours and waits, as a file", str, *SPAN),
    call(
        "GET /admin/audit",
        "audit",
        "Who did what, newest first",
        objects.AuditLines,
        *FILTERS,
        number("limit", 500, "so many, 50 by default"),
    ),
    call("GET /admin/audit.csv", "auditFile", "Who did what, as a file", str, *FILTERS),
)
