"""What is expected of the queues of one store, as another process than the scheduler's works it out."""

from __future__ import annotations

from collections.abc import Mapping

from fgpu_scheduler.core.admission import Caps
from fgpu_scheduler.core.forecast import RequestForecast, forecast_request, largest_now_milli
from fgpu_scheduler.core.groups import of_group
from fgpu_scheduler.core.model import Request, Snapshot
from fgpu_scheduler.core.outlook import Outlook, outlook, resource_groups
from fgpu_scheduler.core.policies import Policy
from fgpu_scheduler.core.unblocking import Unblocking, unblocking
from fgpu_scheduler.store.store import Store


class StoreReader:
    """Forecasts by the policy that the store's scheduler has. Blocks, raises StoreUnavailable; for several threads."""

    def __init__(self, store: Store, policy: Policy, caps: Caps) -> None:
        self._store = store
        self._policy = policy
        self._caps = caps
        self._typical: tuple[int, dict[str, int | None]] = -1, {}

    def outlook(self, now_s: int) -> Outlook:
        """Return the store's snapshot, with the forecast of every waiting session."""
        return outlook(self._store.snapshot(now_s), self._policy, self._store.typical_length_s)

    def forecast(self, request: Request, count: int, snapshot: Snapshot) -> RequestForecast:
        """Return what would become of so many sessions if they were submitted now."""
        group = request.resource_group
        return forecast_request(
            request,
            count,
            of_group(snapshot, group),
            self._policy,
            self._caps,
            typical_length_s=self._typical_lengths_s(snapshot).get(group),
        )

    def _typical_lengths_s(self, snapshot: Snapshot) -> Mapping[str, int | None]:
        """Read them once a version: a form asks for a forecast at every move of a slider."""
        version, typical = self._typical
        if version != snapshot.version:
            typical = {group: self._store.typical_length_s(group) for group in resource_groups(snapshot)}
            self._typical = snapshot.version, typical
        return typical

    def largest_now_milli(self, request: Request, snapshot: Snapshot) -> int | None:
        """Return the largest amount with which this would start at once, or None."""
        return largest_now_milli(
            request, of_group(snapshot, request.resource_group), self._policy, self._caps
        )

    def unblockings(self, snapshot: Snapshot) -> Mapping[str, Unblocking]:
        """Return, by resource group, what would start the head of its queue, where somebody is blocked."""
        found = {g: unblocking(of_group(snapshot, g), self._policy) for g in resource_groups(snapshot)}
        return {group: one for group, one in found.items() if one is not None}
