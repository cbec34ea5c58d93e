"""Addresses of Docker daemons: this machine's own, and those of other machines in ``c.FGPU.nodes``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from fgpu_scheduler import BadSettings
from fgpuspawner.settings.nodes import address_of, are_found_by_driver


@dataclass(frozen=True, slots=True)
class Address:
    """Address of a daemon, and the nodes on its machine.

    ``url`` is empty for this machine's own. ``tls`` has the paths ``ca``, ``cert`` and ``key``. ``host`` is where the
    Hub reaches published ports; None where it reaches the containers directly.
    """

    url: str
    node_ids: tuple[str, ...]
    tls: Mapping[str, str] = field(default_factory=dict)
    host: str | None = None
    has_gpus_to_find: bool = False

    def __str__(self) -> str:
        return f"the Docker engine of {' and '.join(self.node_ids) or 'this machine'}"

    @property
    def is_elsewhere(self) -> bool:
        return self.host is not None


def addresses(nodes: Sequence[Mapping[str, Any]]) -> tuple[Address, ...]:
    """Return the daemons of the configured nodes, this machine's own first.

    Raises:
        BadSettings: two nodes describe one daemon differently.
    """
    found: dict[str, Address] = {"": Address("", ())}
    for spec in nodes or [{"name": "local"}]:
        url = str(spec.get("engine", ""))
        to_find = bool(url) and are_found_by_driver(spec)
        own = Address(url, (str(spec["name"]),), dict(spec.get("tls") or {}), address_of(spec), to_find)
        other = found.get(url)
        if other is None or not other.node_ids:
            found[url] = own
        elif (other.tls, other.host) != (own.tls, own.host):
            raise BadSettings(
                f"c.FGPU.nodes: {other.node_ids[0]!r} and {own.node_ids[0]!r} are on one engine; give both the same "
                "tls and address"
            )
        else:
            found[url] = replace(
                own,
                node_ids=(*other.node_ids, *own.node_ids),
                has_gpus_to_find=to_find or other.has_gpus_to_find,
            )
    return tuple(address for address in found.values() if address.node_ids)
