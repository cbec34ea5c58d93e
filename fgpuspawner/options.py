"""Form, link and API input -> one validated `Wanted`. Pure; every refusal names the field and the limit.

The form and the link give lists of strings, the API gives JSON; all three have the same names and rules, `FIELDS`.
The GPU is asked for as ``fgpu``, or as ``gpu_memory_mib`` with ``compute_percent`` (without: memory only).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler import (
    Caps,
    FGPUError,
    Node,
    Refusal,
    Request,
    admit,
    amounts_that_fit,
    format_milli,
)
from fgpuspawner import fields as read
from fgpuspawner.catalogue import Image
from fgpuspawner.settings import FGPU

FIELDS = (
    "image",
    "group",
    "fgpu",
    "gpu_memory_mib",
    "compute_percent",
    "gpu_model",
    "cpu",
    "memory_mib",
    "count",
    "time_limit",
    "time_limit_s",
    "priority",
)
GPU_BY = "gpu_by"
"""Of the form only: which of its two ways to ask for a GPU is meant, "fgpu" or "memory"."""


class Refused(FGPUError):
    """A request that cannot be accepted; the message joins all the reasons."""

    code = "refused"

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(r.message for r in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one user may choose at this moment. Images and groups in the order they are shown.

    ``max_time_limit_s`` is None where sessions may run for ever.
    """

    images: tuple[Image, ...]
    groups: tuple[str, ...]
    nodes: tuple[Node, ...]
    caps: Caps
    default: Wanted
    max_time_limit_s: int | None = None
    max_priority: int = 0

    @property
    def simulated(self) -> bool:
        """Whether any GPU that is offered is simulated."""
        return any(d.simulated for n in self.nodes for d in n.devices)

    def models(self, group: str) -> tuple[str, ...]:
        """Return the GPU models of a resource group, each once, in the order of its nodes."""
        own = (d.model for n in self.nodes if n.resource_group == group for d in n.devices)
        return tuple(dict.fromkeys(own))


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for: ``count`` sessions, each of these amounts. See `Request` for what they mean."""

    image: str
    group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    count: int = 1
    gpu_memory_mib: int | None = None
    compute_percent: int | None = None
    gpu_model: str | None = None
    time_limit_s: int | None = None
    priority: int = 0

    @classmethod
    def of(cls, request: Request) -> Wanted:
        """Return what a request asked for."""
        return cls(
            request.image,
            request.resource_group,
            request.fgpu_milli,
            request.cpu_milli,
            request.memory_mib,
            gpu_memory_mib=request.gpu_memory_mib,
            compute_percent=request.compute_percent,
            gpu_model=request.gpu_model,
            time_limit_s=request.time_limit_s,
            priority=request.priority,
        )

    def request(self, user: str, server_name: str, hub_groups: Iterable[str] = ()) -> Request:
        """Return the scheduler's request for one server of ``user``, who is in these Hub groups now."""
        return Request(
            user=user,
            server_name=server_name,
            image=self.image,
            resource_group=self.group,
            fgpu_milli=self.fgpu_milli,
            cpu_milli=self.cpu_milli,
            memory_mib=self.memory_mib,
            gpu_memory_mib=self.gpu_memory_mib,
            compute_percent=self.compute_percent,
            gpu_model=self.gpu_model,
            time_limit_s=self.time_limit_s,
            priority=self.priority,
            groups=tuple(sorted(hub_groups)),
        )

    def as_options(self) -> dict[str, object]:
        """Return the user options that `parse` reads as this very thing."""
        gpu: dict[str, object] = {"fgpu": format_milli(self.fgpu_milli)}
        if self.gpu_memory_mib is not None:
            gpu = {"gpu_memory_mib": self.gpu_memory_mib, "compute_percent": self.compute_percent}
        found = {
            "image": self.image,
            "group": self.group,
            **gpu,
            "gpu_model": self.gpu_model,
            "cpu": format_milli(self.cpu_milli),
            "memory_mib": self.memory_mib,
            "count": self.count,
            "priority": self.priority or None,
        }
        # What is left out takes the default, and of these "no limit" need not be that.
        limit = {"time_limit_s": self.time_limit_s or 0}
        return {name: value for name, value in found.items() if value is not None} | limit


def asks_the_same(before: Request, again: Request) -> bool:
    """Return whether a request that is made again is the one that waits, so that it keeps its place.

    Not by the groups, which may have changed, nor by a time limit that the setting gives what had none.
    """
    limit_s = before.time_limit_s or again.time_limit_s
    return replace(before, groups=(), time_limit_s=limit_s) == replace(again, groups=())


def make_offer(
    settings: FGPU,
    nodes: Sequence[Node],
    images: Sequence[Image],
    groups: Sequence[str],
    hub_groups: Iterable[str] = (),
) -> Offer:
    """Return what a user with these ``groups`` and ``images`` may choose, with what is preselected.

    Raises:
        Refused: the user may use no resource group, or no image.
    """
    if not groups:
        raise Refused(
            [Refusal("group", "no_group", "group: you may use no resource group; ask an administrator")]
        )
    if not images:
        raise Refused([Refusal("image", "no_image", "image: you may use no image; ask an administrator")])
    caps = settings.caps()
    own = [n for n in nodes if n.resource_group in groups]
    first = [n for n in own if n.resource_group == groups[0]]
    default_image = next((i for i in images if i.default), images[0])
    return Offer(
        tuple(images),
        tuple(groups),
        tuple(own),
        caps,
        _default(settings, caps, first, groups[0], default_image),
        settings.max_time_limit_s or None,
        settings.priority_of(hub_groups),
    )


