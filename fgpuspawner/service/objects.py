"""The objects of the API (docs/rest-api.md), each defined once, for answers and for the API's description.

scripts/docs.py writes docs/openapi.json and JupyterLab's types from here. JupyterLab takes a field that an older service
lacks for null or for its default; without either it does not understand the answer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, WithJsonSchema, create_model, model_validator

from fgpu_scheduler import (
    BannerLevel,
    EndCause,
    ImageState,
    NodeState,
    Refusal,
    ResizeState,
    SessionState,
    WaitReason,
    format_milli,
)
from fgpuspawner.images.pull_state import Phase
from fgpuspawner.meter.model import Meter, Process

# Answers are computed here, so their limits are described to readers and checked in tests only.
Count = Annotated[int, WithJsonSchema({"type": "integer", "minimum": 0})]
Number = Annotated[int | float, WithJsonSchema({"type": "number", "minimum": 0})]
AtS = Annotated[int, WithJsonSchema({"type": "integer", "description": "UTC, in seconds"})]
AMOUNT = {"type": "string", "pattern": "^[0-9]+(\\.[0-9]{1,3})?$", "description": "an exact decimal"}
Amount = Annotated[str, WithJsonSchema(AMOUNT)]


class Object(BaseModel):
    """An object with exactly these fields. Templates and pages read them as ``object["name"]``."""

    model_config = ConfigDict(extra="forbid", json_schema_serialization_defaults_required=True)

    @classmethod
    def of(cls, *sources: object, **own: object) -> Self:
        """Return it with its ``own`` fields; each other field comes from the first source that has its name.

        A source may have an amount in thousandths, under the name with ``_milli`` appended.
        """
        return cls.model_validate({**cls._read(sources, own), **own})

    @classmethod
    def _read(cls, sources: Iterable[object], but: Iterable[str] = ()) -> dict[str, object]:
        found: dict[str, object] = {}
        for name in cls.model_fields.keys() - but:
            for source in sources:
                if hasattr(source, name):
                    found[name] = getattr(source, name)
                    break
                if hasattr(source, f"{name}_milli"):
                    milli = getattr(source, f"{name}_milli")
                    found[name] = None if milli is None else format_milli(milli)
                    break
        return found

    @model_validator(mode="before")
    @classmethod
    def _of_another(cls, given: object) -> object:
        return given if isinstance(given, dict | cls) else cls._read((given,))

    def as_json(self) -> str:
        return json.dumps(self.model_dump(mode="json", by_alias=True))

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)


class Answer(Object):
    """An answer; ``simulated``: whether any GPU in it is simulated."""

    simulated: bool = False


def answer(name: str, **fields: Any) -> type[Answer]:
    """Return a class of answers with these additional fields."""
    kinds: dict[str, Any] = {field: (kind, ...) for field, kind in fields.items()}
    return create_model(name, __base__=Answer, __module__=__name__, **kinds)


class Problem(Object):
    code: str
    field: str | None
    message: str


class Error(Object):
    error: Problem


class Amounts(Object):
    fgpu: Amount
    cpu: Amount
    memory_mib: Count


class Banner(Object):
    """The announcement for all users; only administrators see who set it."""

    text: str
    level: BannerLevel
    until_at_s: AtS | None


class Me(Answer):
    user: str | None
    admin: bool
    administers: list[str]
    server_name: str | None
    groups: list[str]
    banner: Banner | None


class Gpu(Object):
    uuid: str
    model: str | None
    fgpu: Amount
    memory_mib: Count
    compute_percent: Count | None
    simulated: bool


class Resize(Object):
    """What a running session's amount can become, and its last resize request. Exact amounts have no list of amounts."""

    why_not: str | None
    amounts: list[Amount]
    most_memory_mib: Count | None
    asked: str | None = None
    state: ResizeState | None = None
    message: str | None = None


class OtherSession(Object):
    id: Count
    user: str
    server_name: str
    mine: bool


class WaitsFor(Object):
    count: Count
    fgpu: Amount
    sessions: list[OtherSession]
    text: str


