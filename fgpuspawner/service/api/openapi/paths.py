"""The API's paths, their methods, parameters and answers; the administrators' are in `admin`."""

from __future__ import annotations

from fgpuspawner.service.api.openapi.kinds import TEXT, many, maybe
from fgpuspawner.service.api.openapi.operations import ALL, FLAG, ID, Operation, asks, body, number, operation

IMAGES = "custom:fgpu:images"
KEEP = "custom:fgpu:sessions:keep"
NAMED = body(("name",), name={**TEXT, "example": "torch-more"}, tag=maybe(TEXT))
CHANGES = ("404", "409")

PATHS: dict[str, dict[str, Operation]] = {
    "/openapi.json": {
        "get": operation("This document", {"type": "object"}, name="openapi", scope=None),
    },
    "/me": {"get": operation("Who asks", "me", name="me", scope=None)},
    "/sessions": {
        "get": operation(
            "Live sessions",
            "sessions",
            ALL,
            asks("ended", FLAG, "`1`: the last 50 ended ones, too"),
            name="sessions",
        ),
    },
    "/sessions/{id}": {
        "get": operation("One session, live or ended", "one_session", ID, name="session", errors=("404",)),
        "delete": operation(
            "End or cancel a session",
            "one_session",
            ID,
            name="endSession",
            body=body(message={"type": "string", "maxLength": 500}),
            may_be_empty=True,
            status="202",
            errors=(*CHANGES, "502"),
        ),
    },
    "/sessions/{id}/keep": {
        "post": operation(
            "Put off the end of an idle session",
            "one_session",
            ID,
            name="keepSession",
            errors=CHANGES,
            scope=KEEP,
        ),
    },
    "/sessions/{id}/image": {
        "post": operation(
            "Save a session as a private image",
            "one_private_image",
            ID,
            name="saveSession",
            status="202",
            body=NAMED,
            errors=CHANGES,
            scope=IMAGES,
        ),
    },
    "/sessions/{id}/meter": {
        "get": operation(
            "What a session holds and uses of its GPUs",
            "session_meter",
            ID,
            name="sessionMeter",
            errors=("404",),
        ),
    },
    "/sessions/{id}/receipt": {
        "get": operation("A session's receipt", "one_receipt", ID, name="receipt", errors=("404",)),
    },
    "/meters": {
        "get": operation("What running sessions hold and use of their GPUs", "meters", ALL, name="meters"),
    },
    "/history": {
        "get": operation(
            "Receipts of what has ended, newest first",
            "history",
            number("limit", 200, "so many, 50 by default"),
            number("before", 10**15, "the `next` of the page before"),
            asks("user", TEXT, "whose; others' for administrators"),
            ALL,
            name="history",
        ),
    },
    "/history.csv": {
        "get": operation(
            "Receipts of what has ended, as a file",
            TEXT,
            number("limit", 10_000, "so many, 10,000 by default"),
            number("before", 10**15, "sessions with ids below this"),
            asks("user", TEXT, "whose; others' for administrators"),
            ALL,
            name="historyFile",
            media="text/csv",
        ),
    },
    "/advice": {
        "get": operation(
            "What would have been enough for the caller's last runs",
            "advice",
            asks("image", TEXT, "of this image only"),
            name="advice",
        ),
    },
    "/private-images": {
        "get": operation(
            "The caller's private images", "private_images", ALL, name="privateImages", scope=IMAGES
        ),
    },
    "/private-images/{id}": {
        "get": operation(
            "One private image", "one_private_image", ID, name="privateImage", errors=("404",), scope=IMAGES
        ),
        "delete": operation(
            "Delete a private image",
            "one_private_image",
            ID,
            name="deleteImage",
            status="202",
            errors=CHANGES,
            scope=IMAGES,
        ),
    },
    "/private-images/{id}/name": {
        "put": operation(
            "Rename a private image",
            "one_private_image",
            ID,
            name="renameImage",
            body=NAMED,
            errors=CHANGES,
            scope=IMAGES,
        ),
    },
    "/private-images/{id}/shares": {
        "put": operation(
            "Say who may start a private image beside its owner",
            "one_private_image",
            ID,
            name="shareImage",
            body=body(("users", "groups"), users=many(TEXT), groups=many(TEXT)),
            errors=CHANGES,
            scope=IMAGES,
        ),
    },
    "/private-images/{id}/recipe": {
        "get": operation(
            "A private image's Dockerfile",
            TEXT,
            ID,
            name="recipe",
            media="text/plain",
            errors=("404",),
            scope=IMAGES,
        ),
    },
    "/queue": {
        "get": operation(
            "The queue of a resource group",
            "queue",
            asks("group", TEXT, "the first of the caller's by default"),
            name="queue",
            errors=("404",),
        ),
    },
    "/capacity": {"get": operation("What there is, and what is used of it", "capacity", name="capacity")},
    "/forecast": {
        "get": operation(
            "What would become of a request",
            "forecast",
            *(
                asks(name, TEXT, description)
                for name, description in {
                    "group": "resource group",
                    "image": "slug of an image",
                    "fgpu": "amount of fGPU",
                    "gpu_memory_mib": "exact GPU memory, in place of fGPU",
                    "compute_percent": "exact compute, beside the memory",
                    "gpu_model": "a model of GPU",
                    "cpu": "cores",
                    "memory_mib": "memory",
                    "count": "how many sessions",
                    "time_limit_s": "how long it may run",
                    "time_limit": "the same, as `2:30`",
                    "priority": "a whole number",
                    "instead_of": "a session of the caller's that would have ended first",
                }.items()
            ),
            name="forecast",
            errors=("404",),
        ),
    },
    "/images": {"get": operation("What the caller may start", "images", name="images", scope=None)},
    "/events": {
        "get": operation(
            "Server-sent events",
            TEXT,
            {
                "name": "Last-Event-ID",
                "in": "header",
                "required": False,
                "schema": {"type": "string", "pattern": "^[0-9]{1,18}$"},
                "description": "the event to resume from",
            },
            asks("last_event_id", {"type": "string"}, "the same, for who cannot set a header"),
            name="events",
            media="text/event-stream",
            errors=("429",),
        ),
    },
}
