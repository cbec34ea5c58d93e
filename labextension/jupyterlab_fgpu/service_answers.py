"""The service's answers (docs/rest-api.md): the parts that are shown, and their types checked."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict


class ServiceError(Exception):
    """A call that gave no answer to use. `message` is safe to show; `code` is stable."""

    def __init__(self, code: str, message: str, *, status: int = 502, field: str | None = None):
        super().__init__(message)
        self.code = code
        self.message = message
        self.status = status
        self.field = field


class Unreachable(ServiceError):
    """The service is down, too slow, failing, or answers what this version does not understand."""


class Forbidden(ServiceError):
    """The service does not accept this server's token for this call."""


class Refused(ServiceError):
    """The service understood the call and said no; its code and message are passed on."""


class Gpu(TypedDict):
    """One device of a session's slice."""

    uuid: str
    model: str | None
    fgpu: str | None
    memory_mib: int | None
    compute_percent: int | None
    simulated: bool


class Meter(TypedDict):
    """What was measured of a running session, on the host; None is "not known", `trouble` why."""

    at_s: int | None
    memory_used_mib: int | None
    memory_limit_mib: int | None
    memory_context_mib: int | None
    sm_percent: float | None
    compute_entitled_percent: int | None
    compute_received_percent: float | None
    compute_borrowed_percent: float | None
    compute_lent_percent: float | None
    trouble: str | None


class Resize(TypedDict):
    """What a running session's slice may become, and the last wish for it.

    ``amounts`` are in fGPU, ascending. A session of exact amounts has ``most_memory_mib``.
    """

    why_not: str | None
    amounts: list[str]
    most_memory_mib: int | None
    asked: str | None
    state: str | None
    message: str | None


class Session(TypedDict):
    """The part of the service's session object that is shown."""

    id: int | None
    server_name: str
    display_name: str
    state: str
    image: str | None
    image_name: str | None
    resource_group: str | None
    amount: str | None
    fgpu: str | None
    cpu: str | None
    memory_mib: int | None
    gpu_memory_mib: int | None
    compute_percent: int | None
    gpus: list[Gpu]
    wait_reason: str | None
    wait_text: str | None
    position: int | None
    ahead: int | None
    expected_start_at_s: int | None
    early_start_at_s: int | None
    late_start_at_s: int | None
    forecast_basis: str | None
    pull_text: str | None
    message: str | None
    meter: Meter | None
    resize: Resize | None
    started_at_s: int | None
    warning: str | None
    ends_at_s: int | None
    can_keep: bool
    extend_by_s: int | None
    can_save: bool
    url: str | None
    pending_url: str | None
    simulated: bool


class Queue(NamedTuple):
    """How many requests wait in one resource group."""

    group: str
    length: int


class Caller(NamedTuple):
    """Whose token it is: which server's (None: a person's), which user's; and what all are told."""

    server_name: str | None
    user: str | None
    banner: dict[str, Any] | None


class History(TypedDict):
    """What was measured of one session in the last minutes."""

    every_s: int | None
    points: list[dict[str, Any]]


def parse_session(raw: Any) -> Session:
    """Return the shown part of a session object; a wrong type raises Unreachable and names it."""
    if not isinstance(raw, dict):
        raise malformed("a session is not an object")
    server_name = required(raw, "server_name", str)
    pull = optional(raw, "pull", dict) or {}
    return Session(
        id=required(raw, "id", int),
        server_name=server_name,
        display_name=optional(raw, "display_name", str) or server_name,
        state=required(raw, "state", str),
        image=optional(raw, "image", str),
        image_name=optional(raw, "image_name", str),
        resource_group=optional(raw, "resource_group", str),
        amount=optional(raw, "amount", str),
        fgpu=optional(raw, "fgpu", str),
        cpu=optional(raw, "cpu", str),
        memory_mib=optional(raw, "memory_mib", int),
        gpu_memory_mib=optional(raw, "gpu_memory_mib", int),
        compute_percent=optional(raw, "compute_percent", int),
        gpus=[_parse_gpu(gpu) for gpu in items(raw, "gpus")],
        wait_reason=optional(raw, "wait_reason", str),
        wait_text=optional(raw, "wait_text", str),
        position=optional(raw, "position", int),
        ahead=optional(raw, "ahead", int),
        expected_start_at_s=optional(raw, "expected_start_at_s", int),
        early_start_at_s=optional(raw, "early_start_at_s", int),
        late_start_at_s=optional(raw, "late_start_at_s", int),
        forecast_basis=optional(raw, "forecast_basis", str),
        pull_text=optional(pull, "text", str),
        message=optional(raw, "message", str),
        meter=_parse_meter(optional(raw, "meter", dict)),
        resize=_parse_resize(optional(raw, "resize", dict)),
        started_at_s=optional(raw, "started_at_s", int),
        warning=optional(raw, "warning", str),
        ends_at_s=optional(raw, "ends_at_s", int),
        can_keep=bool(optional(raw, "can_keep", bool)),
        extend_by_s=optional(raw, "extend_by_s", int),
        can_save=bool(optional(raw, "can_save", bool)),
        url=optional(raw, "url", str),
        pending_url=optional(raw, "pending_url", str),
        simulated=required(raw, "simulated", bool),
    )