class Pull(Object):
    phase: Phase
    text: str
    layers_done: Count
    layers: Count
    bytes_done: Count
    bytes_total: Count | None
    seconds_left: Count | None
    attempt: Count
    trouble: str | None


class Saving(Object):
    """The private image that a session is being saved as."""

    id: Count
    name: str
    state: Literal[ImageState.WISHED, ImageState.COMMITTING]
    message: str | None


class RequestFields(Object):
    """Fields that a session and its receipt share: the request, its beginning and its end."""

    user: str
    server_name: str
    image: str
    image_name: str
    resource_group: str
    amount: str
    fgpu: Amount | None
    gpu_memory_mib: Count | None
    submitted_at_s: AtS
    started_at_s: AtS | None
    ended_at_s: AtS | None
    end_cause: EndCause | None
    message: str | None
    display_name: str
    mine: bool
    simulated: bool


class WaitFields(Object):
    """Fields about a session's wait, also in the administrators' queue."""

    id: Count
    display_name: str
    gpu_models: list[str]
    priority: int
    wait_reason: WaitReason | None = None
    wait_text: str | None = None
    position: Count | None = None
    expected_start_at_s: AtS | None = None
    early_start_at_s: AtS | None = None
    late_start_at_s: AtS | None = None
    forecast_basis: str | None = None
    waits_for: WaitsFor | None = None
    sooner: str | None = None
    pull: Pull | None


class Parked(Object):
    """A session whose GPU memory is in the machine's memory; ``wanted``: it waits for its GPU."""

    since_s: AtS
    memory_mib: Count
    wanted: bool


class SessionFolder(Object):
    """A shared folder of a session, and its place in the home; null where it is no longer configured."""

    name: str
    at: str | None = None
    read_only: bool | None = None


class Session(WaitFields, RequestFields):
    state: SessionState
    cpu: Amount
    memory_mib: Count
    compute_percent: Count | None
    node: str | None
    gpus: list[Gpu]
    ahead: Count | None = None
    time_limit_s: Count | None
    ends_at_s: AtS | None = None
    ends_cause: EndCause | None = None
    warning: str | None = None
    preemptible_from_s: AtS | None = None
    can_keep: bool = False
    parked: Parked | None
    can_park: bool = False
    park_refused: str | None
    never_park: bool | None
    extend_by_s: Count | None = None
    url: str
    pending_url: str
    saving: Saving | None
    can_save: bool = False
    meter: Meter | None
    disk: str | None
    folders: list[SessionFolder] = []
    resize: Resize | None


class Sessions(Answer):
    sessions: list[Session]


class Point(Object):
    at_s: AtS
    memory_used_mib: Count | None
    sm_percent: Number | None


class SessionLog(Answer):
    """The last lines that a session's server and start script have printed, oldest first; secrets are masked."""

    session_id: Count
    lines: list[str]


class SessionSetup(Answer):
    """A session's own variables and start script, for the session itself only."""

    variables: dict[str, str]
    script: str


class SessionMeter(Answer):
    """``every_s`` is the distance of points; a larger one is a gap. A session that does not run has no reading."""

    now: Meter | None = None
    every_s: Count
    points: list[Point] = []
    processes: list[Process] = []


class Receipt(RequestFields):
    session_id: Count
    wait_s: Count
    run_s: Count
    gpu_hours: Number
    memory_peak_mib: Count | None
    memory_p95_mib: Count | None
    sm_p95_percent: Number | None
    energy_wh: Number | None
    energy_estimated: bool
    samples: Count
    compute_entitled_percent: Count | None
    compute_received_percent: Number | None
    compute_borrowed_percent: Number | None
    compute_lent_percent: Number | None


class Advice(Object):
    image: str
    image_name: str
    runs: Count
    asked_fgpu: Amount
    enough_fgpu: Amount
    memory_peak_mib: Count
    text: str


class QueueEntry(Object):
    position: Count
    mine: bool
    id: Count | None
    user: str | None
    amount: str
    fgpu: Amount | None
    state: SessionState
    wait_reason: WaitReason
    expected_start_at_s: AtS | None
    early_start_at_s: AtS | None
    late_start_at_s: AtS | None
    submitted_at_s: AtS


