"""Quotas for administrators: which are in force, from where, their use, and changes over the file's."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fgpu_scheduler import (
    MIN_TIME_LIMIT_S,
    MOST_EDITS,
    BadSettings,
    ListedQuota,
    Quota,
    QuotaEdit,
    QuotaEdits,
    QuotaScope,
    QuotaSource,
    QuotaUsage,
    duration,
    format_milli,
    in_force,
    limits_words,
    listed_quotas,
    quota_words,
    usage_of_quotas,
)
from fgpuspawner import scopes
from fgpuspawner.service.admin import objects
from fgpuspawner.service.admin.base import AdminApi, AdminFormPage
from fgpuspawner.service.admin.objects import OneQuota, Quotas
from fgpuspawner.service.handler import Handler
from fgpuspawner.service.model import Viewer, World
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.settings.queue import (
    FGPU_AMOUNTS,
    QUOTA_AMOUNTS,
    QUOTA_KEYS,
    QUOTA_SCOPES,
    numbers_in,
    quota_of,
)
from fgpuspawner.text.fields import LONGEST_TIME_LIMIT_S
from fgpuspawner.text.times import clock, seconds_of

MOST_HELD = 100
"""Most holders shown of a quota, the largest first."""

SOURCE_WORDS = {
    QuotaSource.FILE: "from the file",
    QuotaSource.EDITED: "from the file, changed",
    QuotaSource.ADDED: "not in the file",
    QuotaSource.REMOVED: "in the file, removed",
}


def quotas_object(file: Sequence[Quota], edits: Sequence[QuotaEdit], world: World) -> objects.Quotas:
    """Return every quota, in force or removed. For administrators only."""
    found = listed_quotas(file, edits)
    counts = usage_of_quotas([one.quota for one in found], world.snapshot)
    quotas = [_quota(one, own) for one, own in zip(found, counts, strict=True)]
    return objects.Quotas.of(world, quotas=quotas, simulated=world.simulated())


def spec_of(quota: Quota) -> dict[str, Any]:
    """Return this quota as a dict of ``c.FGPU.quotas``, without what is not limited."""
    given = {name: value for name, value in amounts_of(quota).items() if value is not None}
    amounts = {name: format_milli(value) if name in FGPU_AMOUNTS else value for name, value in given.items()}
    return {**key_of(quota), **amounts}


def amounts_of(quota: Quota) -> dict[str, int | None]:
    """Return a quota's limits by their names in ``c.FGPU.quotas``; fGPU in thousandths."""
    return {name: getattr(quota, FGPU_AMOUNTS.get(name, name)) for name in QUOTA_AMOUNTS}


def key_of(quota: Quota) -> dict[str, str]:
    """Return the user or group of a quota, as in ``c.FGPU.quotas``."""
    who = next((key for key, scope in QUOTA_SCOPES.items() if scope is quota.scope), None)
    found = {who: quota.name} if who else {}
    if quota.resource_group is not None or not who:
        found["resource_group"] = quota.resource_group or ""
    return {name: value for name, value in found.items() if value}


def why_not_group_admin(quota: Quota, viewer: Viewer, others: Iterable[Quota]) -> tuple[str, str] | None:
    """Return why an administrator of some resource groups must not write a quota, with the field; None if they may.

    They set limits of a member, or of each, in a group, up to the limits that ``others``, the quotas in force, set for
    the group as a whole.
    """
    group = quota.resource_group
    if group is None or group not in viewer.administers:
        return "resource_group", f"must be one that you administer: {' or '.join(viewer.administers)}"
    if quota.scope in (QuotaScope.GROUP, QuotaScope.ACCOUNT):
        field = "hub_group" if quota.scope is QuotaScope.GROUP else "account"
        return field, "set it for a user, or for each user (*); for a whole group you must not"
    if quota.scope is QuotaScope.ALL:
        return "user", "name a user, or each user (*); for everybody together you must not set it"
    if quota.name == viewer.user:
        return "user", "you can't set your own quota; ask an administrator"
    of_group = [q for q in others if q.resource_group == group and q.scope is not QuotaScope.USER]
    for name, asked in amounts_of(quota).items():
        of_all = [amounts_of(q)[name] for q in of_group if q.scope is QuotaScope.ALL]
        of_some = [amounts_of(q)[name] for q in of_group if q.scope is QuotaScope.GROUP]
        limits = [most for most in of_all if most is not None]
        most = min(limits, default=None)
        if most is None and of_some and None not in of_some:
            # The quota may be of a group of the Hub, and its members' resource groups are not known here.
            most = max(most for most in of_some if most is not None)
        if asked is not None and most is not None and asked > most:
            told = {"max_fgpu": format_milli, "max_lifetime_s": duration}.get(name, str)(most)
            return name, f"at most {told}, the quota of resource group {group!r}"
    return None


