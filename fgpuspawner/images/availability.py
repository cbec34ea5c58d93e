"""Whether images can start, node by node, as the engine said last. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from fgpu_scheduler import Node
from fgpuspawner.isolation.files import HubFile

FRESH_S = 60
"""An older answer says nothing of now."""


class Where(StrEnum):
    """Where an image is, in words. Users may choose it unless it can't start."""

    HERE = "here"
    COMING = "on its way"
    FETCHABLE = "can be fetched"
    CANNOT = "can't start"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Availability:
    """Where an image is for one node. ``words`` say how far it is, or why it can't start or is not known."""

    where: Where = Where.UNKNOWN
    words: str = ""


@dataclass(frozen=True, slots=True)
class Availabilities:
    """The engine's answer at an instant, by slug and node."""

    at_s: float = 0
    images: Mapping[str, Mapping[str, Availability]] = field(default_factory=dict)

    @property
    def moving(self) -> bool:
        """Whether an image is on its way to a node."""
        return any(one.where is Where.COMING for at in self.images.values() for one in at.values())

    def fresh(self, now_s: float) -> Availabilities:
        """Return the answer, an empty one once it is old."""
        return self if abs(now_s - self.at_s) <= FRESH_S else NOTHING_KNOWN

    def at(self, slug: str, node_id: str) -> Availability:
        """Return where an image is for a node."""
        return self.images.get(slug, {}).get(node_id, Availability())

    def why_not(self, slug: str, nodes: Sequence[Node]) -> str | None:
        """Return why an image can start on none of these nodes; None where it may start on one."""
        words = None
        for node in nodes:
            one = self.at(slug, node.id)
            if one.where is not Where.CANNOT:
                return None
            words = words or one.words
        return words


NOTHING_KNOWN = Availabilities()


AVAILABLE = HubFile("images.json", Availabilities)
WANTED: HubFile[dict[str, int]] = HubFile("images_wanted.json", dict)
"""Written by the service for the Hub: when an administrator last asked to pull an image, by slug."""
