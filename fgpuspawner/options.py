"""Form, link and API input -> one validated `Wanted`. Pure; every refusal names the field and the limit.

The form and the link give lists of strings, the API gives JSON; all three have the same names and rules:
``image``, ``group``, ``fgpu``, ``cpu``, ``memory_mib``, ``count``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fgpu_scheduler import (
    BadAmount,
    Caps,
    FGPUError,
    Node,
    Refusal,
    Request,
    admit,
    amounts_that_fit,
    format_milli,
    parse_milli,
)
from fgpuspawner.catalogue import Image
from fgpuspawner.settings import FGPU

FIELDS = ("image", "group", "fgpu", "cpu", "memory_mib", "count")


class Refused(FGPUError):
    """A request that cannot be accepted; the message joins all the reasons."""

    code = "refused"

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(r.message for r in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one user may choose at this moment. Images and groups in the order they are shown."""

    images: tuple[Image, ...]
    groups: tuple[str, ...]
    nodes: tuple[Node, ...]
    caps: Caps
    default: Wanted

    @property
    def simulated(self) -> bool:
        """Whether any GPU that is offered is simulated."""
        return any(d.simulated for n in self.nodes for d in n.devices)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What was asked for: ``count`` sessions, each of these amounts."""

    image: str
    group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    count: int = 1

    def request(self, user: str, server_name: str) -> Request:
        """Return the scheduler's request for one server of ``user``."""
        return Request(
            user=user,
            server_name=server_name,
            image=self.image,
            resource_group=self.group,
            fgpu_milli=self.fgpu_milli,
            cpu_milli=self.cpu_milli,
            memory_mib=self.memory_mib,
        )

    def as_options(self) -> dict[str, object]:
        """Return the user options that `parse` reads as this very thing."""
        return {
            "image": self.image,
            "group": self.group,
            "fgpu": format_milli(self.fgpu_milli),
            "cpu": format_milli(self.cpu_milli),
            "memory_mib": self.memory_mib,
            "count": self.count,
        }


def make_offer(
    settings: FGPU, nodes: Sequence[Node], images: Sequence[Image], groups: Sequence[str]
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
    )


def read_fields(fields: Mapping[str, Sequence[str]]) -> dict[str, object]:
    """Return form or link fields as raw options; empty ones are left out, so that defaults apply.

    Raises:
        Refused: a field is given twice.
    """
    raw: dict[str, object] = {}
    for name, values in fields.items():
        if len(values) > 1:
            raise Refused(
                [
                    Refusal(
                        _known(name),
                        "given_twice",
                        f"{_short(name)}: given {len(values)} times; give it once",
                    )
                ]
            )
        if values and values[0].strip():
            raw[name] = values[0].strip()
    return raw


def parse(raw: Mapping[str, object], offer: Offer) -> Wanted:
    """Return what ``raw`` asks for, once it is known that it may queue.

    What is left out takes the offer's default.

    Raises:
        Refused: with every reason at once.
    """
    refusals: list[Refusal] = []
    for name in raw:
        if name not in FIELDS:
            message = f"{_short(name)}: no such option; the options are {', '.join(FIELDS)}"
            refusals.append(Refusal("options", "unknown_option", message))
    default = offer.default
    wanted = Wanted(
        image=_choice(raw, "image", [i.slug for i in offer.images], default.image, refusals),
        group=_choice(raw, "group", offer.groups, default.group, refusals),
        fgpu_milli=_amount(raw, "fgpu", default.fgpu_milli, refusals),
        cpu_milli=_amount(raw, "cpu", default.cpu_milli, refusals),
        memory_mib=_whole(raw, "memory_mib", default.memory_mib, refusals),
        count=_whole(raw, "count", default.count, refusals),
    )
    if not refusals:
        refusals.extend(admit(wanted.request("", ""), wanted.count, offer.nodes, offer.caps))
    if refusals:
        raise Refused(refusals)
    return wanted


def _choice(
    raw: Mapping[str, object], name: str, known: Sequence[str], default: str, refusals: list[Refusal]
) -> str:
    value = raw.get(name, default)
    if isinstance(value, str) and value in known:
        return value
    # The same words whether it exists for others or not: what one may not see does not exist.
    message = f"{name}: there is no {_short(value)}; choose one of {', '.join(known)}"
    refusals.append(Refusal(name, "unknown_choice", message, None, default))
    return default


def _amount(raw: Mapping[str, object], name: str, default: int, refusals: list[Refusal]) -> int:
    value = raw.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        refusals.append(Refusal(name, "not_a_number", f"{name}: {_short(value)} is not a number such as 0.5"))
        return default
    try:
        return parse_milli(str(value), field=name)
    except BadAmount as e:
        refusals.append(Refusal(name, "bad_amount", str(e)))
        return default


def _whole(raw: Mapping[str, object], name: str, default: int, refusals: list[Refusal]) -> int:
    value = raw.get(name)
    if value is None:
        return default
    text = str(value)
    if (
        not isinstance(value, bool)
        and isinstance(value, str | int)
        and text.isascii()
        and text.isdigit()
        and len(text) < 10
    ):
        return int(text)
    refusals.append(
        Refusal(name, "not_a_number", f"{name}: {_short(value)} is not a whole number such as {default}")
    )
    return default


def _known(name: str) -> str:
    return name if name in FIELDS else "options"


def _short(value: object) -> str:
    """Return ``value`` for a message: quoted, and cut where it is long."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
