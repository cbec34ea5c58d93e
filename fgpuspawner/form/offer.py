"""What one user may choose now, what is preselected, and what they request. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from fgpu_scheduler import (
    Caps,
    Device,
    FGPUError,
    Node,
    Quota,
    Refusal,
    Request,
    account_names,
    amounts_that_fit,
    counted_names,
    format_milli,
)
from fgpuspawner.form.own_setup import GivenSetup
from fgpuspawner.images.availability import NOTHING_KNOWN, Availabilities
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import beside_for, fgpu_for, never_held, nodes_for, refusals
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.folders import SharedFolder
from fgpuspawner.text.fields import LONGEST_TIME_LIMIT_S, MOST_NAME
from fgpuspawner.text.sessions import default_name


@dataclass(frozen=True, slots=True)
class LaunchRequest(Request):
    """What the form, a link, a preset or the API asks for: ``count`` sessions, each of this `Request`."""

    count: int = 1
    #: The variables and script that were given with it. The spawner stores them, and sets ``setup``.
    own: GivenSetup | None = field(default=None, repr=False, compare=False)

    @classmethod
    def of(cls, request: Request) -> LaunchRequest:
        """Return the launch request for one session of ``request``."""
        return cls(**{one.name: getattr(request, one.name) for one in fields(Request)})

    def for_server(self, server_name: str, name: str = "") -> Request:
        """Return the scheduler's request for one server of the user; ``name`` replaces the session's name."""
        given: dict[str, Any] = {one.name: getattr(self, one.name) for one in fields(Request)}
        return Request(**{**given, "server_name": server_name, "name": name or self.name})

    def names(self, server_names: Sequence[str], framework: str) -> list[str]:
        """Return the names of this request's sessions: the given name with numbers, or the image's and the server's."""
        if not self.name:
            return [default_name(framework or self.image, server) for server in server_names]
        return [self.name, *(f"{self.name[: MOST_NAME - 4]} {n}" for n in range(2, len(server_names) + 1))]

    def as_options(self) -> dict[str, object]:
        """Return the user options that `parse` reads as the same request."""
        gpu: dict[str, object] = {"fgpu": format_milli(self.fgpu_milli)}
        if self.gpu_memory_mib is not None:
            gpu = {"gpu_memory_mib": self.gpu_memory_mib, "compute_percent": self.compute_percent}
        found = {
            "image": self.image,
            "group": self.resource_group,
            "account": account_names(self.account)[-1] if self.account else None,
            **gpu,
            "gpu": ON_DEMAND if self.on_demand else None,
            "gpu_models": list(self.gpu_models) or None,
            "cpu": format_milli(self.cpu_milli),
            "memory_mib": self.memory_mib,
            "count": self.count,
            "folders": list(self.folders) or None,
            "priority": self.priority or None,
            "name": self.name or None,
            "setup": self.setup or None,
            # An option that is left out takes the default, which need not be "no limit".
            "time_limit_s": self.time_limit_s or 0,
        }
        return {name: value for name, value in found.items() if value is not None}


AT_START, ON_DEMAND = GPU_WHEN = ("at-start", "on-demand")
"""When a session gets its GPU."""


def asks_the_same(before: Request, again: Request, always: Collection[str] = ()) -> bool:
    """Return whether a repeated request equals the waiting one, which then keeps its place in the queue.

    Hub groups and the name do not count, as they may have changed, nor a default time limit or accounts that were set
    since, the order of folders, or the folders that each of the user's sessions ``always`` has.
    """
    limit_s, account = before.time_limit_s or again.time_limit_s, before.account or again.account
    chosen = [tuple(sorted({*request.folders}.difference(always))) for request in (before, again)]
    same = replace(before, groups=(), name="", account=account, time_limit_s=limit_s, folders=chosen[0])
    return same == replace(again, groups=(), name="", folders=chosen[1])


