"""The real `Scheduler` and `Store` in a simulated lab: a Hub that dies, slow engines, lost nodes, a clock that jumps.

A seed gives one history: `random.Random(seed)` decides everything, and time is virtual. `Checks` run after every write.
"""

from __future__ import annotations

import gc
import hashlib
import logging
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fgpu_scheduler.core import placement
from fgpu_scheduler.core.lifecycle import UP
from fgpu_scheduler.core.model import EndCause, NodeState, Session, SessionState
from fgpu_scheduler.core.planner import Policy
from fgpu_scheduler.core.reclaim import AllRules
from simulator.checks import Violation
from simulator.lab import CALM, Faults
from simulator.outages import Outages

log = logging.getLogger("fgpu.scheduler")

S = SessionState
MOST_ROUNDS = 400
"""Rounds within which a lab without faults must finish all sessions."""

OUTSIDE: tuple[tuple[int, str], ...] = (
    (40, "submit"),
    (9, "user_ends"),
    (6, "resume"),
    (5, "process_dies"),
    (2, "node_lost"),
    (3, "node_returns"),
    (2, "cordon"),
    (3, "uncordon"),
    (2, "cordon_gpu"),
    (3, "uncordon_gpu"),
    (3, "hub_restarts"),
    (2, "clock_jumps"),
    (2, "database_away"),
    (1, "unit_changes"),
    (2, "inventory_changes"),
    (2, "foretell"),
    (12, "idles"),
    (9, "wants"),
    (2, "asks_to_park"),
    (2, "keeps"),
    (7, "resizes"),
    (1, "quotas_change"),
)
"""The external events, with their weights."""

USERS = ("submit", "user_ends", "resume", "foretell", "idles", "wants", "asks_to_park", "keeps", "resizes")
"""The events that also happen without `Faults.outages`."""


@dataclass(frozen=True, slots=True)
class Report:
    """The result of a simulation. Equal seeds give equal reports on every machine and with every hash seed."""

    seed: int
    events: int
    looks: int
    submitted: int
    ran: int
    stale: int
    reclaimed: int
    promises_kept: int
    restarts: int
    orphans: int
    met: tuple[tuple[str, int], ...]
    log_hash: str


class Simulation(Outages):
    """One lab and its history."""

    def __init__(
        self,
        seed: int,
        folder: Path | None = None,
        *,
        policy: Policy | None = None,
        rules: AllRules | None = None,
        faults: Faults | None = None,
        nodes: int | None = None,
    ) -> None:
        super().__init__(seed, folder, policy=policy, rules=rules, faults=faults, nodes=nodes)

    def run(self, events: int) -> Report:
        """Run this number of events, then stop the faults and let every session end.

        Raises:
            Violation: a check failed; the message has the command to reproduce it.
        """
        outside = [(w, name) for w, name in OUTSIDE if self._faults.outages or name in USERS]
        weights = [weight for weight, _ in outside]
        acts = [getattr(self, f"_{name}") for _, name in outside]
        log.addFilter(self._logged)
        # Almost everything lives until the end, so collecting in between is a third of the time.
        gc.disable()
        try:
            self._boot()
            for self.step in range(1, events + 1):
                # Stop at some await of the Hub.
                self._pass_time(self._rng.choice((0, 0, 0.01, 1, 10, 30)))
                for _ in range(self._rng.randrange(12)):
                    self._next(self._at_s + 10)
                with self._beside.faultless():
                    self._rng.choices(acts, weights)[0]()
                if self._is_file and self._chance(30):
                    # A plan may begin right after a write of another process.
                    self._queue.wake()
                self._judge()
            self._come_to_rest()
        except Exception as e:
            last = "\n  ".join(self.lines[-12:])
            again = f"--seed {self.seed} --events {events}" + (" --file" if self._is_file else "")
            raise Violation(
                f"seed {self.seed}, step {self.step} of {events}: {type(e).__name__}: {e}\n  {last}\n"
                f"see it again: python -m simulator {again}"
            ) from e
        finally:
            gc.enable()
            log.removeFilter(self._logged)
            self._loop.kill()
            self.close()
        text = "\n".join(self.lines)
        return Report(
            self.seed,
            events,
            self._checks.looks,
            self._submitted,
            self._ran,
            self._stale,
            self._checks.warned.reclaimed,
            self._checks.promises.kept,
            self._restarts,
            self._orphans,
            self._checks.met.counts(),
            hashlib.sha256(text.encode()).hexdigest(),
        )

    def _come_to_rest(self) -> None:
        self._faults = CALM
        self._away_until_s = 0
        self._say("the faults stop")
        for node_id in list(self._unreachable):
            self._back(node_id)
        self._offered = dict(self._whole)
        self._offer()
        self._quotas = ()
        self._beside.set_quotas((), now_s=self.now_s())
        for _ in range(MOST_ROUNDS):
            self.step += 1
            for node in self._snapshot().nodes:
                if node.state is NodeState.CORDONED:
                    self._uncordon()
                if any(device.cordoned for device in node.devices):
                    self._uncordon_gpu()
            for session in self._unserved():
                self._serve(session.id)
            # After this time refused nodes are tried again.
            self._pass_time(30)
            sessions = self._snapshot().sessions
            if not sessions and not self._containers:
                break
            for session in sessions:
                # End only sessions that run or can never run: all others must get to run first.
                if session.state in UP or not self._could_run(session):
                    self._end(session, EndCause.USER)
        self._look()
        self._checks.ended(self._standing())
        snapshot = self._snapshot()
        if placement.free(snapshot) != tuple(placement.untouched(n) for n in snapshot.nodes):
            raise Violation("everything ended, and not everything is free")

    def _could_run(self, session: Session) -> bool:
        waits = session.state is S.PENDING
        return not waits or placement.could_ever_fit(session.request, self._snapshot().nodes)


def simulate(
    seed: int,
    events: int,
    *,
    policy: Policy | None = None,
    rules: AllRules | None = None,
    faults: Faults | None = None,
    nodes: int | None = None,
) -> Report:
    """Run one simulation until all its sessions have ended, with a store in memory; ``nodes``: on this number of nodes.

    Raises:
        Violation: a check failed.
    """
    return Simulation(seed, policy=policy, rules=rules, faults=faults, nodes=nodes).run(events)


def simulate_in_file(seed: int, events: int) -> Report:
    """Run one simulation as `simulate` does, with a store in a file that other processes write too."""
    with TemporaryDirectory() as folder:
        return Simulation(seed, Path(folder)).run(events)
