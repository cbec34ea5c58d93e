"""Who goes first, what ends running sessions, and what users and Hub groups may hold.

They are read and checked here, and become the scheduler's plain values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from traitlets import Dict, Integer, List

from fgpu_scheduler import (
    LARGEST_MILLI,
    MIN_TIME_LIMIT_S,
    Account,
    Accounts,
    AllRules,
    BadAmount,
    BadSettings,
    GroupPolicy,
    Policy,
    Quota,
    QuotaScope,
    Rules,
    format_milli,
    group_policy,
    parse_milli,
    quota_words,
)
from fgpuspawner.settings.service import TimeoutSettings
from fgpuspawner.settings.traits import LARGEST_MIB, Whole, check_keys, is_whole
from fgpuspawner.text.fields import LONGEST_TIME_LIMIT_S

ANYBODY = "*"
"""Stands for any user, Hub group or resource group."""
HIGHEST_PRIORITY = 1000
ACCOUNT_NAME = r"[A-Za-z0-9._-]{1,64}"
KEEP_S = 1800

Known = Mapping[str, int | type]
"""The keys of a dict, each with its type, or with the least number of seconds that it can be."""
ACCOUNT = ("weight", "parent", "groups")
LEAST_WEIGHT, MOST_WEIGHT = 0.01, 1000
POLICY: Known = {"order": str, "longest_wait_s": 1, "half_life_s": 1}
GONE_POLICY = ("placement", "backfill", "promises")
RECLAIM_TIMES = {"max_lifetime_s": 10, "idle_after_s": 10, "min_runtime_s": 1, "grace_s": 1, "keep_s": 10}
PARK_TIMES = {"park_after_s": 10, "parked_for_s": 60}
RECLAIM: Known = {
    **RECLAIM_TIMES,
    "preempt": bool,
    "requeue": bool,
    "park": str,
    **PARK_TIMES,
    "park_opt_out": bool,
}
NEVER, WHEN_NEEDED, ALWAYS = PARK = ("never", "when needed", "always")
PARK_AFTER_S = 600
REMEDIES = {str: "use one of the words for it", bool: "use True or False"}
QUOTA_AMOUNTS = ("max_fgpu", "max_sessions", "max_pending", "max_lifetime_s", "guaranteed_fgpu")
FGPU_AMOUNTS = {"max_fgpu": "max_fgpu_milli", "guaranteed_fgpu": "guaranteed_milli"}
WHOLE = ("max_sessions", "max_pending", "max_lifetime_s")
QUOTA_SCOPES = {"user": QuotaScope.USER, "hub_group": QuotaScope.GROUP, "account": QuotaScope.ACCOUNT}
QUOTA_KEYS = (*QUOTA_SCOPES, "resource_group", *QUOTA_AMOUNTS)


class QueueSettings(TimeoutSettings):
    """Policies, quotas, priorities, and what ends running sessions."""

    policies = Dict().tag(example='{"*": {"order": "fair-share"}, "class": {"order": "fifo"}}')
    """Order of each resource group's queue; "*" stands for the other groups.

    Each value is a dict with any of these keys; docs/administrator.md explains the words.

    - ``order``: "default", "fair-share", "drf", "fifo", "fifo-skip" or "lifo"
    - ``longest_wait_s``: after an n-th of this wait a request for n GPUs goes to the front of its priority, and a place
      is kept for it; default: a quarter of ``queue_timeout_s``, at most half of it. Not with "fifo"
    - ``half_life_s``: time in which past use loses half its weight (7 days). With "default" and "fair-share"
    """
    accounts = Dict().tag(
        example='{"science": {"weight": 2}, "physics": {"parent": "science", "groups": ["physics"]}}'
    )
    """Groups of users that share what there is by weight, as one tree; orders that count use compare accounts first.

    Each value is a dict with any of these keys:

    - ``weight``: share beside the accounts with the same parent (1)
    - ``parent``: account above it
    - ``groups``: Hub groups whose members may use it; one in several gets the first, or chooses (``account``)

    Users in none share the account "default", which may be given a weight and a parent, too.
    """
    quotas = List(Dict())
    """Limits for a user, a Hub group or an account: fGPU, sessions, waiting requests, and how long sessions last.

    Each is a dict with ``user`` (a name, or "*" for each user), ``hub_group`` (its members together) or ``account``
    (with the accounts below it), and any of ``max_fgpu`` and ``max_sessions`` (running at a time: more wait),
    ``max_pending`` (waiting at a time: more are refused) and ``max_lifetime_s``. ``guaranteed_fgpu`` is for an account:
    requests within it go first, and others borrow what is left of it. With ``resource_group`` a quota counts in that one
    only. The strictest applies.
    Changes on the page *Quotas* override this list, which is read at each start of the Hub.

    Example::

        c.FGPU.quotas = [
            {"user": "*", "max_fgpu": 2, "max_sessions": 4, "max_pending": 8},
            {"hub_group": "ml101", "resource_group": "class", "max_fgpu": 6, "max_lifetime_s": 7200},
            {"account": "physics", "guaranteed_fgpu": 8, "max_fgpu": 16},
        ]
    """
    max_priority = Dict().tag(example='{"staff": 10, "*": 1}')
    """Highest priority that members of a Hub group may ask for, 1 to 1000; "*" stands for all users. Default: 0."""
    reclaim = Dict().tag(
        example='{"*": {"idle_after_s": 3600}, "class": {"max_lifetime_s": 7200, "grace_s": 300}}'
    )
    """Rules that end running sessions of a resource group, after a warning; "*" stands for the other groups.

    Each value is a dict with any of these keys. A rule that is left out is off; defaults are in brackets.

    - ``max_lifetime_s``: a session ends after this time
    - ``idle_after_s``: its owner is warned after this time without input, and with idle kernels, terminals and GPU
    - ``preempt``: True: a request of higher priority ends sessions of lower priority, and one within its account's
      guarantee ends sessions of accounts that borrow
    - ``min_runtime_s``: least time that a session runs before it is pre-empted
    - ``requeue``: whether a pre-empted session waits again, at its old queue position (True)
    - ``grace_s``: time from the warning to the end (600)
    - ``keep_s``: how much time *Keep running* gives an idle session (1800)
    - ``park``: "when needed" parks a session with an idle GPU while another one waits, "always" at once ("never"): its
      GPU memory goes to the machine's memory and its GPU to others, and its variables stay; it is not ended by
      ``idle_after_s`` then. See ``parked_memory_mib``
    - ``park_after_s``: how long its GPU is idle before it is parked (600)
    - ``park_opt_out``: True: owners may choose that a session of theirs is never parked
    - ``parked_for_s``: a session that stays parked for this long is ended, after a warning
    """
    parked_memory_mib = Whole(0, max=LARGEST_MIB).tag(example="65536")
    """Memory of each machine, in MiB, that may hold the GPU memory of parked sessions; 0: no session is parked."""
    extend_by_s = Whole(0, min=MIN_TIME_LIMIT_S, max=LONGEST_TIME_LIMIT_S).tag(example="3600")
    """Seconds that owners may add to the time limit of a running session, each time they ask; 0: they may not.

    Only up to the longest time that limits, quotas and ``reclaim`` allow, and only if that delays no promised start.
    """
    extend_times = Integer(1, min=1, max=100).tag(example="2")
    """How often the owner of a session may extend its time limit."""

    def policy(self) -> Policy:
        """Return how each resource group's queue is ordered."""
        own: dict[str, GroupPolicy] = {}
        half_s = max(1, self.queue_timeout_s // 2)
        for group, words in {ANYBODY: {}, **self.policies}.items():
            where = f"c.FGPU.policies[{group!r}]"
            for key in GONE_POLICY:
                if isinstance(words, dict) and key in words:
                    raise BadSettings(f"{where}[{key!r}] is gone; leave it out")
            _check_values(where, words, POLICY)
            if words.get("longest_wait_s", 0) > half_s:
                raise BadSettings(
                    f"{where}['longest_wait_s'] is {words['longest_wait_s']}, above half of c.FGPU.queue_timeout_s of "
                    f"{self.queue_timeout_s}; make it at most {half_s}"
                )
            try:
                own[group] = group_policy(usual_wait_s=max(1, half_s // 2), **words)
            except BadSettings as e:
                raise BadSettings(f"{where}: {e}") from None
        default, rules = own.pop(ANYBODY), self.rules()

        def limited(policy: GroupPolicy, group: str) -> GroupPolicy:
            return replace(policy, max_lifetime_s=rules.of(group).max_lifetime_s)

        groups = {group: limited(own.get(group, default), group) for group in {**own, **rules.groups}}
        return Policy(limited(default, ANYBODY), groups, self.account_tree())

    def account_tree(self) -> Accounts:
        """Return the accounts, which share by weight."""
        found: dict[str, Account] = {}
        for name, words in self.accounts.items():
            where = f"c.FGPU.accounts[{name!r}]"
            if not isinstance(name, str) or not re.fullmatch(ACCOUNT_NAME, name):
                raise BadSettings(f"{where}: use letters, digits, '.', '_' and '-' for a name, at most 64")
            if not isinstance(words, dict):
                raise BadSettings(f"{where} must be a dict, got {words!r}")
            check_keys(where, words, ACCOUNT)
            weight, groups = words.get("weight", 1), words.get("groups", [])
            number = isinstance(weight, int | float) and not isinstance(weight, bool)
            if not number or not LEAST_WEIGHT <= weight <= MOST_WEIGHT:
                limits = f"a number from {LEAST_WEIGHT} to {MOST_WEIGHT}"
                raise BadSettings(f"{where}['weight'] is {weight!r}; use {limits}")
            if not isinstance(groups, list | tuple) or not all(isinstance(g, str) and g for g in groups):
                raise BadSettings(f"{where}['groups'] is {groups!r}; use a list of names of Hub groups")
            found[name] = Account(weight, words.get("parent"), tuple(groups))
        for name in found:
            above = [name]
            while (parent := found[above[-1]].parent) is not None:
                where = f"c.FGPU.accounts[{above[-1]!r}]['parent'] is {parent!r}"
                if parent not in found:
                    raise BadSettings(f"{where}, which is no account; use one of {', '.join(found)}")
                if parent in above:
                    raise BadSettings(f"{where}, which is below it; leave one of the parents out")
                above.append(parent)
        return Accounts(found)

    def half_life_s(self, resource_group: str) -> int:
        """Return the half-life of past use in this resource group, in seconds."""
        return self.policy().of(resource_group).half_life_s

    def rules(self) -> AllRules:
        """Return what ends the running sessions of each resource group."""
        own: dict[str, Rules] = {}
        for group, words in self.reclaim.items():
            _check_values(f"c.FGPU.reclaim[{group!r}]", words, RECLAIM, besides=", or leave it out")
            given = {key: value for key, value in words.items() if key not in ("keep_s", "park")}
            own[group] = Rules(**given, **self._parking(group, words))
        return AllRules(own.pop(ANYBODY, Rules()), own)

    def _parking(self, group: str, words: Mapping[str, Any]) -> dict[str, Any]:
        where, park = f"c.FGPU.reclaim[{group!r}]", words.get("park", NEVER)
        if park not in PARK:
            raise BadSettings(f"{where}['park'] is {park!r}; use {', '.join(map(repr, PARK))}")
        if park == NEVER:
            for key in (*PARK_TIMES, "park_opt_out"):
                if key in words:
                    raise BadSettings(f"{where}[{key!r}] needs 'park' there: {WHEN_NEEDED!r} or {ALWAYS!r}")
            return {}
        if not self.parked_memory_mib:
            raise BadSettings(
                f"{where}['park'] is {park!r}, and c.FGPU.parked_memory_mib is 0; set it to the memory of each machine, "
                "in MiB, that may hold the GPU memory of parked sessions"
            )
        after_s = {} if "park_after_s" in words else {"park_after_s": PARK_AFTER_S}
        return {**after_s, "park_always": park == ALWAYS}

    def keep_s(self, resource_group: str) -> int:
        """Return for how long "keep" puts off the end of an idle session of this resource group."""
        words = self.reclaim.get(resource_group, self.reclaim.get(ANYBODY, {}))
        return int(words.get("keep_s", KEEP_S))

    def quotas_given(self) -> tuple[Quota, ...]:
        """Return the quotas, for the scheduler's database."""
        return tuple(quota_of(spec, f"c.FGPU.quotas: {dict(spec)!r}") for spec in self.quotas)

    def check_account(self, quota: Quota, where: str) -> None:
        """Refuse a quota of an account that there is not; ``where`` begins the words of the error."""
        known = sorted({"default", ANYBODY, *self.accounts}) if self.accounts else []
        if quota.scope is QuotaScope.ACCOUNT and quota.name not in known:
            there = f"use one of {', '.join(known)}" if known else "set c.FGPU.accounts"
            raise BadQuota(f"{where}: there is no account {quota.name[:40]!r}; {there}", "account")

    def priority_of(self, hub_groups: Iterable[str]) -> int:
        """Return the highest priority that a member of these Hub groups may ask for."""
        return max(int(self.max_priority.get(name, 0)) for name in (ANYBODY, *hub_groups))

    def _check_queue(self, resource_groups: Collection[str]) -> None:
        quotas = self.quotas_given()
        named = [("policies", g) for g in self.policies] + [("reclaim", g) for g in self.reclaim]
        named += [("quotas", quota.resource_group) for quota in quotas if quota.resource_group is not None]
        for name, group in named:
            if group not in resource_groups and (group != ANYBODY or name == "quotas"):
                there = ", ".join(map(repr, resource_groups))
                raise BadSettings(f"c.FGPU.{name}: there is no resource group {group!r}; there are {there}")
        self.policy()
        self.rules()
        for quota in quotas:
            self.check_account(quota, "c.FGPU.quotas")
        whose = [(quota.scope, quota.name, quota.resource_group) for quota in quotas]
        for n, quota in enumerate(quotas):
            if whose[n] in whose[:n]:
                raise BadSettings(f"c.FGPU.quotas has two for {quota_words(quota)}; write them as one")
        for group, highest in self.max_priority.items():
            if not isinstance(group, str) or not is_whole(highest, 0, HIGHEST_PRIORITY):
                raise BadSettings(
                    f"c.FGPU.max_priority[{group!r}] is {highest!r}; use the name of a Hub group, or {ANYBODY!r}, and a "
                    f"whole number from 0 to {HIGHEST_PRIORITY}"
                )


def _check_values(where: str, given: Mapping[Any, object], known: Known, *, besides: str = "") -> None:
    if not isinstance(given, dict):
        raise BadSettings(f"{where} must be a dict, got {given!r}")
    check_keys(where, given, known)
    for key, value in given.items():
        kind = known[key]
        if isinstance(kind, int):
            good, remedy = is_whole(value, kind, LONGEST_TIME_LIMIT_S), f"use seconds, from {kind} to "
            remedy += f"{LONGEST_TIME_LIMIT_S}{besides}"
        else:
            good, remedy = isinstance(value, kind), REMEDIES[kind]
        if not good:
            raise BadSettings(f"{where}[{key!r}] is {value!r}; {remedy}")


class BadQuota(BadSettings):
    """A quota that cannot be used; ``field`` is the one that is wrong, or "" where several are."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def quota_of(
    spec: Mapping[Any, Any],
    where: str,
    *,
    resource_groups: Sequence[str] | None = None,
    key_only: bool = False,
) -> Quota:
    """Return the quota that a dict of ``c.FGPU.quotas`` means, or one of the API; ``where`` begins the words of errors.

    ``key_only``: it need not limit anything.
    """
    check_keys(where, spec, QUOTA_KEYS)
    scopes = [key for key in QUOTA_SCOPES if key in spec]
    if len(scopes) > 1:
        raise BadQuota(f"{where} has {scopes[0]} and {scopes[1]}; write two quotas")
    whom = [key for key in (*QUOTA_SCOPES, "resource_group") if key in spec]
    for key in whom:
        if not isinstance(spec[key], str) or not spec[key]:
            raise BadQuota(f"{where}: {key} must be a name", key)
    if not whom:
        raise BadQuota(f"{where} says not for whom; add user, hub_group, account or resource_group")
    if not key_only and spec.keys().isdisjoint(QUOTA_AMOUNTS):
        raise BadQuota(f"{where} limits nothing; add one of {', '.join(QUOTA_AMOUNTS)}")
    for key, least in zip(WHOLE, (0, 0, MIN_TIME_LIMIT_S), strict=True):
        if key in spec and not is_whole(spec[key], least, LONGEST_TIME_LIMIT_S):
            limits = f"from {least} to {LONGEST_TIME_LIMIT_S}"
            raise BadQuota(f"{where}: {key} must be a whole number {limits}", key)
    milli: dict[str, int] = {}
    for key, field in FGPU_AMOUNTS.items():
        if key in spec:
            try:
                milli[field] = parse_milli(str(spec[key]), field=key)
            except BadAmount as e:
                raise BadQuota(f"{where}: {e}", key) from None
            if milli[field] > LARGEST_MILLI:
                raise BadQuota(f"{where}: {key} must be from 0 to {format_milli(LARGEST_MILLI)}", key)
    if "guaranteed_fgpu" in spec and "account" not in spec:
        raise BadQuota(
            f"{where}: guaranteed_fgpu is for an account; add account, or use max_fgpu", "guaranteed_fgpu"
        )
    if milli.get("guaranteed_milli", 0) > milli.get("max_fgpu_milli", LARGEST_MILLI):
        raise BadQuota(
            f"{where}: guaranteed_fgpu is above max_fgpu; make it at most {spec['max_fgpu']}",
            "guaranteed_fgpu",
        )
    group = spec.get("resource_group")
    if group is not None and resource_groups is not None and group not in resource_groups:
        there = ", ".join(resource_groups)
        raise BadQuota(
            f"{where}: there is no resource group {group[:40]!r}; there are {there}", "resource_group"
        )
    return Quota(
        QUOTA_SCOPES[scopes[0]] if scopes else QuotaScope.ALL,
        spec[scopes[0]] if scopes else ANYBODY,
        group,
        **milli,
        **{key: spec.get(key) for key in WHOLE},
    )


def numbers_in(texts: Mapping[str, str]) -> dict[str, Any]:
    """Return the cells of a file, or the fields of a form, as `quota_of` reads them; empty ones are left out."""
    return {
        key: int(text) if key in WHOLE and re.fullmatch(r"[0-9]{1,15}", text) else text
        for key, text in texts.items()
        if text
    }
