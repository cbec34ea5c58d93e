"""Checks that never fire prove nothing: each rule is broken on purpose here, and a check must notice."""

from dataclasses import replace

from fgpu_scheduler.core import lifecycle, placement, reconcile
from fgpu_scheduler.core.model import SessionState, Share
from fgpu_scheduler.core.orders import lifo
from fgpu_scheduler.core.policies import GroupPolicy, Policy
from fgpu_scheduler.testing import Faults, MemoryStore, Violation, checks, simulate

SEEDS = range(40)
EVENTS = 300


def first_violation(**options) -> str:
    """Return the first violation in the seeds, or "" if nobody noticed anything."""
    for seed in SEEDS:
        try:
            simulate(seed, EVENTS, **options)
        except Violation as e:
            return str(e)
    return ""


def test_nothing_fires_while_nothing_is_broken():
    simulate(SEEDS.start, EVENTS)


def test_a_fit_check_that_lets_everything_pass_is_noticed(monkeypatch):
    monkeypatch.setattr(
        placement, "after", lambda left, request, where: placement._taken(left, request, where)
    )
    # The quick look at a device's free fGPU before the check has to go as well.
    monkeypatch.setattr(placement, "placements", everything_fits)
    assert "are held" in first_violation()


def everything_fits(left, request):
    for device in left.devices:
        share = replace(Share.of(device.device, request.fgpu_milli))
        where = placement.Placement(left.node.id, (share,))
        yield where, placement.after(left, request, where)


def test_a_fit_check_that_counts_only_fgpu_is_noticed(monkeypatch):
    """Shares of an earlier unit are worth more memory and compute than their fGPU says today."""
    real = placement.after

    def forgetful(left, request, where):
        devices = tuple(replace(d, memory_mib=d.device.memory_mib, compute_percent=100) for d in left.devices)
        found = real(replace(left, devices=devices), request, where)
        return found and placement._taken(left, request, where)

    monkeypatch.setattr(placement, "after", forgetful)
    assert "memory are held" in first_violation()


def test_a_store_that_takes_stale_plans_is_noticed(monkeypatch):
    monkeypatch.setattr(MemoryStore, "_check_version", lambda self, plan: None)
    assert "was committed at version" in first_violation()


def test_a_stale_plan_also_breaks_the_order_or_the_fit(monkeypatch):
    """The damage itself is noticed too, not only the version."""
    monkeypatch.setattr(MemoryStore, "_check_version", lambda self, plan: None)
    monkeypatch.setattr(MemoryStore, "version", lambda self: LikeAnyVersion())
    found = first_violation()
    assert "was placed before" in found or "of this very version was refused" in found


class LikeAnyVersion(int):
    def __eq__(self, other):
        return True

    def __ne__(self, other):
        return False

    __hash__ = int.__hash__


def test_a_queue_in_the_wrong_order_is_noticed():
    last_comes_first = Policy(GroupPolicy(order=lifo))
    assert "which asked for the same earlier" in first_violation(policy=last_comes_first)


def test_an_order_that_trusts_the_clock_is_noticed():
    """It was so once: a clock set back let newcomers overtake everybody."""
    by_instant = Policy(GroupPolicy(order=lambda line: [s.submitted_at_s for s in line.waiting]))
    assert "which asked for the same earlier" in first_violation(policy=by_instant)


def test_judging_what_is_missing_by_the_later_snapshot_is_noticed(monkeypatch):
    real = reconcile.reconcile
    monkeypatch.setattr(
        reconcile,
        "reconcile",
        lambda before, after, observed, *, reachable, **rest: real(
            after, after, observed, reachable=reachable, **rest
        ),
    )
    assert "is alive" in first_violation()


def test_judging_ghosts_by_the_earlier_snapshot_is_noticed(monkeypatch):
    real = reconcile.reconcile

    def wrong(before, after, observed, *, reachable, **rest):
        ghosts = [
            h
            for h in real(before, before, observed, reachable=reachable, **rest)
            if isinstance(h, reconcile.Remove)
        ]
        rest = [
            h
            for h in real(before, after, observed, reachable=reachable, **rest)
            if not isinstance(h, reconcile.Remove)
        ]
        return (*rest, *ghosts)

    monkeypatch.setattr(reconcile, "reconcile", wrong)
    assert "was removed while its session" in first_violation()


def test_concluding_from_nodes_that_did_not_answer_is_noticed(monkeypatch):
    real = reconcile.reconcile
    monkeypatch.setattr(
        reconcile,
        "reconcile",
        lambda before, after, observed, *, reachable, **rest: real(
            before, after, observed, reachable=[n.id for n in after.nodes], **rest
        ),
    )
    assert "is alive" in first_violation()


def test_freeing_before_the_container_is_gone_is_noticed(monkeypatch):
    real = reconcile.reconcile

    def hasty(before, after, observed, *, reachable, **rest):
        return tuple(
            reconcile.Finish(h.session_id) if isinstance(h, reconcile.Stop) else h
            for h in real(before, after, observed, reachable=reachable, **rest)
        )

    monkeypatch.setattr(reconcile, "reconcile", hasty)
    assert "was freed while" in first_violation()


def test_freeing_while_a_launch_is_under_way_is_noticed():
    """The engine is asked, the user leaves, nothing is seen yet: the container still comes."""
    found = first_violation(faults=Faults(tells_launches=False))
    assert "came up without a share" in found or "was freed while" in found


def test_a_reconcile_that_never_frees_is_noticed(monkeypatch):
    real = reconcile.reconcile
    monkeypatch.setattr(
        reconcile,
        "reconcile",
        lambda before, after, observed, *, reachable, **rest: tuple(
            h
            for h in real(before, after, observed, reachable=reachable, **rest)
            if not isinstance(h, reconcile.Finish)
        ),
    )
    assert "not everything ended" in first_violation()


def test_a_planner_that_places_held_sessions_is_refused_by_the_store(monkeypatch):
    from fgpu_scheduler.core import planner

    real = planner.plan

    def careless(snapshot, policy):
        return real(snapshot.with_sessions(replace(s, held=False) for s in snapshot.sessions), policy)

    monkeypatch.setattr(planner, "plan", careless)
    assert "of this very version was refused" in first_violation()


def test_an_illegal_change_is_noticed(monkeypatch):
    """A store that lets a running session be cancelled, its container alive."""
    legal = {**lifecycle.LEGAL, SessionState.RUNNING: (SessionState.TERMINATING, SessionState.CANCELLED)}
    monkeypatch.setattr(lifecycle, "LEGAL", legal)
    real = MemoryStore.move

    def cancelling(self, session_id, to, *, expect, **rest):
        if to is SessionState.TERMINATING and SessionState.RUNNING in expect:
            to = SessionState.CANCELLED
        return real(self, session_id, to, expect=expect, **rest)

    monkeypatch.setattr(MemoryStore, "move", cancelling)
    assert "RUNNING -> CANCELLED is not legal" in first_violation()


def test_a_lost_session_is_noticed(monkeypatch):
    real = MemoryStore.hold_waiting

    def forgetful(self, *, now_s):
        held = real(self, now_s=now_s)
        waiting = [s.id for s in self._world.sessions if s.state is SessionState.PENDING]
        self._world = self._world.with_sessions(s for s in self._world.sessions if s.id not in waiting[:1])
        return held

    monkeypatch.setattr(MemoryStore, "hold_waiting", forgetful)
    assert "is lost" in first_violation()


def test_two_sessions_of_one_server_are_noticed(monkeypatch):
    monkeypatch.setattr(lifecycle, "SERVING", ())
    assert checks.SERVING
    assert "both serve" in first_violation()