def _quota(one: ListedQuota, counted: Sequence[QuotaUsage]) -> objects.Quota:
    quota, edit = one.quota, one.edit
    in_force = one.source is not QuotaSource.REMOVED
    held = counted if in_force else ()
    return objects.Quota.of(
        for_=key_of(quota),
        name=quota_words(quota),
        limits={key: value for key, value in spec_of(quota).items() if key in QUOTA_AMOUNTS},
        text=limits_words(quota),
        source=one.source,
        source_text=SOURCE_WORDS[one.source],
        file=limits_words(one.file) if one.file is not None else None,
        changed_by=edit.changed_by if edit else None,
        changed_at_s=edit.changed_at_s if edit else None,
        in_force=in_force,
        held=[
            objects.QuotaHolder.of(who, full=_is_full(quota, who.fgpu_milli, who.sessions))
            for who in held[:MOST_HELD]
        ],
        held_by=len(held),
    )


def _is_full(quota: Quota, fgpu_milli: int, sessions: int) -> bool:
    over = quota.max_fgpu_milli is not None and fgpu_milli >= quota.max_fgpu_milli
    return over or (quota.max_sessions is not None and sessions >= quota.max_sessions)


SHOWN = 200
"""Quotas on one page: there may be one for each user."""
FOR = (*QUOTA_SCOPES, "resource_group")
WORDS = {
    "max_fgpu": "fGPU at a time",
    "max_sessions": "Sessions at a time",
    "max_pending": "Waiting requests",
    "max_lifetime_s": "Longest run (hours:minutes)",
    "guaranteed_fgpu": "fGPU guaranteed to an account",
}
ACTIONS = ("set", "remove", "back")


async def quotas(handler: Handler) -> Quotas:
    """Return every quota that the caller administers."""
    viewer = handler.viewer
    edits = await handler.service.reader.read_store(lambda store: QuotaEdits(store).all())
    world = await handler.administered_world()
    file = handler.service.settings.quotas_given()
    if not viewer.admin:
        file = tuple(q for q in file if q.resource_group in viewer.administers)
        edits = tuple(edit for edit in edits if edit.quota.resource_group in viewer.administers)
    # In a thread, as there may be thousands of quotas.
    return await asyncio.to_thread(quotas_object, file, edits, world)


def read_quota(handler: Handler, given: Mapping[str, Any], *, key_only: bool = False) -> Quota:
    """Return the quota that was sent; ``key_only``: without its limits."""
    spec = {key: value for key, value in given.items() if value not in (None, "")}
    # A group's administrator learns of no other group.
    known = handler.service.settings.resource_groups() if handler.viewer.admin and not key_only else None
    try:
        quota = quota_of(spec, "quota", resource_groups=known, key_only=key_only)
        if not key_only:
            handler.service.settings.check_account(quota, "quota")
        return quota
    except BadSettings as e:
        raise Problem(400, "bad_argument", str(e), field=getattr(e, "field", "") or "user") from None


def read_key(handler: Handler, given: Mapping[str, Any]) -> Quota:
    return read_quota(handler, {key: given.get(key) for key in FOR}, key_only=True)


async def write(handler: Handler, action: str, quota: Quota) -> None:
    """Set a quota, remove it, or go back to the file's."""
    file = handler.service.settings.quotas_given()
    if not handler.viewer.admin:
        edits = await handler.service.reader.read_store(lambda store: QuotaEdits(store).all())
        why = why_not_group_admin(quota, handler.viewer, in_force(file, edits) if action == "set" else ())
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
        if who in QUOTA_SCOPES:
            given |= {**dict.fromkeys(QUOTA_SCOPES, ""), who: self.field("name")}
        return given


def _numbers(given: Mapping[str, str]) -> dict[str, Any]:
    """Return the form's fields as the API has them; an invalid number stays as it is, to be refused later."""
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