class Queue(Answer):
    group: str
    length: Count
    entries: list[QueueEntry]


class HeldShare(Object):
    fgpu: Amount
    mine: bool
    session_id: Count | None


class Device(Object):
    uuid: str
    index: Count
    model: str
    memory_mib: Count
    fgpu_total: Amount
    fgpu_used: Amount
    simulated: bool
    cordoned: bool


class SharedDevice(Device):
    node: str
    shares: list[HeldShare]


class Group(Object):
    name: str
    nodes: Count
    nodes_lost: Count
    total: Amounts
    used: Amounts
    free: Amounts
    mine: Amounts
    allocatable: Amounts
    largest_fgpu_now: Amount | None
    fgpu_step: Amount
    waiting: Count
    devices: list[SharedDevice]


class NodeIsolation(Object):
    name: str
    group: str
    state: NodeState
    isolation: str | None
    reason: str | None


class Capacity(Answer):
    groups: list[Group]
    mine_overall: Amounts
    allocatable_overall: Amounts


class CapacityForAdmins(Capacity):
    nodes: list[NodeIsolation]


class Beside(Object):
    cpu: Amount
    memory_mib: Count
    memory_gib: str


class QuotaLeft(Object):
    fgpu_left: Amount | None
    sessions_left: Count | None
    text: str | None


class Installing(Object):
    """A framework for local sessions that is being made, or was: the launch form shows how far it is."""

    name: str
    state: Literal["installing", "ready", "failed"]
    text: str


class Forecast(Answer):
    starts_now: bool = False
    startable_now: Count = 0
    count: Count
    position: Count | None = None
    expected_start_at_s: AtS | None = None
    early_start_at_s: AtS | None = None
    late_start_at_s: AtS | None = None
    basis: str
    text: str
    wait_reason: WaitReason | None = None
    waits_for: WaitsFor | None = None
    largest_now: Amount | None = None
    beside_now: Beside | None = None
    beside_other: Beside | None = None
    soonest: Amount | None = None
    soonest_at_s: AtS | None = None
    refusals: list[Refusal] = []
    quota: QuotaLeft | None
    installing: list[Installing] = []


class Needs(Object):
    fgpu: Amount | None
    gpu_memory_mib: Count | None
    cpu: Amount | None
    memory_mib: Count | None


class Image(Object):
    slug: str
    name: str
    framework: str
    version: str
    python: str
    description: str
    icon: str
    kernels: list[str]
    gpu_architectures: list[str]
    cuda: str | None
    minimum: Needs
    recommended: Needs
    sudo: bool
    deprecated: str | None
    private: bool
    default: bool


class Images(Answer):
    images: list[Image]


class PrivateImage(Object):
    """The users it is shared with, and who asked for it, are null for a viewer who may not manage it."""

    id: Count
    name: str
    owner: str
    mine: bool
    can_manage: bool
    can_share: bool
    state: ImageState
    message: str | None
    session_id: Count
    made_from: str
    base: str
    size_mib: Count | None
    shared_users: list[str] | None
    shared_groups: list[str] | None
    accepted_by: list[str] | None
    declined_by: list[str] | None
    answer: str | None
    digest: str | None
    asked_by: str | None
    asked_at_s: AtS
    made_at_s: AtS | None
    has_recipe: bool


class ImageQuota(Object):
    images: Count | None
    mib: Count | None
    images_used: Count
    mib_used: Count


class PrivateImages(Answer):
    images: list[PrivateImage]
    quota: ImageQuota


OneSession = answer("OneSession", session=Session)
Meters = answer("Meters", meters=dict[str, Meter], every_s=Count)
OneReceipt = answer("OneReceipt", receipt=Receipt)
History = answer("History", receipts=list[Receipt], next=Count | None)
AllAdvice = answer("AllAdvice", advice=list[Advice])
OnePrivateImage = answer("OnePrivateImage", image=PrivateImage | None)