def _parse_gpu(raw: Any) -> Gpu:
    if not isinstance(raw, dict):
        raise malformed("a GPU is not an object")
    return Gpu(
        uuid=required(raw, "uuid", str),
        model=optional(raw, "model", str),
        fgpu=optional(raw, "fgpu", str),
        memory_mib=optional(raw, "memory_mib", int),
        compute_percent=optional(raw, "compute_percent", int),
        simulated=required(raw, "simulated", bool),
    )


def parse_caller(raw: dict[str, Any]) -> Caller:
    """Return who asks, and the administrator's banner if there is one."""
    banner = optional(raw, "banner", dict)
    if banner is not None:
        banner = {
            "text": required(banner, "text", str),
            "level": optional(banner, "level", str) or "info",
            "until_at_s": optional(banner, "until_at_s", int),
        }
    return Caller(optional(raw, "server_name", str), optional(raw, "user", str), banner)


def parse_history(raw: dict[str, Any]) -> History:
    """Return the points of a session's last minutes."""
    return History(
        every_s=optional(raw, "every_s", int),
        points=[
            {
                "at_s": required(point, "at_s", int),
                "memory_used_mib": optional(point, "memory_used_mib", int),
                "sm_percent": _number(point, "sm_percent"),
            }
            for point in items(raw, "points")
            if isinstance(point, dict)
        ],
    )


def _parse_meter(raw: dict[str, Any] | None) -> Meter | None:
    if raw is None:
        return None
    return Meter(
        at_s=optional(raw, "at_s", int),
        memory_used_mib=optional(raw, "memory_used_mib", int),
        memory_limit_mib=optional(raw, "memory_limit_mib", int),
        memory_context_mib=optional(raw, "memory_context_mib", int),
        sm_percent=_number(raw, "sm_percent"),
        compute_entitled_percent=optional(raw, "compute_entitled_percent", int),
        compute_received_percent=_number(raw, "compute_received_percent"),
        compute_borrowed_percent=_number(raw, "compute_borrowed_percent"),
        compute_lent_percent=_number(raw, "compute_lent_percent"),
        trouble=optional(raw, "trouble", str),
    )


def _parse_resize(raw: dict[str, Any] | None) -> Resize | None:
    if raw is None:
        return None
    amounts = items(raw, "amounts")
    if not all(isinstance(amount, str) for amount in amounts):
        raise malformed("an amount is not a text")
    return Resize(
        why_not=optional(raw, "why_not", str),
        amounts=amounts,
        most_memory_mib=optional(raw, "most_memory_mib", int),
        asked=optional(raw, "asked", str),
        state=optional(raw, "state", str),
        message=optional(raw, "message", str),
    )


def _number(raw: dict[str, Any], name: str) -> float | None:
    value = raw.get(name)
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    raise malformed(f"{name} is not of the type that docs/rest-api.md gives it")


def is_mine(raw: Any) -> bool:
    """Return whether a session of the answer is the caller's own."""
    # An administrator's answer could hold others' sessions; they are not for this panel.
    return not isinstance(raw, dict) or raw.get("mine") is not False


def optional(raw: dict[str, Any], name: str, kind: type) -> Any:
    """Return a member that may be missing or null; a wrong type raises Unreachable and names it."""
    value = raw.get(name)
    # bool is a kind of int in Python, but `true` is no number in JSON.
    if value is None or (isinstance(value, kind) and isinstance(value, bool) == (kind is bool)):
        return value
    raise malformed(f"{name} is not of the type that docs/rest-api.md gives it")


def required(raw: dict[str, Any], name: str, kind: type) -> Any:
    """Return a member that must be there."""
    value = optional(raw, name, kind)
    if value is None:
        raise malformed(f"{name} is missing")
    return value


def items(raw: dict[str, Any], name: str) -> list[Any]:
    """Return a member that must be a list."""
    value = raw.get(name)
    if not isinstance(value, list):
        raise malformed(f"{name} is not a list")
    return value


def malformed(why: str) -> Unreachable:
    """Return what to raise for an answer that this version does not understand."""
    return Unreachable("bad_answer", f"The fGPU service's answer was not understood: {why}.")
