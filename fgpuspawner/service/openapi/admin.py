"""The administrators' part of the API: its objects and its calls."""

from __future__ import annotations

from functools import partial

from fgpu_scheduler import NodeState
from fgpuspawner import scopes
from fgpuspawner.service.admin.banner import LATEST_S
from fgpuspawner.service.admin.queue_view import KEPT
from fgpuspawner.service.openapi import operations
from fgpuspawner.service.openapi.json_schema import TEXT, Schema, by_name, many, maybe, one_of, some_of, thing
from fgpuspawner.service.openapi.operations import FLAG, LARGEST_ID, asks, number, paths
from fgpuspawner.service.openapi.schemas import LEVEL
from fgpuspawner.service.openapi.schemas import SCHEMAS as OBJECTS

BY = one_of("day", "user", "hub-group", "resource-group", "image")
LIMITS = "max_fgpu:amount max_sessions:count max_pending:count max_lifetime_s:count"
FOR = "user:text hub_group:text resource_group:text"

SPAN_USE = thing("gpus:number percent:count? starts:count wait_mean_s:count? wait_p95_s:count?")
PERCENTS = many(maybe({"type": "integer", "minimum": 0, "maximum": 100}))

SCHEMAS: dict[str, Schema] = {
    "queue_entry": thing(
        "asked_priority:whole promised_at_s:at_s? held:yes_no waited_s:count",
        **{name: OBJECTS["session"]["properties"][name] for name in KEPT},
        mark=maybe(one_of("long", "stuck")),
    ),
    "queues": thing(
        "simulated:yes_no",
        queues=many(
            thing(
                """
                group:text length:count marked:count longest_wait_s:count nodes:count nodes_ready:count
                fgpu_used:amount fgpu_free:amount entries:queue_entry[]
                """
            )
        ),
    ),
    "overview": thing(
        "running:count simulated:yes_no",
        use=maybe(
            thing("gpus:count", day=SPAN_USE, week=SPAN_USE, hours_percent=PERCENTS, days_percent=PERCENTS)
        ),
        forecasts=maybe(
            thing("starts:count inside_percent:count late_percent:count told_wait_s:whole true_wait_s:whole")
        ),
        queues=many(
            thing(
                """
                group:text length:count marked:count longest_wait_s:count nodes:count nodes_ready:count
                fgpu_used:amount fgpu_free:amount last_start_at_s:at_s? without_estimate:count
                """
            )
        ),
        idle=many(
            thing("id:count user:text display_name:text fgpu:amount idle_since_s:at_s ends_at_s:at_s?")
        ),
        problems=many(thing("text:text link:text? to:text", level=one_of("bad", "warn", "off"))),
    ),
    "one_queue_entry": thing("session:queue_entry? simulated:yes_no"),
    "nodes": thing(
        "simulated:yes_no",
        nodes=many(
            thing(
                """
                name:text group:text state_text:text closed:yes_no actions:text[] can_drain:yes_no
                isolation:text? reason:text?
                cpu_total:amount cpu_used:amount memory_mib_total:count memory_mib_used:count sessions:count
                """,
                state=one_of(*(state.value for state in NodeState)),
                verified=maybe(
                    thing("session_id:count backend:text at_s:at_s in_force:yes_no problems:text[]")
                ),
                devices=many(
                    thing(
                        """
                        uuid:text index:count model:text memory_mib:count fgpu_total:amount fgpu_used:amount
                        simulated:yes_no cordoned:yes_no cordon_reason:text? problem:text
                        """,
                        health=maybe(
                            thing(
                                """
                                at_s:at_s use_percent:count? memory_used_mib:count? temperature_c:count?
                                power_w:number? power_limit_w:number? ecc_errors:count? xid:count? xid_at_s:at_s?
                                trouble:text?
                                """
                            )
                        ),
                        action=one_of("cordon", "uncordon"),
                        sessions=many(
                            thing(
                                """
                                id:count user:text server_name:text display_name:text state:text fgpu:amount
                                memory_mib:count compute_percent:count?
                                """
                            )
                        ),
                    )
                ),
                warnings=many(thing("id:count user:text message:text")),
            )
        ),
    ),
    "node_change": thing(
        "node:text text:text simulated:yes_no", failed=many(thing("session_id:count message:text"))
    ),
    "quota": thing(
        """
        name:text text:text source_text:text file:text? changed_by:text? changed_at_s:at_s? in_force:yes_no
        held_by:count
        """,
        **{"for": by_name(TEXT)},
        limits=some_of("", LIMITS),
        source=one_of("file", "edited", "added", "removed"),
        held=many(thing("name:text fgpu:amount sessions:count waiting:count full:yes_no")),
    ),
    "one_quota": thing("quota:quota? simulated:yes_no"),
    "quotas": thing("quotas:quota[] groups:text[] simulated:yes_no"),
    "notice": thing(
        "simulated:yes_no",
        banner=maybe(thing("text:text until_at_s:at_s? set_by:text set_at_s:at_s", level=LEVEL)),
    ),
    "usage_line": thing(
        """
        name:text sessions:count starts:count gpu_hours:number fgpu_hours:number wait_mean_s:number?
        wait_p95_s:number?
        """
    ),
    "usage": thing(
        "from:text to:text complete_from:text? lines:usage_line[] total:usage_line simulated:yes_no", by=BY
    ),
    "audit": thing(
        "next:count? simulated:yes_no",
        lines=many(
            thing("id:count at_s:at_s actor:text action:text target:text details:text resource_group:text?")
        ),
    ),
}

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

