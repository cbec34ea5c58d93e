"""Quotas for administrators: changes over the file's, in force with the scheduler's next plan."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fgpu_scheduler import (
    MIN_TIME_LIMIT_S,
    MOST_EDITS,
    BadSettings,
    Quota,
    QuotaEdits,
    in_force,
)
from fgpuspawner import scopes
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage
from fgpuspawner.service.admin.objects import OneQuota, Quotas
from fgpuspawner.service.admin.quotas_view import key_of, not_for_group, quotas_object
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.settings.queue import QUOTA_KEYS, numbers_in, quota_of
from fgpuspawner.text.fields import LONGEST_TIME_LIMIT_S
from fgpuspawner.text.times import clock, seconds_of

SHOWN = 200
"""Quotas on one page: there may be one for each user."""
FOR = ("user", "hub_group", "resource_group")
WORDS = {
    "max_fgpu": "fGPU at a time",
    "max_sessions": "Sessions at a time",
    "max_pending": "Waiting requests",
    "max_lifetime_s": "Longest run (hours:minutes)",
}
ACTIONS = ("set", "remove", "back")


async def quotas(handler: Handler) -> Quotas:
    """Return every quota that the caller administers."""
    viewer = handler.viewer
    edits = await handler.service.reader.read(lambda store: QuotaEdits(store).all())
    world = await handler.administered_world()
    file = handler.service.settings.quotas_given()
    if not viewer.admin:
        file = tuple(q for q in file if q.resource_group in viewer.administers)
        edits = tuple(edit for edit in edits if edit.quota.resource_group in viewer.administers)
    # In a thread, as there may be thousands of quotas.
    return await asyncio.to_thread(quotas_object, file, edits, world)


def read_quota(handler: Handler, given: Mapping[str, Any], *, key_only: bool = False) -> Quota:
    """Return the quota that was sent; ``key_only``: without its limits.

    Raises:
        Problem: it is invalid; the message says what would work.
    """
    spec = {key: value for key, value in given.items() if value not in (None, "")}
    # A group's administrator learns of no other group.
    known = handler.service.settings.resource_groups() if handler.viewer.admin and not key_only else None
    try:
        return quota_of(spec, "quota", resource_groups=known, key_only=key_only)
    except BadSettings as e:
        raise Problem(400, "bad_argument", str(e), field=getattr(e, "field", "") or "user") from None


def read_key(handler: Handler, given: Mapping[str, Any]) -> Quota:
    return read_quota(handler, {key: given.get(key) for key in FOR}, key_only=True)


async def write(handler: Handler, action: str, quota: Quota) -> None:
    """Set a quota, remove it, or go back to the file's.

    Raises:
        Problem: there is no such quota, there is no change to discard, or a group's administrator may not change it.
    """
    file = handler.service.settings.quotas_given()
    if not handler.viewer.admin:
        edits = await handler.service.reader.read(lambda store: QuotaEdits(store).all())
        why = not_for_group(quota, handler.viewer, in_force(file, edits) if action == "set" else ())
        if why is not None:
            field, message = why
            raise forbidden(f"{field}: {message} (scope {scopes.ADMIN})", field=field)
        # The number of changes is shared: each group's administrators get a part, so that the others and the Hub's keep
        # theirs.
        most = MOST_EDITS // (len(handler.service.settings.resource_groups()) + 1)
        changed = [key_of(e.quota) for e in edits if e.quota.resource_group == quota.resource_group]
        if action == "set" and len(changed) >= most and key_of(quota) not in changed:
            where = f"resource group {quota.resource_group!r}"
            message = f"{most} quotas of {where} were changed already; put some back to the file"
            raise Problem(409, "quota_refused", message)

    def done(edits: QuotaEdits, by: str, now_s: int) -> None:
        own = {"set": edits.put, "remove": edits.remove, "back": edits.back_to_file}[action]
        own(quota, file=file, by=by, now_s=now_s)

    try:
        await handler.change(lambda store, by, now_s: done(QuotaEdits(store), by, now_s))
    except BadSettings as e:
        raise Problem(409, "quota_refused", str(e)) from None


class QuotasPage(AdminFormPage):
    """Every quota with its use, and a form for one."""

    address = "admin/quotas"
    for_groups = True

    async def show(self, trouble: Problem | None = None) -> None:
        start = self.number("start", default=0, least=0, most=10**6)
        found = (await quotas(self)).quotas
        self.render(
            "admin_quotas.html",
            quotas=found[start : start + SHOWN],
            start=start,
            count=len(found),
            following=start + SHOWN if len(found) > start + SHOWN else None,
            trouble=trouble,
            values=self._given() if trouble else self._linked(),
            words=WORDS,
            all_groups=self.viewer.administers,
        )

    async def submit(self) -> None:
        given, action = self._given(), self.field("action")
        if action not in ACTIONS:
            raise bad_argument("action", f"use one of {', '.join(ACTIONS)}")
        quota = read_quota(self, _numbers(given)) if action == "set" else read_key(self, given)
        await write(self, action, quota)
        self.back()

    def _linked(self) -> dict[str, str]:
        """Return the form's fields from a link; the longest run is in seconds, as in the API."""
        found = {key: self.get_query_argument(key, "") for key in QUOTA_KEYS}
        longest = found["max_lifetime_s"]
        if longest.isascii() and longest.isdigit() and len(longest) < 16:
            found["max_lifetime_s"] = clock(int(longest))
        return found

    def _given(self) -> dict[str, str]:
        given = {key: self.field(key) for key in QUOTA_KEYS}
        who = self.field("who")
        if who in ("user", "hub_group"):
            given |= {"user": "", "hub_group": "", who: self.field("name")}
        return given


def _numbers(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the form's fields as the API has them; an invalid number stays as it is, to be refused later.

    Raises:
        Problem: the longest run cannot be read.
    """
    longest = given["max_lifetime_s"].strip()
    found = numbers_in({key: text.strip() for key, text in given.items() if key != "max_lifetime_s"})
    if longest:
        longest_s = seconds_of(longest)
        if longest_s is None or not MIN_TIME_LIMIT_S <= longest_s <= LONGEST_TIME_LIMIT_S:
            most = clock(LONGEST_TIME_LIMIT_S)
            message = f"longest run: {longest[:40]!r} is not hours:minutes from 0:01 to {most}, such as 24:00"
            raise Problem(400, "bad_argument", message, field="max_lifetime_s")
        found["max_lifetime_s"] = longest_s
    return found


class QuotasApi(AdminApi):
    for_groups = True

    async def get(self) -> None:
        self.answer(await quotas(self))

    async def put(self) -> None:
        quota = read_quota(self, self.body(QUOTA_KEYS))
        await write(self, "set", quota)
        await self._answer(quota)

    async def delete(self) -> None:
        given = self.query((*FOR, "back"))
        quota = read_key(self, given)
        await write(self, "back" if self.flag("back") else "remove", quota)
        await self._answer(quota)

    async def _answer(self, quota: Quota) -> None:
        found = await quotas(self)
        own = next((one for one in found.quotas if one.for_ == key_of(quota)), None)
        self.answer(OneQuota.of(quota=own, simulated=found.simulated))