def _default(settings: FGPU, caps: Caps, nodes: Sequence[Node], group: str, image: Image) -> Wanted:
    """Preselect half a GPU (at least a step) and the part of the node's CPU and memory that goes with it."""
    amounts = amounts_that_fit(nodes, caps) or (caps.fgpu_step_milli,)
    capacity = min((d.capacity_milli for n in nodes for d in n.devices), default=caps.fgpu_step_milli)
    fgpu = settings.default_milli("default_fgpu") or max(
        (a for a in amounts if a <= capacity // 2), default=amounts[0]
    )
    node = max(nodes, key=lambda n: sum(d.capacity_milli for d in n.devices), default=None)
    total = sum(d.capacity_milli for d in node.devices) if node else 0
    cpu, memory = settings.default_milli("default_cpu"), settings.default_memory_mib
    if node is not None and total:
        cpu = cpu or max(100, min(node.cpu_milli, node.cpu_milli * fgpu // total) // 100 * 100)
        memory = memory or max(256, min(node.memory_mib, node.memory_mib * fgpu // total) // 256 * 256)
    cpu, memory = cpu or 1000, memory or 1024
    return Wanted(
        image=image.slug,
        group=group,
        fgpu_milli=fgpu,
        cpu_milli=min(cpu, caps.max_cpu_milli or cpu),
        memory_mib=min(memory, caps.max_memory_mib or memory),
        time_limit_s=settings.default_time_limit_s or settings.max_time_limit_s or None,
    )


def read_fields(fields: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return form or link fields as raw options; empty ones are left out, so that defaults apply.

    Raises:
        Refused: a field is given twice.
    """
    raw: dict[str, object] = {}
    for name, values in fields.items():
        if len(values) > 1:
            message = f"{read.short(name)}: given {len(values)} times; give it once"
            raise Refused([Refusal(_known(name), "given_twice", message)])
        if values and values[0].strip():
            raw[name] = values[0].strip()
    by = raw.pop(GPU_BY, None)
    unmeant = {"fgpu": ("gpu_memory_mib", "compute_percent"), "memory": ("fgpu",)}.get(str(by), ())
    return {name: value for name, value in raw.items() if name not in unmeant}


def parse(raw: Mapping[str, object], offer: Offer) -> Wanted:
    """Return what ``raw`` asks for, once it is known that it may queue.

    What is left out takes the offer's default.

    Raises:
        Refused: with every reason at once.
    """
    refusals: list[Refusal] = []
    for name in raw:
        if name not in FIELDS:
            message = f"{read.short(name)}: no such option; the options are {', '.join(FIELDS)}"
            refusals.append(Refusal("options", "unknown_option", message))
    default = offer.default
    group = read.choice(raw, "group", offer.groups, default.group, refusals)
    gpu_memory_mib = read.maybe_whole(raw, "gpu_memory_mib", 4096, refusals)
    wanted = Wanted(
        image=read.choice(raw, "image", [i.slug for i in offer.images], default.image, refusals),
        group=group,
        fgpu_milli=read.amount(raw, "fgpu", default.fgpu_milli, refusals) if gpu_memory_mib is None else 0,
        cpu_milli=read.amount(raw, "cpu", default.cpu_milli, refusals),
        memory_mib=read.whole(raw, "memory_mib", default.memory_mib, refusals),
        count=read.whole(raw, "count", default.count, refusals),
        gpu_memory_mib=gpu_memory_mib,
        compute_percent=read.maybe_whole(raw, "compute_percent", 25, refusals),
        gpu_model=_model(raw, offer.models(group), refusals),
        time_limit_s=read.time_limit(raw, default.time_limit_s, offer.max_time_limit_s, refusals),
        priority=_priority(raw, offer.max_priority, refusals),
    )
    _one_way(raw, refusals)
    if not refusals:
        refusals.extend(admit(wanted.request("", ""), wanted.count, offer.nodes, offer.caps))
    if refusals:
        raise Refused(refusals)
    return wanted


def _one_way(raw: Mapping[str, object], refusals: list[Refusal]) -> None:
    """Refuse what asks for a GPU in two ways at once, or for compute alone (product H2)."""
    if raw.get("gpu_memory_mib") is not None:
        if raw.get("fgpu") is not None:
            message = "gpu_memory_mib: given beside fgpu; ask for the GPU in one of these ways"
            refusals.append(Refusal("gpu_memory_mib", "two_ways", message))
    elif raw.get("compute_percent") is not None:
        message = "compute_percent: needs gpu_memory_mib beside it; compute is not given alone"
        refusals.append(Refusal("compute_percent", "compute_alone", message))


def _model(raw: Mapping[str, object], models: Sequence[str], refusals: list[Refusal]) -> str | None:
    if raw.get("gpu_model") is None:
        return None
    return read.choice(raw, "gpu_model", models, "", refusals) or None


def _priority(raw: Mapping[str, object], highest: int, refusals: list[Refusal]) -> int:
    asked = read.whole(raw, "priority", 0, refusals)
    if asked > highest:
        message = (
            f"priority: {asked} is above the highest that you may ask for, {highest}"
            if highest
            else f"priority: {asked} is not possible, because you may ask for none; leave it out"
        )
        refusals.append(Refusal("priority", "above_cap", message, str(highest), str(highest)))
    return asked


def _known(name: str) -> str:
    return name if name in FIELDS else "options"
