"""The objects of the administrators' part of the API."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, with_config
from typing_extensions import TypedDict

from fgpu_scheduler import AccountShare, AuditLine, NodeState, QuotaSource, SessionState
from fgpuspawner.meter.gpu_health import GpuHealth
from fgpuspawner.meter.usage_report import By, Hour, Line
from fgpuspawner.service.objects import (
    Amount,
    Answer,
    AtS,
    Banner,
    Count,
    Device,
    Number,
    Object,
    WaitFields,
    answer,
)


class WaitingEntry(WaitFields):
    user: str
    server_name: str
    image_name: str
    amount: str
    submitted_at_s: AtS
    message: str | None
    simulated: bool
    asked_priority: int
    promised_at_s: AtS | None
    held: bool
    waited_s: Count
    mark: Literal["long", "stuck"] | None


class QueueFacts(Object):
    group: str
    length: Count
    marked: Count
    longest_wait_s: Count
    nodes: Count
    nodes_ready: Count
    fgpu_used: Amount
    fgpu_free: Amount


class WaitingQueue(QueueFacts):
    entries: list[WaitingEntry]
    accounts: list[AccountShare]


class Queues(Answer):
    queues: list[WaitingQueue]


class QueueSummary(QueueFacts):
    last_start_at_s: AtS | None
    without_estimate: Count


class Span(Object):
    gpus: Number | None
    percent: Count | None
    starts: Count
    wait_mean_s: Count | None
    wait_p95_s: Count | None


class Use(Object):
    gpus: Count
    day: Span
    week: Span
    hours: list[Hour]


class GpuNow(Object):
    """One GPU now. Unknown values are null."""

    node: str
    index: Count
    uuid: str
    fgpu_total: Amount
    fgpu_held: Amount
    fgpu_idle: Amount
    used_percent: Number | None
    lent_percent: Number | None
    in_use: bool


class PastForecasts(Object):
    starts: Count
    inside_percent: Count
    late_percent: Count
    told_wait_s: int
    true_wait_s: int


class Idle(Object):
    id: Count
    user: str
    display_name: str
    fgpu: Amount
    idle_since_s: AtS
    ends_at_s: AtS | None


class Trouble(Object):
    """A problem, and the address of the page where it is fixed."""

    level: Literal["bad", "warn", "off"] = "bad"
    text: str
    link: str | None = None
    to: str = ""


class Overview(Answer):
    gpus: list[GpuNow]
    use: Use | None
    queues: list[QueueSummary]
    forecasts: PastForecasts | None
    running: Count
    parked: Count
    parked_mib: Count
    idle: list[Idle]
    problems: list[Trouble]


class Verified(Object):
    session_id: Count
    backend: str
    at_s: AtS
    in_force: bool
    problems: list[str]


class DeviceSession(Object):
    id: Count
    user: str
    server_name: str
    display_name: str
    state: SessionState
    fgpu: Amount
    memory_mib: Count
    compute_percent: Count | None


class NodeDevice(Device):
    cordon_reason: str | None
    action: Literal["cordon", "uncordon"]
    health: GpuHealth | None
    problem: str
    sessions: list[DeviceSession]


class Warned(Object):
    id: Count
    user: str
    message: str


class Node(Object):
    name: str
    group: str
    state: NodeState
    state_text: str
    closed: bool
    actions: list[str]
    can_drain: bool
    isolation: str | None
    reason: str | None
    verified: Verified | None
    cpu_total: Amount
    cpu_used: Amount
    memory_mib_total: Count
    memory_mib_used: Count
    parked_mib: Count
    sessions: Count
    devices: list[NodeDevice]
    warnings: list[Warned]


class Nodes(Answer):
    nodes: list[Node]


class NotEnded(Object):
    session_id: Count
    message: str


class NodeChange(Answer):
    node: str
    text: str
    failed: list[NotEnded]


class QuotaHolder(Object):
    name: str
    fgpu: Amount
    sessions: Count
    waiting: Count
    full: bool


@with_config(ConfigDict(extra="forbid"))
class Limits(TypedDict, total=False):
    max_fgpu: Amount
    max_sessions: Count
    max_pending: Count
    max_lifetime_s: Count
    guaranteed_fgpu: Amount


class Quota(Object):
    for_: dict[str, str] = Field(serialization_alias="for")
    name: str
    limits: Limits
    text: str
    source: QuotaSource
    source_text: str
    file: str | None
    changed_by: str | None
    changed_at_s: AtS | None
    in_force: bool
    held: list[QuotaHolder]
    held_by: Count


class Quotas(Answer):
    quotas: list[Quota]
    groups: list[str]


class SetBanner(Banner):
    set_by: str
    set_at_s: AtS


class Usage(Answer):
    from_: str = Field(serialization_alias="from")
    to: str
    by: By
    complete_from: str | None
    lines: list[Line]
    total: Line


OneWaiting = answer("OneWaiting", session=WaitingEntry | None)
OneQuota = answer("OneQuota", quota=Quota | None)
OneBanner = answer("OneBanner", banner=SetBanner | None)
AuditLines = answer("AuditLines", lines=list[AuditLine], next=Count | None)
