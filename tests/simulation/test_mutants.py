"""Tests of the checks: each test breaks a rule of the product, and a check must fail."""

import contextlib
from dataclasses import replace

import pytest
from simulator import Faults, Violation, checks, simulate, simulate_in_file
from simulator.lab import CALM
from sqlalchemy import text

from fgpu_scheduler.core import (
    group_scheduler,
    lifecycle,
    orders,
    parking,
    placement,
    planner,
    preemption,
    quota,
    reclaim,
    reconcile,
    reservations,
    returning,
)
from fgpu_scheduler.core.model import Device, Session, SessionState
from fgpu_scheduler.core.policies import Policy, group_policy
from fgpu_scheduler.core.reclaim import AllRules, Rules
from fgpu_scheduler.core.shares import per_preferred_model
from fgpu_scheduler.service import healing, reclaiming, scheduler
from fgpu_scheduler.service.scheduler import Scheduler
from fgpu_scheduler.store import quotas as quota_store
from fgpu_scheduler.store.store import Store
from fgpu_scheduler.store.transaction import Write

pytestmark = pytest.mark.slow

SEEDS = range(60)
EVENTS = 200


def policy(name, **options):
    return Policy(group_policy(order=name, **options))


def fires(*complaints: str, how=simulate, **options) -> bool:
    """Return whether in some history a check fails with one of these words; another check may fail first there."""
    for seed in SEEDS:
        try:
            how(seed, EVENTS, **options)
        except Violation as e:
            if any(complaint in str(e) for complaint in complaints):
                return True
    return False


def test_a_fit_check_that_ignores_held_shares_is_noticed(monkeypatch):
    real = placement.free_on_node
    monkeypatch.setattr(placement, "free_on_node", lambda node, there: real(node, {}))
    assert fires("are held")


def test_a_fit_check_that_ignores_cordoned_gpus_is_noticed(monkeypatch):
    monkeypatch.setattr(Device, "shares_offered", property(lambda device: device.max_shares))
    # The store's own check refuses such a placement before it is one.
    assert fires("does not fit where it was placed")


def test_a_plan_with_reversed_model_preferences_is_noticed(monkeypatch):
    monkeypatch.setattr(
        group_scheduler, "per_preferred_model", lambda asked: per_preferred_model(asked)[::-1]
    )
    assert fires("which it likes more, is free")


def test_a_fit_check_that_ignores_share_modes_is_noticed(monkeypatch):
    real = placement.free_on_node

    def forgetful(node, there):
        left = real(node, there)
        return replace(left, devices=tuple(replace(device, mode=None) for device in left.devices))

    monkeypatch.setattr(placement, "free_on_node", forgetful)
    assert fires("the modes of the shares of")


def test_a_fit_check_that_counts_only_fgpu_is_noticed(monkeypatch):
    """After a change of capacity, shares have more memory and compute than their fGPU is worth now."""

    def forgetful(free, share):
        return free.fgpu_milli >= share.fgpu_milli and free.shares >= 1 and free.mode in (None, share.mode)

    monkeypatch.setattr(placement, "_holds", forgetful)
    assert fires("memory are held", "compute are held", faults=Faults(inventory=30))


def test_a_planner_that_ignores_refused_nodes_is_noticed(monkeypatch):
    monkeypatch.setattr(Session, "refusing_nodes", lambda session, now_s: ())
    assert fires("again, refused at")


def test_a_returned_placement_that_is_kept_is_noticed(monkeypatch):
    real = lifecycle.returned_to_queue
    monkeypatch.setattr(
        lifecycle,
        "returned_to_queue",
        lambda s, words, *, now_s: replace(real(s, words, now_s=now_s), placement=s.placement),
    )
    assert fires("is PENDING and holds")


def test_a_store_that_takes_stale_plans_is_noticed(monkeypatch):
    monkeypatch.setattr(Write, "check_version", lambda self, version: None)
    assert fires("was committed at version", how=simulate_in_file)


def test_a_queue_in_the_wrong_order_is_noticed(monkeypatch):
    real = group_scheduler.in_order
    monkeypatch.setattr(group_scheduler, "in_order", lambda *line_and_order: real(*line_and_order)[::-1])
    assert fires("which asked for the same earlier", policy=policy("fifo-skip"))


def test_an_order_that_trusts_the_clock_is_noticed(monkeypatch):
    """A clock set back must not let later requests overtake earlier ones."""
    monkeypatch.setattr(
        orders, "by_place", lambda waiting: sorted(waiting, key=lambda s: (s.submitted_at_s, s.id))
    )
    # In strict order every pair of sessions is compared; equal requests around a change of the clock are rare.
    assert fires("which is ahead in strict order", policy=policy("fifo"))


def test_a_strict_order_that_lets_others_pass_is_noticed(monkeypatch):
    monkeypatch.setattr(group_scheduler.GroupScheduler, "_blocked", lambda self, session: None)
    assert fires("which is ahead in strict order", policy=policy("fifo"))


