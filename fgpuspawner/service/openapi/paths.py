"""The API's calls, with their arguments and answers; the administrators' are in `admin`."""

from __future__ import annotations

from functools import partial
from typing import Any

from fgpuspawner import scopes
from fgpuspawner.service import objects
from fgpuspawner.service.objects import AMOUNT, OnePrivateImage, OneSession
from fgpuspawner.service.openapi.operations import (
    ALL,
    COUNT,
    FLAG,
    TEXT,
    YES_NO,
    Schema,
    asks,
    call,
    maybe,
    number,
    sent,
)

NAME_AND_TAG: dict[str, Schema] = {"name": {**TEXT, "example": "torch-more"}, "tag": maybe(TEXT)}
NAMED = sent("name", **NAME_AND_TAG)
MESSAGE = sent(message={"type": "string", "maxLength": 500})
TEXTS = {"type": "array", "items": TEXT}
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

CALLS = (
    call("GET /openapi.json", "openapi", "This document", dict[str, Any], scope=None),
    call("GET /me", "me", "Who asks", objects.Me, scope=None),
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
        "resizeSession",
        "Give a running session another amount of its GPU",
        OneSession,
        body=sent(fgpu=AMOUNT, gpu_memory_mib=COUNT, compute_percent=COUNT),
        status="202",
    ),
    of_owners("POST /sessions/{id}/keep", "keepSession", "Put off the end of an idle session", OneSession),
    of_owners(
        "POST /sessions/{id}/extend",
        "extendSession",
        "Make the time limit of a session longer",
        OneSession,
    ),
    of_images(
        "POST /sessions/{id}/image",
        "saveSession",
        "Save a session as a private image",
        OnePrivateImage,
        status="202",
        body=sent("name", end=YES_NO, **NAME_AND_TAG),
    ),
    call(
        "GET /sessions/{id}/meter",
        "sessionMeter",
        "What a session holds and uses of its GPUs",
        objects.SessionMeter,
    ),
    call("GET /sessions/{id}/receipt", "receipt", "A session's receipt", objects.OneReceipt),
    call("GET /meters", "meters", "What running sessions hold and use of their GPUs", objects.Meters, ALL),
    call(
        "GET /history",
        "history",
        "Receipts of what has ended, newest first",
        objects.History,
        number("limit", 200, "so many, 50 by default"),
        number("before", 10**15, "the `next` of the page before"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /history.csv",
        "historyFile",
        "Receipts of what has ended, as a file",
        str,
        number("limit", 10_000, "so many, 10,000 by default"),
        number("before", 10**15, "sessions with ids below this"),
        WHOSE,
        ALL,
    ),
    call(
        "GET /advice",
        "advice",
        "What would have been enough for the caller's last runs",
        objects.AllAdvice,
        asks("image", TEXT, "of this image only"),
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
        body=sent("name", **NAME_AND_TAG),
    ),
    of_images(
        "PUT /private-images/{id}/shares",
        "shareImage",
        "Say who may start a private image beside its owner",
        OnePrivateImage,
        body=sent(users=TEXTS, groups=TEXTS),
    ),
    of_images(
        "PUT /private-images/{id}/answer",
        "answerImage",
        "Accept or decline a private image that is offered to the caller",
        OnePrivateImage,
        body=sent(accepted=YES_NO),
    ),
    of_images(
        "GET /private-images/{id}/recipe", "recipe", "A private image's Dockerfile", str, media="text/plain"
    ),
    call("GET /queue", "queue", "The queue of a resource group", objects.Queue, GROUP, errors=("404",)),
    call(
        "GET /capacity",
        "capacity",
        "What there is, and what is used of it",
        objects.Capacity | objects.CapacityForAdmins,
    ),
    call(
        "GET /forecast",
        "forecast",
        "What would become of a request",
        objects.Forecast,
        *(asks(name, TEXT, description) for name, description in ASKED.items()),
        errors=("404",),
    ),
    call("GET /images", "images", "What the caller may start", objects.Images, scope=None),
    call("GET /events", "events", "Server-sent events", str, LAST_EVENT, EVENT, media="text/event-stream"),
)
