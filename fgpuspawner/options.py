"""Form, link and API input -> one validated `Wanted`. Pure; every refusal names the field and the limit.

The form and the link give lists of strings, the API gives JSON; all three have the same names and rules, `FIELDS`.
The GPU is asked for as ``fgpu``, or as ``gpu_memory_mib`` with ``compute_percent`` (without: memory only).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from fgpu_scheduler import (
    Caps,
    FGPUError,
    Node,
    Quota,
    Refusal,
    Request,
    admit,
    amounts_that_fit,
    format_milli,
)
from fgpu_scheduler.core.quota import counted_as
from fgpuspawner import fields as read
from fgpuspawner.images.architectures import models_for
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import amounts_for, inside_a_node, never_held
from fgpuspawner.images.needs import refusals as needs_unmet
from fgpuspawner.settings import FGPU
from fgpuspawner.words import hours_minutes

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
IMAGE_NAME = "image_name"
"""Of the form only: an image by its name, in place of one of those that it lists."""

ANY_GROUP = {"count", "time_limit", "time_limit_s", "priority"}
"""What is the same in every resource group."""
OF_SEVERAL = {"above_quota", "compute_alone", "never_fits_together", "two_ways"}
"""Refusals of what several fields ask for together."""


class Refused(FGPUError):
    """A request that cannot be accepted; the message joins all the reasons."""

    code = "refused"

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(r.message for r in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one user may choose at this moment. Images and groups in the order they are shown.

    Of the images that are hidden only who knows them may ask for; nothing names them. Where all are, ``default`` has
    none.
    ``max_time_limit_s`` is None where sessions may run for ever. ``user`` and ``hub_groups`` are whom quotas count.
    """

    images: tuple[Image, ...]
    groups: tuple[str, ...]
    nodes: tuple[Node, ...]
    caps: Caps
    default: Wanted
    max_time_limit_s: int | None = None
    quotas: tuple[Quota, ...] = ()
    user: str = ""
    hub_groups: tuple[str, ...] = ()

    @property
    def shown_images(self) -> tuple[Image, ...]:
        """The images that the user is shown."""
        return tuple(image for image in self.images if not image.hidden)

    def amounts_with(self, image: Image, group: str, amounts: Sequence[int] | None = None) -> Wanted:
        """Return what is preselected with an image in a resource group, of which ``amounts`` are known already."""
        own = [n for n in self.nodes if n.resource_group == group]
        devices = [d for n in own for d in n.devices]
        usual = self.default.fgpu_milli, self.default.cpu_milli, self.default.memory_mib
        fgpu, cpu, memory_mib = amounts_for(image, usual, devices, step_milli=self.caps.fgpu_step_milli)
        amounts = self.amounts(group) if amounts is None else amounts
        fgpu = next((a for a in amounts if a >= fgpu), amounts[-1] if amounts else fgpu)
        cpu, memory_mib = inside_a_node(fgpu, cpu, memory_mib, own)
        return replace(
            self.default,
            image=image.slug,
            group=group,
            fgpu_milli=fgpu,
            cpu_milli=min(cpu, self.caps.max_cpu_milli or cpu),
            memory_mib=min(memory_mib, self.caps.max_memory_mib or memory_mib),
        )

    @property
    def max_priority(self) -> int:
        """The highest priority that this user may ask for; 0 is none."""
        return self.caps.max_priority or 0

    def amounts(self, group: str) -> tuple[int, ...]:
        """Return, ascending, each fGPU amount in milli that this user could ever hold in a resource group."""
        own = [n for n in self.nodes if n.resource_group == group]
        asker = replace(self.default, group=group).request(self.user, "", self.hub_groups)
        return _inside(self.quotas, asker, amounts_that_fit(own, self.caps))

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
    *,
    user: str = "",
    hub_groups: Iterable[str] = (),
) -> Offer:
    """Return what a user with these resource ``groups`` and ``images`` may choose, with what is preselected.

    Raises:
        Refused: the user may use no resource group, or no image.
    """
    if not groups:
        raise Refused(
            [Refusal("group", "no_group", "group: you may use no resource group; ask an administrator")]
        )
    # What no node could ever hold is said to administrators, by `fgpu images list` and the service's page.
    images = [i for i in images if never_held(i, nodes, settings.caps()) is None]
    if not images:
        raise Refused([Refusal("image", "no_image", "image: you may use no image; ask an administrator")])
    hub_groups = tuple(hub_groups)
    caps = replace(
        settings.caps(),
        max_time_limit_s=settings.max_time_limit_s or read.LONGEST_TIME_LIMIT_S,
        max_priority=settings.priority_of(hub_groups),
    )
    quotas = settings.quotas_given()
    own = [n for n in nodes if n.resource_group in groups]
    first = [n for n in own if n.resource_group == groups[0]]
    shown = [image for image in images if not image.hidden]
    default_image = next((i for i in shown if i.default), next(iter(shown), None))
    slug = default_image.slug if default_image is not None else ""
    asker = Wanted(slug, groups[0], 0, 0, 0).request(user, "", hub_groups)
    amounts = _inside(quotas, asker, amounts_that_fit(first, caps)) or (caps.fgpu_step_milli,)
    offer = Offer(
        tuple(images),
        tuple(groups),
        tuple(own),
        caps,
        _default(settings, caps, first, groups[0], slug, amounts),
        settings.max_time_limit_s or None,
        quotas,
        user,
        hub_groups,
    )
    if default_image is None:
        return offer
    return replace(offer, default=offer.amounts_with(default_image, groups[0]))


