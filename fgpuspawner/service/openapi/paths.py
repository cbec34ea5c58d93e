"""The API's calls: what each is asked and what it answers; the administrators' are in `admin`."""

from __future__ import annotations

from functools import partial

from fgpuspawner import scopes
from fgpuspawner.service.openapi.json_schema import TEXT, Schema, maybe, some_of
from fgpuspawner.service.openapi.operations import ALL, FLAG, asks, call, number, paths

IMAGE = "one_private_image"
NAME_AND_TAG: dict[str, Schema] = {"name": {**TEXT, "example": "torch-more"}, "tag": maybe(TEXT)}
NAMED = some_of("name:text", **NAME_AND_TAG)
MESSAGE = some_of(message={"type": "string", "maxLength": 500})
WHOSE = asks("user", TEXT, "whose; others' for administrators")
ENDED = asks("ended", FLAG, "`1`: the last 50 ended ones, too")
GROUP = asks("group", TEXT, "the first of the caller's by default")
ASKED = {
    "group": "resource group",
    "image": "slug of an image",
    "fgpu": "amount of fGPU",
    "gpu_memory_mib": "exact GPU memory, in place of fGPU",
    "compute_percent": "exact compute, beside the memory",
    "gpu_models": "GPU models with `,` between them, the most liked first; none: any",
    "gpu_model": "the same, of one",
    "cpu": "cores",
    "memory_mib": "memory",
    "count": "how many sessions",
    "time_limit_s": "how long it may run",
    "time_limit": "the same, as `2:30`",
    "priority": "a whole number",
    "instead_of": "a session of the caller's that would have ended first",
}
LAST_EVENT = {
    "name": "Last-Event-ID",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
    "description": "the event to resume from",
}
EVENT = asks("last_event_id", TEXT, "the same, for who cannot set a header")

of_owners = partial(call, scope=scopes.KEEP)
of_images = partial(call, scope=scopes.IMAGES)

PATHS = paths(
    call("GET /openapi.json", "openapi", "This document", {"type": "object"}, scope=None),
    call("GET /me", "me", "Who asks", "me", scope=None),
    call("GET /sessions", "sessions", "Live sessions", "sessions", ALL, ENDED),
    call("GET /sessions/{id}", "session", "One session, live or ended", "one_session"),
    call(
        "DELETE /sessions/{id}",
        "endSession",
        "End or cancel a session",
        "one_session",
        body=MESSAGE,
        may_be_empty=True,
        status="202",
        errors=("502",),
    ),
    of_owners(
        "PATCH /sessions/{id}",
        "resizeSession",
        "Give a running session another amount of its GPU",
        "one_session",
        body=some_of("fgpu:amount gpu_memory_mib:count compute_percent:count"),
        status="202",
    ),
    of_owners("POST /sessions/{id}/keep", "keepSession", "Put off the end of an idle session", "one_session"),
    of_owners(
        "POST /sessions/{id}/extend",
        "extendSession",
        "Make the time limit of a session longer",
        "one_session",
    ),
    of_images(
        "POST /sessions/{id}/image",
        "saveSession",
        "Save a session as a private image",
        IMAGE,
        status="202",
        body=some_of("name:text", "end:yes_no", **NAME_AND_TAG),
    ),
    call(
        "GET /sessions/{id}/meter",
        "sessionMeter",
        "What a session holds and uses of its GPUs",
        "session_meter",
    ),
    call("GET /sessions/{id}/receipt", "receipt", "A session's receipt", "one_receipt"),
    call("GET /meters", "meters", "What running sessions hold and use of their GPUs", "meters", ALL),
    call(
        "GET /history",
        "history",
        "Receipts of what has ended, newest first",
        "history",
        number("limit", 200, "so many, 50 by default"),
        number("before", 10**15, "the `next` of the page before"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /history.csv",
        "historyFile",
        "Receipts of what has ended, as a file",
        TEXT,
        number("limit", 10_000, "so many, 10,000 by default"),
        number("before", 10**15, "sessions with ids below this"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /advice",
        "advice",
        "What would have been enough for the caller's last runs",
        "advice",
        asks("image", TEXT, "of this image only"),
    ),
    of_images("GET /private-images", "privateImages", "The caller's private images", "private_images", ALL),
    of_images("GET /private-images/{id}", "privateImage", "One private image", IMAGE),
    of_images("DELETE /private-images/{id}", "deleteImage", "Delete a private image", IMAGE, status="202"),
    of_images("PUT /private-images/{id}/name", "renameImage", "Rename a private image", IMAGE, body=NAMED),
    of_images(
        "PUT /private-images/{id}/shares",
        "shareImage",
        "Say who may start a private image beside its owner",
        IMAGE,
        body=some_of("users:text[] groups:text[]"),
    ),
    of_images(
        "PUT /private-images/{id}/answer",
        "answerImage",
        "Accept or decline a private image that is offered to the caller",
        IMAGE,
        body=some_of("accepted:yes_no"),
    ),
    of_images(
        "GET /private-images/{id}/recipe", "recipe", "A private image's Dockerfile", TEXT, media="text/plain"
    ),
    call("GET /queue", "queue", "The queue of a resource group", "queue", GROUP, errors=("404",)),
    call("GET /capacity", "capacity", "What there is, and what is used of it", "capacity"),
    call(
        "GET /forecast",
        "forecast",
        "What would become of a request",
        "forecast",
        *(asks(name, TEXT, description) for name, description in ASKED.items()),
        errors=("404",),
    ),
    call("GET /images", "images", "What the caller may start", "images", scope=None),
    call("GET /events", "events", "Server-sent events", TEXT, LAST_EVENT, EVENT, media="text/event-stream"),
)