PATHS = paths(
    call("GET /admin/overview", "overview", "Use, queues, the idle, and what is wrong", "overview"),
    call("GET /admin/queue", "queues", "Every queue, with who waits too long", "queues"),
    call(
        "PUT /admin/sessions/{id}/priority",
        "setPriority",
        "Give a waiting session another priority",
        "one_queue_entry",
        body=thing(priority={"type": "integer", "minimum": 0, "maximum": 1000}),
    ),
    call("GET /admin/nodes", "nodes", "Every node with what is on it", "nodes"),
    call(
        "POST /admin/nodes/{name}",
        "changeNode",
        "Cordon, uncordon or drain a node, or say that it is gone; or cordon or uncordon one of its GPUs",
        "node_change",
        body=some_of(
            "action:text", action=one_of("cordon", "uncordon", "gone", "drain"), message=WORDS, gpu=TEXT
        ),
    ),
    call("GET /admin/quotas", "quotas", "Every quota, and who has how much of it", "quotas"),
    call(
        "PUT /admin/quotas",
        "setQuota",
        "Set a quota in place of one for the same",
        "one_quota",
        body=some_of("", f"{FOR} {LIMITS}"),
        errors=("409",),
    ),
    call(
        "DELETE /admin/quotas",
        "removeQuota",
        "Take a quota out of force",
        "one_quota",
        *(asks(name, TEXT, "whom and what it is for") for name in thing(FOR)["properties"]),
        asks("back", FLAG, "`1`: it is as in the file again"),
        errors=("409",),
    ),
    call("GET /admin/banner", "banner", "The announcement", "notice"),
    call(
        "PUT /admin/banner",
        "setBanner",
        "Announce something on every page",
        "notice",
        body=some_of(
            "text:text",
            text=WORDS,
            level=LEVEL,
            until_at_s=maybe({"type": "integer", "minimum": 0, "maximum": LATEST_S}),
        ),
    ),
    call("DELETE /admin/banner", "clearBanner", "Take the announcement down", "notice"),
    call("GET /admin/usage", "usage", "GPU-hours and waits", "usage", *SPAN),
    call("GET /admin/usage.csv", "usageFile", "GPU-hours and waits, as a file", TEXT, *SPAN),
    call(
        "GET /admin/audit",
        "audit",
        "Who did what, newest first",
        "audit",
        *FILTERS,
        number("limit", 500, "so many, 50 by default"),
    ),
    call("GET /admin/audit.csv", "auditFile", "Who did what, as a file", TEXT, *FILTERS),
)