def test_a_backfill_that_takes_the_reserved_place_is_noticed(monkeypatch):
    monkeypatch.setattr(reservations.Reservation, "ends_before", lambda self, free_at_s: True)
    calm = {"rules": AllRules(Rules(grace_s=30)), "faults": CALM}
    assert fires("was promised a start at", policy=policy("fifo-skip"), **calm)


def test_a_promise_without_a_reservation_is_noticed(monkeypatch):
    monkeypatch.setattr(group_scheduler.GroupScheduler, "_reserve_promised", lambda self, session: None)
    calm = {"rules": AllRules(Rules(grace_s=30)), "faults": CALM}
    assert fires("was promised a start at", policy=policy("lifo"), **calm)


# --- Quotas ---


def test_an_unchecked_quota_is_noticed(monkeypatch):
    monkeypatch.setattr(quota.Ledger, "allows", lambda self, session, where=None: True)
    assert fires("sessions are held, and", "milli-fGPU are held, and")


def test_a_quota_that_ignores_held_shares_is_noticed(monkeypatch):
    monkeypatch.setattr(quota.Ledger, "take", lambda self, session, where=None: None)
    monkeypatch.setattr(quota.Ledger, "give_back", lambda self, session, where=None: None)
    assert fires("are allowed")


def test_a_quota_that_blocks_every_session_is_noticed(monkeypatch):
    monkeypatch.setattr(
        quota.Ledger, "allows", lambda self, session, where=None: not counted(self, session.request)
    )
    assert fires("waits for a quota, and no quota stops it")


def counted(ledger, request):
    return any(quota.counted_names(one, request) for one in ledger._quotas)


def test_an_unchecked_pending_quota_is_noticed(monkeypatch):
    monkeypatch.setattr(quota_store, "refuse_over_quota", lambda asked, world, groups: None)
    assert fires(" wait, and ")


# --- Reclaiming ---


def test_an_end_without_a_warning_is_noticed(monkeypatch):
    real = reclaim.reclaims

    def hasty(*about, **more):
        return tuple(
            reclaim.End(one.session_id, one.cause, "now") if isinstance(one, reclaim.Warn) else one
            for one in real(*about, **more)
        )

    monkeypatch.setattr(reclaiming, "reclaims", hasty)
    monkeypatch.setattr(
        reclaim,
        "terminating",
        lambda session, decision, *, now_s: lifecycle.moved(
            session, SessionState.TERMINATING, now_s=now_s, cause=decision.cause
        ),
    )
    assert fires("and its owner was warned of None")


def test_a_grace_period_shortened_by_a_clock_jump_is_noticed(monkeypatch):
    """The announced time of an end is not enough: the clock may jump past it before the grace period is over."""
    monkeypatch.setattr(
        reclaim.WarningAges, "warned_for_s", lambda self, sessions, steady_s: {s.id: 10**6 for s in sessions}
    )
    assert fires("s after its warning; the grace is")


def test_pre_emption_of_an_equal_priority_is_noticed(monkeypatch):
    def anybody(snapshot, *about, **more):
        return tuple(s.id for s in snapshot.sessions if s.state is SessionState.RUNNING)[:1]

    monkeypatch.setattr(reclaim, "victims", anybody)
    preempting = AllRules(Rules(grace_s=30, preempt=True))
    assert fires("was pre-empted, and nobody of higher priority waits", rules=preempting)


def test_a_pre_emption_of_sessions_within_their_guarantee_is_noticed(monkeypatch):
    monkeypatch.setattr(preemption, "within_guarantees", lambda snapshot: {})
    preempting = AllRules(Rules(grace_s=10, preempt=True))
    assert fires("was pre-empted, and nobody of higher priority waits", rules=preempting)


def test_a_pre_emption_before_the_least_run_time_is_noticed(monkeypatch):
    monkeypatch.setattr(reclaim, "preemptible_from_s", lambda session, rules: 0)
    short = AllRules(Rules(grace_s=30, preempt=True, min_runtime_s=900))
    assert fires("s; it may run for 900 s", rules=short)


def test_queueing_again_at_the_end_is_noticed(monkeypatch):
    real = reclaim.requeued
    monkeypatch.setattr(
        reclaim, "requeued", lambda session, **at: replace(real(session, **at), place_of=None)
    )
    assert fires("and not at its place", rules=AllRules(Rules(grace_s=30, preempt=True)))


# --- Parking ---

PARKS = AllRules(Rules(grace_s=30, park_after_s=20, park_always=True))


def test_a_planner_that_gives_away_what_a_parked_session_wants_back_is_noticed(monkeypatch):
    monkeypatch.setattr(placement, "claims_shares", lambda session: False)
    assert fires("which others want back", rules=PARKS)


def test_a_return_that_does_not_look_at_the_gpu_is_noticed(monkeypatch):
    monkeypatch.setattr(returning._Homes, "why_not", lambda homes, session: None)
    assert fires("are held", rules=PARKS)