def _inside(quotas: Iterable[Quota], asker: Request, amounts: Sequence[int]) -> tuple[int, ...]:
    """Return those of the amounts that no quota of whoever asks is below."""
    limits = [q.max_fgpu_milli for q in quotas if q.max_fgpu_milli is not None and counted_as(q, asker)]
    return tuple(a for a in amounts if not limits or a <= min(limits))


def _default(
    settings: FGPU, caps: Caps, nodes: Sequence[Node], group: str, slug: str, amounts: Sequence[int]
) -> Wanted:
    """Preselect half a GPU (at least a step) and the part of the node's CPU and memory that goes with it."""
    capacity = min((d.capacity_milli for n in nodes for d in n.devices), default=caps.fgpu_step_milli)
    fgpu = settings.default_milli("default_fgpu") or capacity // 2
    fgpu = max((a for a in amounts if a <= fgpu), default=amounts[0])
    node = max(nodes, key=lambda n: sum(d.capacity_milli for d in n.devices), default=None)
    total = sum(d.capacity_milli for d in node.devices) if node else 0
    cpu, memory = settings.default_milli("default_cpu"), settings.default_memory_mib
    if node is not None and total:
        cpu = cpu or max(100, min(node.cpu_milli, node.cpu_milli * fgpu // total) // 100 * 100)
        memory = memory or max(256, min(node.memory_mib, node.memory_mib * fgpu // total) // 256 * 256)
    cpu, memory = cpu or 1000, memory or 1024
    return Wanted(
        image=slug,
        group=group,
        fgpu_milli=fgpu,
        cpu_milli=min(cpu, caps.max_cpu_milli or cpu),
        memory_mib=min(memory, caps.max_memory_mib or memory),
        time_limit_s=settings.default_time_limit_s or settings.max_time_limit_s or None,
    )


def read_fields(fields: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return form or link fields as raw options; empty ones are left out, so that defaults apply.

    But in the form an empty time limit is none, and no image is no image.

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
    by, named = raw.pop(GPU_BY, None), raw.pop(IMAGE_NAME, None)
    if by is not None and "time_limit" in fields and raw.keys().isdisjoint(("time_limit", "time_limit_s")):
        # The form has the default in its field: whoever empties it wants none.
        raw["time_limit_s"] = "0"
    if named is not None:
        raw["image"] = named
    elif IMAGE_NAME in fields:
        # The form, with no image chosen and none named, must not start another than was meant.
        raw.setdefault("image", "")
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
    group = read.choice(raw, "group", offer.groups, offer.default.group, refusals)
    image = _image(raw, offer, refusals)
    default = offer.amounts_with(image, group) if "image" in raw or "group" in raw else offer.default
    gpu_memory_mib = read.maybe_whole(raw, "gpu_memory_mib", 4096, refusals)
    wanted = Wanted(
        image=image.slug,
        group=group,
        fgpu_milli=read.amount(raw, "fgpu", default.fgpu_milli if gpu_memory_mib is None else 0, refusals),
        cpu_milli=read.amount(raw, "cpu", default.cpu_milli, refusals),
        memory_mib=read.whole(raw, "memory_mib", default.memory_mib, refusals),
        count=read.whole(raw, "count", default.count, refusals),
        gpu_memory_mib=gpu_memory_mib,
        compute_percent=read.maybe_whole(raw, "compute_percent", 25, refusals),
        gpu_model=_model(raw, offer.models(group), refusals),
        time_limit_s=read.time_limit(raw, default.time_limit_s, offer.max_time_limit_s, refusals),
        priority=read.whole(raw, "priority", 0, refusals),
    )
    usable = models_for(image, offer.models(group))
    if wanted.gpu_model is None and len(usable) == 1 != len(offer.models(group)):
        # On any other model the image would not run.
        wanted = replace(wanted, gpu_model=usable[0])
    request = wanted.request(offer.user, "", offer.hub_groups)
    found = admit(request, wanted.count, offer.nodes, offer.caps, offer.quotas)
    told = [_in_its_notation(raw, wanted, refusal) for refusal in found]
    refusals.extend(_beside(refusals, raw, told) if refusals else told)
    if not refusals:
        refusals.extend(needs_unmet(image, request, offer.nodes, step_milli=offer.caps.fgpu_step_milli))
    if refusals:
        raise Refused(refusals)
    return wanted


def takeable_milli(wanted: Wanted, offer: Offer) -> Iterator[int]:
    """Yield, ascending, each fGPU amount in milli that could be asked for with the image of ``wanted``."""
    return (amount for amount in offer.amounts(wanted.group) if _is_enough(wanted, offer, amount))


def is_takeable(wanted: Wanted, offer: Offer, fgpu_milli: int) -> bool:
    """Return whether this amount could be asked for with the image of ``wanted``."""
    return fgpu_milli in offer.amounts(wanted.group) and _is_enough(wanted, offer, fgpu_milli)


def _is_enough(wanted: Wanted, offer: Offer, fgpu_milli: int) -> bool:
    image = next(i for i in offer.images if i.slug == wanted.image)
    asked = with_fgpu(wanted, fgpu_milli).request(offer.user, "", offer.hub_groups)
    return not needs_unmet(image, asked, offer.nodes, step_milli=offer.caps.fgpu_step_milli)


def with_fgpu(wanted: Wanted, fgpu_milli: int) -> Wanted:
    """Return the same with another amount of the GPU, asked for in fGPU."""
    return replace(wanted, fgpu_milli=fgpu_milli, gpu_memory_mib=None, compute_percent=None)


def _image(raw: Mapping[str, object], offer: Offer, refusals: list[Refusal]) -> Image:
    """Return the image that was chosen; what is hidden only where it was named. Any, where it is refused."""
    found = next((i for i in offer.images if i.slug == raw.get("image")), None)
    if found is not None:
        return found
    if not offer.shown_images:
        named = raw.get("image") not in (None, "")
        asked = f"there is no {read.short(raw['image'])}" if named else "you are shown none"
        message = f"image: {asked}; name one that you may use, or ask an administrator"
        refusals.append(Refusal("image", "unknown_choice" if named else "no_image", message))
        return offer.images[0]
    if raw.get("image") == "":
        message = f"image: none is chosen; choose one of {', '.join(i.slug for i in offer.shown_images)}"
        refusals.append(Refusal("image", "no_image", message, None, offer.default.image))
        raw = {name: value for name, value in raw.items() if name != "image"}
    slug = read.choice(raw, "image", [i.slug for i in offer.shown_images], offer.default.image, refusals)
    return next(i for i in offer.images if i.slug == slug)


def _beside(before: Sequence[Refusal], raw: Mapping[str, object], found: Iterable[Refusal]) -> list[Refusal]:
    """Return what is refused of the fields that were given, and could be read, beside others that could not.

    Those have a default in their place, and nothing is said that may follow from one.
    """
    wrong = {refusal.field for refusal in before}
    told = raw.keys() - wrong
    if "group" in wrong:
        told &= ANY_GROUP
    return [refusal for refusal in found if refusal.field in told and refusal.code not in OF_SEVERAL]


def _in_its_notation(raw: Mapping[str, object], wanted: Wanted, refusal: Refusal) -> Refusal:
    """Return the refusal of a time limit in hours and minutes, where it was given so."""
    if refusal.field != "time_limit_s" or raw.get("time_limit") is None:
        return refusal
    limit = hours_minutes(int(refusal.limit or 0))
    which = "below the shortest" if refusal.code == "too_small" else "above the longest"
    message = f"time_limit: {hours_minutes(wanted.time_limit_s or 0)} is {which} of {limit}"
    return replace(refusal, field="time_limit", message=message, limit=limit, nearest=limit)


def _model(raw: Mapping[str, object], models: Sequence[str], refusals: list[Refusal]) -> str | None:
    if raw.get("gpu_model") is None:
        return None
    return read.choice(raw, "gpu_model", models, "", refusals) or None


def _known(name: str) -> str:
    return name if name in FIELDS else "options"
