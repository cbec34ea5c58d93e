"""Programs that the Hub runs inside a session: the proof of its limits, and the query of libfgpu's accounting.

No session of a backend that can be verified runs without the proof.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from fgpu_scheduler import EndCause, Session
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import Endpoint, Engine, EngineSilent, LaunchFailed
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.base import IN_CONTAINER, WRITTEN, Backend, Prepared
from fgpuspawner.isolation.choice import note_verdict
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import clean_environment
from fgpuspawner.isolation.report import (
    Answer,
    BadReport,
    SlotReport,
    not_in_force,
    probe_command,
    read_report,
    read_slots,
    slots_command,
    static_command,
)
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

ProveLimits = Callable[[Session, Limits], Awaitable[Sequence[str]]]
"""Asks from inside a session where these limits are not in force."""

WITHIN_S = 20
"""For the answer about libfgpu's accounting."""


class Verification:
    """The check of one session. The last verdict of each node is stored in ``data``, for the administrators' page."""

    def __init__(self, engine: Engine, backend: Backend, *, timeout_s: int, data: Path) -> None:
        self._engine = engine
        self._backend = backend
        self._timeout_s = timeout_s
        self._data = data

    async def prove(
        self, session: Session, prepared: Prepared, endpoint: Endpoint, slice_environment: Mapping[str, str]
    ) -> None:
        """Return when the session's limits are proved to be in force.

        Raises:
            LaunchFailed: they are not, or it cannot be told.
        """
        name = self._backend.name
        if not self._backend.verified:
            log.warning("Session %d is not verified: its isolation is %s", session.id, name)
            return
        if not endpoint.has_driver:
            log.warning("Session %d is not verified: it was given no GPU driver", session.id)
            return
        if session.request.on_demand:
            log.info("Session %d is verified when it first gets its GPU", session.id)
            return
        problems = await self.problems(session, prepared.limits, slice_environment)
        await asyncio.to_thread(note_verdict, self._data, session, name, problems)
        if not problems:
            log.info("Session %d is verified: %s", session.id, name)
            return
        log.error("Session %d is not held by %s: %s", session.id, name, "; ".join(problems))
        raise LaunchFailed(
            not_in_force(prepared.limits, problems, image=session.request.image), EndCause.ISOLATION_FAILED
        )

    async def problems(
        self, session: Session, limits: Limits, slice_environment: Mapping[str, str]
    ) -> Sequence[str]:
        """Return where a session sees other limits or could exceed them; empty if nowhere."""
        timeout_s = self._timeout_s * 4 // 5 or 1
        nonces = secrets.token_hex(16), secrets.token_hex(16)
        commands = [probe_command(nonces[0], limits, timeout_s=timeout_s)]
        if self._engine.capabilities.own_root:
            # A session with its own image also runs the probe that needs nothing of that image.
            commands.append(static_command(nonces[1], timeout_s=timeout_s))
        try:
            async with asyncio.timeout(self._timeout_s):
                answers = await asyncio.gather(
                    *(
                        self._engine.probe(
                            session, c, environment=slice_environment, timeout_s=self._timeout_s
                        )
                        for c in commands
                    )
                )
                report, *static = [read_report(a, n) for a, n in zip(answers, nonces, strict=False)]
                driver_says = await self._backend.driver_problems(limits, await self._engine.cgroup(session))
        except BadReport as e:
            return [str(e)]
        except TimeoutError:
            return [f"the check did not end within {self._timeout_s} seconds"]
        return [*self._backend.verify(limits, report, static[0] if static else None), *driver_says]


def prover(
    engine: Engine, isolation: Isolation, settings: FGPU, *, simulated: Callable[[Session], bool]
) -> ProveLimits:
    """Return a function that proves the limits of running sessions."""

    async def problems(session: Session, held_to: Limits) -> Sequence[str]:
        folder = IN_CONTAINER if engine.capabilities.own_root else isolation.folder(session.id)
        variables = limits.environment(
            session, limits_path=f"{folder}/{limits.NAME}", simulated=simulated(session)
        )
        backend, timeout_s = isolation.backend_of(session), settings.verify_timeout_s
        verification = Verification(engine, backend, timeout_s=timeout_s, data=settings.data_path())
        return await verification.problems(session, held_to, variables)

    return problems


def account_path(engine: Engine, isolation: Isolation, session_id: int) -> str:
    """Return where libfgpu's account is for a program in the session."""
    if engine.capabilities.own_root:
        return f"{IN_CONTAINER}/{WRITTEN}/accounting"
    return str(isolation.folder(session_id) / "accounting")


async def slots_of(
    engine: Engine, isolation: Isolation, session: Session, processes: Sequence[int]
) -> SlotReport:
    """Ask libfgpu's accounting which processes of a session hold a slot, and which of ``processes`` run.

    The query runs in the session's container, or here for a local process.

    Raises:
        BadReport: the probe started in the session and gave no report in time.
        LaunchFailed, EngineSilent: the engine did not start it.
    """
    nonce, own = secrets.token_hex(16), isolation.folder(session.id)
    inside = engine.capabilities.own_root
    command = slots_command(nonce, account_path(engine, isolation, session.id), processes)
    try:
        async with asyncio.timeout(WITHIN_S):
            if inside:
                answer = await engine.probe(session, command, environment={}, timeout_s=WITHIN_S)
            else:
                done = await in_a_thread_of_its_own(
                    lambda: subprocess.run(
                        [str(own / command[0]), *command[1:]],
                        stdin=subprocess.DEVNULL,
                        capture_output=True,
                        check=False,
                        timeout=WITHIN_S,
                        env=clean_environment(),
                    )
                )
                answer = Answer(done.stdout, done.returncode)
    except (OSError, subprocess.SubprocessError) as e:
        # TimeoutError is an OSError.
        if engine.is_away(session):
            raise EngineSilent("its machine does not answer") from e
        raise BadReport(f"the account of libfgpu could not be asked for ({e or 'no answer in time'})") from e
    return read_slots(answer, nonce)