def test_a_return_in_the_wrong_order_is_noticed(monkeypatch):
    real = returning.returns

    def reversed_returns(snapshot):
        return real(
            snapshot.with_sessions(
                replace(s, wanted_at_s=-s.wanted_at_s) if s.wanted_at_s else s for s in snapshot.sessions
            )
        )

    monkeypatch.setattr(returning, "returns", reversed_returns)
    assert fires("which has waited longer", rules=PARKS)


def test_parking_beyond_the_host_memory_is_noticed(monkeypatch):
    monkeypatch.setattr(parking, "parked_mib", lambda snapshot: {})
    assert fires("MiB are held by parked sessions", rules=PARKS)


# --- Reconciling ---


def reconciling(monkeypatch, change):
    """Change what a round of reconciliation heals: ``change`` gets the real function and the two snapshots."""

    def changed(before, after, observed, *, reachable, **rest):
        def real(before=before, after=after, reachable=reachable):
            return reconcile.reconcile(before, after, observed, reachable=reachable, **rest)

        return tuple(change(real, before, after))

    monkeypatch.setattr(healing, "reconcile", changed)


def test_finding_missing_sessions_by_the_later_snapshot_is_noticed(monkeypatch):
    reconciling(monkeypatch, lambda real, before, after: real(before=after))
    assert fires("is alive")


def test_finding_ghosts_by_the_earlier_snapshot_is_noticed(monkeypatch):
    def wrong(real, before, after):
        yield from (h for h in real() if not isinstance(h, reconcile.Remove))
        yield from (h for h in real(after=before) if isinstance(h, reconcile.Remove))

    reconciling(monkeypatch, wrong)
    # The second check before a removal has to be broken too: either check is enough.
    monkeypatch.setattr(healing, "orphan_reason", lambda thing, session: "it was seen")
    assert fires("was removed while its session")


def test_reconciling_silent_nodes_is_noticed(monkeypatch):
    reconciling(monkeypatch, lambda real, _, after: real(reachable=[n.id for n in after.nodes]))
    assert fires("is alive")


def test_freeing_before_the_container_is_gone_is_noticed(monkeypatch):
    def hasty(real, *_):
        return (reconcile.Finish(h.session_id) if isinstance(h, reconcile.Stop) else h for h in real())

    reconciling(monkeypatch, hasty)
    assert fires("was freed while")


def test_freeing_while_a_launch_is_under_way_is_noticed(monkeypatch):
    """The engine was asked for a container and the user left; the container is not observed yet but still appears."""
    for mark in ("launching", "ending"):
        monkeypatch.setattr(Scheduler, mark, lambda self, session_id: contextlib.nullcontext())
    assert fires("came up without a share", "was freed while")


def test_a_reconcile_that_never_frees_is_noticed(monkeypatch):
    reconciling(monkeypatch, lambda real, *_: (h for h in real() if not isinstance(h, reconcile.Finish)))
    assert fires("not everything ended")


def test_a_planner_that_places_held_sessions_is_refused_by_the_store(monkeypatch):
    real = planner.plan

    def careless(snapshot, policy, memory=None):
        unheld = snapshot.with_sessions(replace(s, held=False) for s in snapshot.sessions)
        return real(replace(unheld, known=None), policy, memory)

    # Break only the scheduler's planner: the checks compare with the original.
    monkeypatch.setattr(scheduler, "plan", careless)
    monkeypatch.setattr(planner, "plan", careless)
    assert fires("does not fit where it was placed")


def test_an_illegal_change_is_noticed(monkeypatch):
    """A store that cancels a running session while its container is alive."""
    legal = {**lifecycle.LEGAL, SessionState.RUNNING: (SessionState.TERMINATING, SessionState.CANCELLED)}
    monkeypatch.setattr(lifecycle, "LEGAL", legal)
    real = Store.move

    def cancelling(self, session_id, to, *, expect, **rest):
        if to is SessionState.TERMINATING and SessionState.RUNNING in expect:
            to = SessionState.CANCELLED
        return real(self, session_id, to, expect=expect, **rest)

    monkeypatch.setattr(Store, "move", cancelling)
    assert fires("RUNNING -> CANCELLED is not legal")


def test_a_lost_session_is_noticed(monkeypatch):
    real = Store.hold_waiting

    def forgetful(self, *, now_s):
        held = real(self, now_s=now_s)
        first = "(SELECT min(id) FROM fgpu_sessions WHERE state = 'PENDING')"
        with self.faultless(), self.writing_unversioned() as connection:
            connection.execute(text(f"DELETE FROM fgpu_first_forecasts WHERE session_id = {first}"))
            connection.execute(text(f"DELETE FROM fgpu_sessions WHERE id = {first}"))
        self.forget()
        return held

    monkeypatch.setattr(Store, "hold_waiting", forgetful)
    assert fires("is lost", how=simulate_in_file)


def test_two_sessions_of_one_server_are_noticed(monkeypatch):
    monkeypatch.setattr(lifecycle, "SERVING", ())
    assert checks.SERVING
    # A unique index of the database also prevents it.
    assert fires("both serve", "UNIQUE constraint failed: fgpu_sessions")
