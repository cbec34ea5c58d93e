"""What is expected of all queues: each resource group's is forecast by itself, here and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from fgpu_scheduler.core.forecast import Forecast, forecast
from fgpu_scheduler.core.groups import of_group
from fgpu_scheduler.core.hindsight import Experience
from fgpu_scheduler.core.model import Snapshot
from fgpu_scheduler.core.policies import Policy


@dataclass(frozen=True, slots=True)
class Outlook:
    """A snapshot with the forecast of every waiting session, by its id, in the order of the queues."""

    snapshot: Snapshot
    forecasts: Mapping[int, Forecast]


def outlook(snapshot: Snapshot, policy: Policy, experience: Callable[[str], Experience]) -> Outlook:
    """Return what is expected of every queue; ``experience`` is asked once of each resource group."""
    found: dict[int, Forecast] = {}
    for group in resource_groups(snapshot):
        told = forecast(of_group(snapshot, group), policy, experience(group))
        found |= {one.session_id: one for one in told}
    return Outlook(snapshot, found)


def resource_groups(snapshot: Snapshot) -> list[str]:
    """Return the resource groups that have nodes, by name."""
    return sorted({node.resource_group for node in snapshot.nodes})