class RequestRefused(FGPUError):
    """A request that cannot be accepted; the message joins all the reasons."""

    code = "refused"

    def __init__(self, refusals: Sequence[Refusal]) -> None:
        super().__init__("; ".join(r.message for r in refusals))
        self.refusals = tuple(refusals)


@dataclass(frozen=True, slots=True)
class Offer:
    """What one user may choose at this moment."""

    #: In the order in which they are shown. Hidden ones can be requested by name, and are never listed.
    images: tuple[Image, ...]
    groups: tuple[str, ...]
    nodes: tuple[Node, ...]
    caps: Caps
    #: The preselected request, with its user and Hub groups; without an image if all images are hidden.
    default: LaunchRequest
    #: None if sessions may run without a limit.
    max_time_limit_s: int | None = None
    quotas: tuple[Quota, ...] = ()
    #: The paths of the user's accounts, the usual one first; none if there are no accounts.
    accounts: tuple[str, ...] = ()
    #: The CPU and memory with any amount of the GPU; 0: in proportion to the amount's part of the node's GPUs.
    usual_cpu_milli: int = 0
    usual_memory_mib: int = 0
    #: Nodes with work-conserving compute: a session's share is a minimum there.
    lending: frozenset[str] = frozenset()
    #: Nodes on which sessions can be parked, and so be on demand.
    parking: frozenset[str] = frozenset()
    #: The shared folders that the user may have, also those that each of their sessions has.
    folders: tuple[SharedFolder, ...] = ()
    #: Where the images are. An image that can't start is not shown, and is refused with the reason.
    available: Availabilities = NOTHING_KNOWN

    @property
    def user(self) -> str:
        return self.default.user

    @property
    def shown_images(self) -> tuple[Image, ...]:
        found = (i for i in self.images if not i.hidden and i.is_accepted_by(self.user))
        return tuple(i for i in found if self._may_start(i))

    @property
    def offered_images(self) -> tuple[Image, ...]:
        """The images of others that the user has neither accepted nor declined."""
        others = (
            i for i in self.images if not i.is_accepted_by(self.user) and self.user not in i.declined_by
        )
        return tuple(i for i in others if self._may_start(i))

    def _may_start(self, image: Image) -> bool:
        return self.available.why_not(image.slug, self.nodes) is None

    def may_wait_for_gpu(self, group: str) -> bool:
        """Return whether a session of this resource group can get its GPU on demand, on whichever node it is placed."""
        own = self.nodes_of(group)
        return bool(own) and all(node.id in self.parking for node in own)

    @property
    def account_paths(self) -> dict[str, str]:
        """The paths of the user's accounts by their names, the usual one first."""
        return {account_names(path)[-1]: path for path in self.accounts}

    @property
    def max_priority(self) -> int:
        """The highest priority that this user may ask for; 0 is none."""
        return self.caps.max_priority or 0

    @property
    def simulated(self) -> bool:
        return any(d.simulated for n in self.nodes for d in n.devices)

    def image(self, slug: object) -> Image | None:
        """Return the image of this slug, shown or not, or None."""
        return next((image for image in self.images if image.slug == slug), None)

    def shows(self, slug: object) -> bool:
        """Return whether the image of this slug is one that the user is shown."""
        return any(image.slug == slug for image in self.shown_images)

    def nodes_of(self, group: str) -> list[Node]:
        return [node for node in self.nodes if node.resource_group == group]

    def devices_of(self, group: str) -> list[Device]:
        """Return the GPUs of a resource group, in the order of its nodes."""
        return [device for node in self.nodes_of(group) for device in node.devices]

    def models(self, group: str) -> tuple[str, ...]:
        return tuple(dict.fromkeys(device.model for device in self.devices_of(group)))

    def amounts(self, group: str) -> tuple[int, ...]:
        """Return, ascending, each fGPU amount in milli that this user could ever hold in a resource group."""
        asker = replace(self.default, resource_group=group)
        limits = [
            q.max_fgpu_milli for q in self.quotas if q.max_fgpu_milli is not None and counted_names(q, asker)
        ]
        fit = amounts_that_fit(self.nodes_of(group), self.caps)
        return tuple(a for a in fit if not limits or a <= min(limits))

    def amounts_with(self, image: Image, group: str, amounts: Sequence[int] | None = None) -> LaunchRequest:
        """Return the preselected request for an image in a resource group; ``amounts`` are the group's, if known."""
        step_milli = self.caps.fgpu_step_milli
        fgpu = fgpu_for(image, self.default.fgpu_milli, self.devices_of(group), step_milli=step_milli)
        amounts = self.amounts(group) if amounts is None else amounts
        fgpu = next((a for a in amounts if a >= fgpu), amounts[-1] if amounts else fgpu)
        cpu, memory_mib = self.beside(fgpu, group, image)
        return replace(
            self.default,
            image=image.slug,
            resource_group=group,
            fgpu_milli=fgpu,
            cpu_milli=cpu,
            memory_mib=memory_mib,
        )

    def beside(self, fgpu_milli: int, group: str, image: Image | None = None) -> tuple[int, int]:
        """Return the default CPU in thousandths of a core and memory in MiB for an amount of the GPU.

        These are the image's recommendation, else the administrators' default, else the amount's part of a node's GPUs
        applied to its CPU and memory. The node with the least counts, so that the rest of its GPUs stay usable.
        """
        able = nodes_for(fgpu_milli, self.nodes_of(group))
        parts = [
            (node.cpu_milli * part // total, node.memory_mib * part // total)
            for node in able
            if (total := sum(device.capacity_milli for device in node.devices))
            for part in [min(fgpu_milli, total)]
        ]
        cpu = self.usual_cpu_milli or max(100, min((c for c, _ in parts), default=1000) // 100 * 100)
        memory_mib = self.usual_memory_mib or max(256, min((m for _, m in parts), default=1024) // 256 * 256)
        if image is not None:
            cpu, memory_mib = beside_for(image, cpu, memory_mib)
        inside = [(min(cpu, node.cpu_milli), min(memory_mib, node.memory_mib)) for node in able]
        cpu, memory_mib = max(inside, default=(cpu, memory_mib))
        return min(cpu, self.caps.max_cpu_milli or cpu), min(
            memory_mib, self.caps.max_memory_mib or memory_mib
        )

    def worth_milli(self, gpu_memory_mib: int, group: str) -> int:
        """Convert exact GPU memory to thousandths of an fGPU, on the largest GPU of a resource group."""
        largest = max(self.devices_of(group), key=lambda d: d.memory_mib, default=None)
        return 0 if largest is None else largest.capacity_milli * gpu_memory_mib // max(1, largest.memory_mib)

    def unmet(self, wanted: LaunchRequest) -> list[Refusal]:
        """Return a refusal for each need of the image that the request does not meet."""
        image = next(i for i in self.images if i.slug == wanted.image)
        own = f"{image.name} in {wanted.resource_group}", self.nodes_of(wanted.resource_group)
        for what, nodes in ((image.name, self.nodes), own):
            if (why := self.available.why_not(image.slug, nodes)) is not None:
                return [cannot_start(what, why)]
        return refusals(image, wanted, self.nodes, step_milli=self.caps.fgpu_step_milli)

    def others(self, wanted: LaunchRequest) -> Iterator[LaunchRequest]:
        """Yield the same request with each fGPU amount that its image allows, smallest first.

        CPU and memory follow the amount as in the form, unless the user chose other values.
        """
        image, amounts = self.image(wanted.image), self.amounts(wanted.resource_group)
        worth = wanted.fgpu_milli or self.worth_milli(wanted.gpu_memory_mib or 0, wanted.resource_group)
        # With exact GPU memory the form shows what goes with the amount below it.
        asked = {worth, max((a for a in amounts if a <= worth), default=min(amounts, default=worth))}
        usual = [self.beside(a, wanted.resource_group, image) for a in asked]
        plain = replace(wanted, gpu_memory_mib=None, compute_percent=None)
        for amount in amounts:
            cpu, memory_mib = self.beside(amount, wanted.resource_group, image)
            other = replace(
                plain,
                fgpu_milli=amount,
                cpu_milli=cpu if wanted.cpu_milli in (c for c, _ in usual) else wanted.cpu_milli,
                memory_mib=memory_mib if wanted.memory_mib in (m for _, m in usual) else wanted.memory_mib,
            )
            if not self.unmet(other):
                yield other


CANNOT_START = "image_cannot_start"


def cannot_start(what: str, why: str) -> Refusal:
    message = f"image: {what} can't start: {why}; choose another image, or ask an administrator"
    return Refusal("image", CANNOT_START, message)


def make_offer(
    settings: FGPU,
    nodes: Sequence[Node],
    images: Sequence[Image],
    groups: Sequence[str],
    *,
    user: str = "",
    hub_groups: Iterable[str] = (),
    lending: frozenset[str] = frozenset(),
    parking: frozenset[str] = frozenset(),
    available: Availabilities = NOTHING_KNOWN,
) -> Offer:
    """Return the choices and the preselected request of a user with these resource ``groups`` and ``images``.

    Raises:
        RequestRefused: the user may use no resource group, or no image.
    """
    if not groups:
        raise RequestRefused(
            [Refusal("group", "no_group", "group: you may use no resource group; ask an administrator")]
        )
    # Administrators see images that no node could ever hold in `fgpu images list` and on the images page.
    images = [i for i in images if never_held(i, nodes, settings.caps()) is None]
    own = [n for n in nodes if n.resource_group in groups]
    shown = [i for i in images if not i.hidden and i.is_accepted_by(user)]
    why_not = {i.slug: available.why_not(i.slug, own) for i in images}
    if None not in why_not.values():
        none = Refusal("image", "no_image", "image: you may use no image; ask an administrator")
        raise RequestRefused([cannot_start(i.name, why_not[i.slug] or "") for i in shown] or [none])
    hub_groups = tuple(hub_groups)
    accounts = settings.account_tree().paths_for(hub_groups)
    shown = [i for i in shown if why_not[i.slug] is None]
    shown.sort(key=lambda i: not i.default)
    of = {group: [n for n in own if n.resource_group == group] for group in groups}
    can = ((group, i) for group in groups for i in shown if available.why_not(i.slug, of[group]) is None)
    group, image = next(can, (groups[0], None))
    longest_s = settings.max_time_limit_s or None
    offer = Offer(
        tuple(images),
        tuple(groups),
        tuple(own),
        replace(
            settings.caps(),
            max_time_limit_s=longest_s or LONGEST_TIME_LIMIT_S,
            max_priority=settings.priority_of(hub_groups),
        ),
        LaunchRequest(
            user,
            "",
            image.slug if image else "",
            group,
            fgpu_milli=0,
            cpu_milli=0,
            memory_mib=0,
            time_limit_s=settings.default_time_limit_s or longest_s,
            groups=tuple(sorted(hub_groups)),
            account=accounts[0] if accounts else "",
        ),
        longest_s,
        settings.quotas_given(),
        accounts,
        settings.milli("default_cpu") or 0,
        settings.default_memory_mib,
        lending,
        parking,
        settings.folders_for(user, hub_groups),
        available,
    )
    # Half a GPU, at least a step.
    amounts = offer.amounts(group) or (offer.caps.fgpu_step_milli,)
    smallest = min((d.capacity_milli for d in offer.devices_of(group)), default=amounts[0])
    fgpu = settings.milli("default_fgpu") or smallest // 2
    fgpu = max((a for a in amounts if a <= fgpu), default=amounts[0])
    cpu, memory_mib = offer.beside(fgpu, group)
    default = replace(offer.default, fgpu_milli=fgpu, cpu_milli=cpu, memory_mib=memory_mib)
    offer = replace(offer, default=default)
    return offer if image is None else replace(offer, default=offer.amounts_with(image, group))
