"""The administrator's settings of the queue: who goes first, what one may hold, and for how long.

They are read and checked here, and become the scheduler's plain values.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from traitlets import Dict, Integer, List
from traitlets.config import Configurable

from fgpu_scheduler import (
    BadAmount,
    BadSettings,
    GroupPolicy,
    Policy,
    Quota,
    QuotaScope,
    group_policy,
    parse_milli,
)
from fgpu_scheduler.core.caps import MIN_TIME_LIMIT_S
from fgpu_scheduler.core.quota import shown
from fgpu_scheduler.core.reclaim import AllRules, Rules
from fgpuspawner.fields import LONGEST_TIME_LIMIT_S

ANYBODY = "*"
"""In place of the name of a user, of a Hub group or of a resource group: any of them."""
HIGHEST_PRIORITY = 1000
POLICY_WORDS = ("order", "placement", "backfill")
POLICY_TIMES = ("longest_wait_s", "half_life_s")
RECLAIM_TIMES = {"max_lifetime_s": 10, "idle_after_s": 10, "grace_s": 1, "keep_s": 10}
"""Each with the least that it can be."""
RECLAIM_FLAGS = ("preempt", "requeue")
KEEP_S = 1800
QUOTA_AMOUNTS = ("max_fgpu", "max_sessions", "max_pending", "max_lifetime_s")
QUOTA_KEYS = ("user", "hub_group", "resource_group", *QUOTA_AMOUNTS)


class QueueSettings(Configurable):
    """What the administrator sets of the queue."""

    policies = Dict(
        help="""How each resource group's queue is ordered and where its sessions go; "*" is for the rest of them.

        Each value is a dict with any of these keys; docs/administrator.md says what the words do.

        - ``order``: "fifo", "fifo-skip", "lifo", "fair-share", "drf" or "default"
        - ``placement``: "first-fit", "best-fit", "spread", "fgd" or "default"
        - ``backfill``: "strict", "skip", "easy" or "bounded"; left out, what the order usually has
        - ``longest_wait_s``: who has waited for so long comes before all others of its priority, and is not overtaken
        - ``half_life_s``: in so long half of what somebody has used is forgotten, where the order goes by it

        Example: ``c.FGPU.policies = {"*": {"order": "fair-share"}, "class": {"order": "fifo"}}``
        """,
    ).tag(config=True)
    quotas = List(
        Dict(),
        help="""Limits on what users, and Hub groups together, hold, have waiting and how long their sessions last.

        Each is a dict with ``user`` (a name, or "*" for each one by themselves) or ``hub_group`` (all its members
        together), and any of ``max_fgpu``, ``max_sessions`` (what is held at a time: more waits), ``max_pending``
        (requests that wait: more are refused) and ``max_lifetime_s``. With ``resource_group`` only that one counts. Of
        several the strictest holds. The list replaces what the Hub wrote into its database when it last started; what
        administrators changed on the page *Quotas* lies over it.

        Example::

            c.FGPU.quotas = [
                {"user": "*", "max_fgpu": 2, "max_sessions": 4, "max_pending": 8},
                {"hub_group": "ml101", "resource_group": "class", "max_fgpu": 6, "max_lifetime_s": 7200},
            ]
        """,
    ).tag(config=True)
    default_time_limit_s = Integer(
        0,
        help="""How long a session may run if its request does not say, in seconds; 0: as long as sessions may.

        Example: ``c.FGPU.default_time_limit_s = 4 * 3600``
        """,
    ).tag(config=True)
    max_time_limit_s = Integer(
        0,
        help="""The longest time limit that a request may have, in seconds, and what one without gets; 0: none.

        Example: ``c.FGPU.max_time_limit_s = 24 * 3600``
        """,
    ).tag(config=True)
    max_priority = Dict(
        help="""The highest priority that members of a Hub group may ask for, 1 to 1000; "*": everybody. Else 0.

        Example: ``c.FGPU.max_priority = {"staff": 10, "*": 1}``
        """,
    ).tag(config=True)
    reclaim = Dict(
        help="""What ends running sessions of a resource group, each time after a warning; "*": the rest. Empty: nothing.

        Each value is a dict with any of these keys; what is left out is off, or has the value in brackets.

        - ``max_lifetime_s``: a session ends after so long
        - ``idle_after_s``: its owner is warned when both its GPU and its kernels have been idle for so long
        - ``preempt``: True lets a request of higher priority have sessions of lower priority ended
        - ``requeue``: whether a pre-empted session is asked for again, at its old place in the queue (True)
        - ``grace_s``: how long a warning stands before the session is ended (600)
        - ``keep_s``: for how long "keep" puts off the end of an idle session (1800)

        Example: ``c.FGPU.reclaim = {"*": {"idle_after_s": 3600}, "class": {"max_lifetime_s": 7200, "grace_s": 300}}``
        """,
    ).tag(config=True)

    # -- what the scheduler is given ------------------------------------------------------------------

    def policy(self) -> Policy:
        """Return how each resource group's queue is ordered and placed.

        Raises:
            BadSettings: a word is not known, or does not go with another.
        """
        own = {group: _group_policy(group, words) for group, words in self.policies.items()}
        default = own.pop(ANYBODY, None)
        return Policy(groups=own) if default is None else Policy(default, own)

    def half_life_s(self, resource_group: str) -> int:
        """Return in how many seconds half of what was used of this resource group is forgotten."""
        return self.policy().of(resource_group).half_life_s

    def rules(self) -> AllRules:
        """Return what ends the running sessions of each resource group.

        Raises:
            BadSettings: a key is not known, or its value cannot be.
        """
        own = {group: _rules(group, words) for group, words in self.reclaim.items()}
        return AllRules(own.pop(ANYBODY, Rules()), own)

    def keep_s(self, resource_group: str) -> int:
        """Return for how long "keep" puts off the end of an idle session of this resource group."""
        words = self.reclaim.get(resource_group, self.reclaim.get(ANYBODY, {}))
        return int(words.get("keep_s", KEEP_S))

    def quotas_given(self) -> tuple[Quota, ...]:
        """Return the quotas, for the scheduler's database.

        Raises:
            BadSettings: one of them cannot be read.
        """
        return tuple(quota_of(spec, f"c.FGPU.quotas: {dict(spec)!r}") for spec in self.quotas)

    def priority_of(self, hub_groups: Iterable[str]) -> int:
        """Return the highest priority that a member of these Hub groups may ask for."""
        found = [self.max_priority.get(name, 0) for name in (ANYBODY, *hub_groups)]
        return int(max(found))

    def _check_queue(self, resource_groups: Collection[str]) -> None:
        for name, given in (("policies", self.policies), ("reclaim", self.reclaim)):
            for group, words in given.items():
                _check_group(name, group, resource_groups)
                if not isinstance(words, dict):
                    raise BadSettings(f"c.FGPU.{name}[{group!r}] must be a dict, got {words!r}")
        self.policy()
        self.rules()
        self._check_quotas(resource_groups)
        self._check_time_limits()
        for group, highest in self.max_priority.items():
            if not isinstance(group, str) or not _is_whole(highest, 0, HIGHEST_PRIORITY):
                raise BadSettings(
                    f"c.FGPU.max_priority[{group!r}] is {highest!r}; use the name of a Hub group, or {ANYBODY!r}, and a "
                    f"whole number from 0 to {HIGHEST_PRIORITY}"
                )

    def _check_quotas(self, resource_groups: Collection[str]) -> None:
        seen: list[tuple[object, ...]] = []
        for quota in self.quotas_given():
            if quota.resource_group is not None:
                _check_group("quotas", quota.resource_group, resource_groups)
            who = quota.scope, quota.name, quota.resource_group
            if who in seen:
                raise BadSettings(f"c.FGPU.quotas has two for {shown(quota)}; write them as one")
            seen.append(who)

    def _check_time_limits(self) -> None:
        for name in ("default_time_limit_s", "max_time_limit_s"):
            value = getattr(self, name)
            if value and not MIN_TIME_LIMIT_S <= value <= LONGEST_TIME_LIMIT_S:
                raise BadSettings(
                    f"c.FGPU.{name} is {value}; it must be between {MIN_TIME_LIMIT_S} and "
                    f"{LONGEST_TIME_LIMIT_S} seconds, or 0 for none"
                )
        if 0 < self.max_time_limit_s < self.default_time_limit_s:
            raise BadSettings(
                f"c.FGPU.default_time_limit_s is {self.default_time_limit_s}, above c.FGPU.max_time_limit_s of "
                f"{self.max_time_limit_s}; make it at most that"
            )


def _check_group(setting: str, group: object, known: Collection[str]) -> None:
    if group not in known and (group != ANYBODY or setting == "quotas"):
        there = ", ".join(map(repr, known))
        raise BadSettings(f"c.FGPU.{setting}: there is no resource group {group!r}; there are {there}")


def _check_keys(where: str, given: Mapping[Any, object], known: Collection[str]) -> None:
    for key in given:
        if key not in known:
            raise BadSettings(f"{where} has an unknown key {key!r}; known are {', '.join(known)}")


def _is_whole(value: object, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _group_policy(group: str, words: Mapping[Any, Any]) -> GroupPolicy:
    where = f"c.FGPU.policies[{group!r}]"
    _check_keys(where, words, (*POLICY_WORDS, *POLICY_TIMES))
    for key in POLICY_WORDS:
        if not isinstance(words.get(key, ""), str):
            raise BadSettings(f"{where}[{key!r}] is {words[key]!r}; use one of the words for it")
    for key in POLICY_TIMES:
        if key in words and not _is_whole(words[key], 1, LONGEST_TIME_LIMIT_S):
            raise BadSettings(
                f"{where}[{key!r}] is {words[key]!r}; use seconds, from 1 to {LONGEST_TIME_LIMIT_S}"
            )
    try:
        return group_policy(**words)
    except BadSettings as e:
        raise BadSettings(f"{where}: {e}") from None


def _rules(group: str, words: Mapping[Any, Any]) -> Rules:
    where = f"c.FGPU.reclaim[{group!r}]"
    _check_keys(where, words, (*RECLAIM_TIMES, *RECLAIM_FLAGS))
    for key in RECLAIM_TIMES:
        least = RECLAIM_TIMES[key]
        if key in words and not _is_whole(words[key], least, LONGEST_TIME_LIMIT_S):
            raise BadSettings(
                f"{where}[{key!r}] is {words[key]!r}; use seconds, from {least} to {LONGEST_TIME_LIMIT_S}, or leave it "
                "out"
            )
    for key in RECLAIM_FLAGS:
        if not isinstance(words.get(key, False), bool):
            raise BadSettings(f"{where}[{key!r}] is {words[key]!r}; use True or False")
    return Rules(**{key: value for key, value in words.items() if key != "keep_s"})


def quota_of(spec: Mapping[Any, Any], where: str) -> Quota:
    """Return the quota that a dict of ``c.FGPU.quotas`` means, or one of the API; ``where`` begins the words of errors.

    Raises:
        BadSettings: it cannot be read.
    """
    _check_keys(where, spec, QUOTA_KEYS)
    if "user" in spec and "hub_group" in spec:
        raise BadSettings(f"{where} has a user and a hub_group; write two quotas")
    for key in ("user", "hub_group", "resource_group"):
        if key in spec and (not isinstance(spec[key], str) or not spec[key]):
            raise BadSettings(f"{where}: {key} must be a name")
    if not any(key in spec for key in ("user", "hub_group", "resource_group")):
        raise BadSettings(f"{where} says not for whom; add user, hub_group or resource_group")
    if not any(key in spec for key in QUOTA_AMOUNTS):
        raise BadSettings(f"{where} limits nothing; add one of {', '.join(QUOTA_AMOUNTS)}")
    for key, least in (("max_sessions", 0), ("max_pending", 0), ("max_lifetime_s", MIN_TIME_LIMIT_S)):
        if key in spec and not _is_whole(spec[key], least, LONGEST_TIME_LIMIT_S):
            raise BadSettings(f"{where}: {key} must be a whole number from {least} to {LONGEST_TIME_LIMIT_S}")
    scope = QuotaScope.USER if "user" in spec else QuotaScope.GROUP if "hub_group" in spec else QuotaScope.ALL
    return Quota(
        scope,
        spec.get("user") or spec.get("hub_group") or ANYBODY,
        spec.get("resource_group"),
        max_fgpu_milli=_fgpu_milli(spec, where),
        max_sessions=spec.get("max_sessions"),
        max_pending=spec.get("max_pending"),
        max_lifetime_s=spec.get("max_lifetime_s"),
    )


def _fgpu_milli(spec: Mapping[Any, Any], where: str) -> int | None:
    if "max_fgpu" not in spec:
        return None
    try:
        return parse_milli(str(spec["max_fgpu"]), field="max_fgpu")
    except BadAmount as e:
        raise BadSettings(f"{where}: {e}") from None
