"""Where the cluster chooses the card, the record follows it: no card is counted twice, and nothing is lost."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fgpu_scheduler.core.lifecycle import HOLDING, LAUNCHING
from fgpu_scheduler.core.model import EndCause, Node, Request, Session, SessionState, ShareMode
from fgpu_scheduler.core.planner import Policy, plan
from fgpu_scheduler.core.settling import settled
from fgpu_scheduler.errors import NoRoom
from fgpu_scheduler.testing import MemoryStore, World, world
from fgpuspawner.engines.kubernetes.cards import card_for, known_on

S = SessionState
MEMORY_MIB = 8192


@dataclass
class Cluster:
    """Cards that a scheduler of its own shares out, as it likes, and never beyond what they have."""

    cards: int
    random: Random
    on: dict[int, str] = field(default_factory=dict)
    whole: set[int] = field(default_factory=set)

    def bind(self, session: Session, find: dict[int, Session]) -> bool:
        """Choose any card for a session that has room for it, if one has."""
        assert session.placement is not None
        wanted = session.placement.shares[0]
        fits = []
        for card in (f"card-{n}" for n in range(self.cards)):
            there = [find[i].placement for i, at in self.on.items() if at == card]
            held = [p.shares[0] for p in there if p is not None]
            memory_mib = sum(share.memory_mib for share in held) + wanted.memory_mib
            percent = sum(share.compute_percent for share in held) + wanted.compute_percent
            if memory_mib <= MEMORY_MIB and percent <= 100 and {s.mode for s in held} <= {wanted.mode}:
                fits.append(card)
        if fits:
            self.on[session.id] = self.random.choice(fits)
        return bool(fits)


def ask(user: str, fgpu_milli: int, gpu_memory_mib: int | None) -> Request:
    return Request(user, "", "i", "default", fgpu_milli, 100, 128, gpu_memory_mib)


def holding(store: MemoryStore) -> dict[int, Session]:
    return {s.id: s for s in store.snapshot(0).sessions if s.state in HOLDING}


def assert_true(store: MemoryStore, cluster: Cluster, known: set[int], amounts: dict[int, object]) -> None:
    held: dict[str, list[Session]] = defaultdict(list)
    for session in holding(store).values():
        assert session.placement is not None
        (share,) = session.placement.shares
        assert (share.fgpu_milli, share.memory_mib, share.compute_percent) == amounts[session.id]
        held[share.device_uuid].append(session)
    for there in held.values():
        shares = [s.placement.shares[0] for s in there if s.placement]
        assert sum(share.fgpu_milli for share in shares) <= 1000
        assert sum(share.memory_mib for share in shares) <= MEMORY_MIB
        assert sum(share.compute_percent for share in shares) <= 100
        assert len({share.mode for share in shares}) == 1
        # What is recorded on one card is on one card.
        assert len({cluster.on[s.id] for s in there if s.id in known}) <= 1
    ours = {session.id: card for card, there in held.items() for session in there if session.id in known}
    for card in set(cluster.on.values()):
        assert len({ours[i] for i, at in cluster.on.items() if at == card and i in ours}) <= 1


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 4), st.integers(0, 2**32), st.integers(5, 60))
def test_whatever_the_cluster_chooses_no_card_is_counted_twice_and_nothing_is_lost(
    cards: int, seed: int, steps: int
) -> None:
    random = Random(seed)
    store, cluster = MemoryStore(), Cluster(cards, random)
    store.set_nodes(world(devices=cards, memory_mib=MEMORY_MIB).nodes, now_s=0)
    known: set[int] = set()
    amounts: dict[int, object] = {}
    submitted: set[int] = set()
    for step in range(steps):
        match random.choice(("submit", "submit", "plan", "launch", "bind", "bind", "end")):
            case "submit":
                explicit = random.random() < 0.2
                asked = ask(
                    f"u{step}",
                    0 if explicit else random.choice((200, 400, 500, 600, 1000)),
                    random.choice((1024, 4096, 5120)) if explicit else None,
                )
                submitted |= {s.id for s in store.submit([asked], now_s=step)}
            case "plan":
                for placed in store.commit(plan(store.snapshot(step), Policy()), now_s=step):
                    assert placed.placement is not None
                    (share,) = placed.placement.shares
                    amounts[placed.id] = (share.fgpu_milli, share.memory_mib, share.compute_percent)
            case "launch":
                for session in holding(store).values():
                    if session.state is S.SCHEDULED and random.random() < 0.7:
                        store.move(session.id, S.PREPARING, now_s=step)
            case "bind":
                launching = [
                    s for s in holding(store).values() if s.state in LAUNCHING and s.id not in cluster.on
                ]
                if launching:
                    bind(store, cluster, random.choice(launching), known, step)
            case "end":
                running = [s for s in holding(store).values() if s.state is S.RUNNING]
                if running:
                    gone = random.choice(running)
                    store.move(gone.id, S.TERMINATING, now_s=step, cause=EndCause.USER)
                    store.move(gone.id, S.TERMINATED, now_s=step)
                    del cluster.on[gone.id]
                    known.discard(gone.id)
        assert_true(store, cluster, known, amounts)
    for session_id in submitted:
        session = store.session(session_id)
        assert session is not None
        assert session.state is not S.ERROR


def bind(store: MemoryStore, cluster: Cluster, session: Session, known: set[int], now_s: int) -> None:
    """Do what the engine does once the cluster has chosen, or has not."""
    if not cluster.bind(session, holding(store)):
        store.give_back(session.id, "no room", attempt=session.attempt, now_s=now_s)
        return
    snapshot = store.snapshot(now_s)
    sure = known_on(snapshot, "n1", known)
    cards = [d.uuid for n in snapshot.nodes for d in n.devices]
    card = card_for(cluster.on[session.id], session, cards, sure, cluster.on)
    try:
        if card is None:
            raise NoRoom("no card")
        store.settle(session.id, [card], attempt=session.attempt, known=[s.id for s in sure], now_s=now_s)
    except NoRoom:
        del cluster.on[session.id]
        store.give_back(session.id, "no room", attempt=session.attempt, now_s=now_s)
        return
    known.add(session.id)
    if cluster.random.random() < 0.7:
        store.move(session.id, S.RUNNING, now_s=now_s)


def launching(lab: World, user: str) -> World:
    return lab.running(user, "0.6", state=S.PREPARING)


def where(*sessions: Session) -> dict[str, str]:
    return {s.request.user: s.placement.shares[0].device_uuid for s in sessions if s.placement}


def test_who_is_only_proposed_for_a_card_makes_way_for_who_has_it() -> None:
    lab = launching(launching(world(devices=2), "a"), "b")
    changed = settled(lab, lab.of("a"), ["GPU-n1-1"])
    assert changed is not None
    assert where(*changed) == {"a": "GPU-n1-1", "b": "GPU-n1-0"}


def test_who_has_a_card_stays_and_then_there_is_no_room() -> None:
    lab = launching(launching(world(devices=2), "a"), "b")
    assert settled(lab, lab.of("a"), ["GPU-n1-1"], known=[lab.of("b").id]) is None
    runs = launching(world(devices=2).running("b", "0.6", on="GPU-n1-1"), "a")
    assert settled(runs, runs.of("a"), ["GPU-n1-1"]) is None


def test_a_session_keeps_its_place_if_nobody_else_is_where_it_was_put() -> None:
    lab = launching(world(devices=2), "a")
    assert settled(lab, lab.of("a"), ["GPU-n1-0"]) == ()
    changed = settled(lab, lab.of("a"), ["GPU-n1-1"])
    assert changed is not None
    assert where(*changed) == {"a": "GPU-n1-1"}


@pytest.mark.parametrize("to", [["GPU-n2-0"], ["GPU-n1-0", "GPU-n1-1"], []], ids=["away", "two", "none"])
def test_what_is_not_of_its_node_or_of_another_number_is_no_place_for_a_session(to: list[str]) -> None:
    lab = launching(world(devices=2), "a").node("n2")
    assert settled(lab, lab.of("a"), to) is None


def test_cards_of_another_size_are_no_place_for_a_share_of_this_one() -> None:
    lab = launching(world(devices=1), "a")
    (node,) = lab.nodes
    larger = world(devices=2, memory_mib=16384).nodes[0].devices[1]
    mixed = World(
        lab.now_s, 1, (Node("n1", "default", 32000, 262144, (*node.devices, larger)),), lab.sessions
    )
    assert settled(mixed, mixed.of("a"), [larger.uuid]) is None


def test_the_modes_of_a_card_stay_one() -> None:
    lab = world(devices=2).holding(ask("m", 0, 1024), on="GPU-n1-1")
    assert lab.of("m").placement.shares[0].mode is ShareMode.MEMORY  # type: ignore[union-attr]
    lab = launching(lab, "a")
    assert settled(lab, lab.of("a"), ["GPU-n1-1"]) is None
