"""Programs that the Hub runs inside a session: the proof of its limits, and the query of libfgpu's accounting.

No session of a backend that can be verified runs without the proof.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence

from fgpu_scheduler import MIB, EndCause, Session
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import Endpoint, Engine, EngineSilent, LaunchFailed, LaunchSpec
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.base import IN_CONTAINER, WRITTEN, Backend
from fgpuspawner.isolation.choice import note_verdict
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import clean_environment
from fgpuspawner.isolation.report import (
    Answer,
    BadReport,
    ProbeReport,
    SlotReport,
    not_in_force,
    probe_command,
    read_answer,
    slots_command,
    static_command,
)
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

ProveLimits = Callable[[Session, Limits], Awaitable[Sequence[str]]]
"""Asks from inside a session where these limits are not in force."""

WITHIN_S = 20
"""For the answer about libfgpu's accounting."""


async def prove(
    engine: Engine, isolation: Isolation, settings: FGPU, spec: LaunchSpec, endpoint: Endpoint
) -> None:
    """Return when the limits of a launched session are proved to be in force.

    The last verdict of each node is stored for the administrators' page.

    Raises:
        LaunchFailed: they are not, or it cannot be told.
    """
    session, held_to, backend = spec.session, spec.prepared.limits, isolation.backend_of(spec.session)
    if not backend.verified:
        log.warning("Session %d is not verified: its isolation is %s", session.id, backend.name)
        return
    if not endpoint.has_driver:
        log.warning("Session %d is not verified: it was given no GPU driver", session.id)
        return
    if session.request.on_demand:
        log.info("Session %d is verified when it first gets its GPU", session.id)
        return
    problems = await _problems(
        engine, backend, session, held_to, spec.slice_environment, within_s=settings.verify_timeout_s
    )
    await asyncio.to_thread(note_verdict, settings.data_path(), session, backend.name, problems)
    if not problems:
        log.info("Session %d is verified: %s", session.id, backend.name)
        return
    log.error("Session %d is not held by %s: %s", session.id, backend.name, "; ".join(problems))
    raise LaunchFailed(
        not_in_force(held_to, problems, image=session.request.image), EndCause.ISOLATION_FAILED
    )


async def _problems(
    engine: Engine,
    backend: Backend,
    session: Session,
    held_to: Limits,
    environment: Mapping[str, str],
    *,
    within_s: int,
) -> Sequence[str]:
    """Return where a session sees other limits or could exceed them; empty if nowhere."""
    timeout_s = within_s * 4 // 5 or 1
    nonces = secrets.token_hex(16), secrets.token_hex(16)
    commands = [probe_command(nonces[0], held_to, timeout_s=timeout_s)]
    if engine.capabilities.own_root:
        # A session with its own image also runs the probe that needs nothing of that image.
        commands.append(static_command(nonces[1], timeout_s=timeout_s))
    try:
        async with asyncio.timeout(within_s):
            answers = await asyncio.gather(
                *(engine.probe(session, c, environment=environment, timeout_s=within_s) for c in commands)
            )
            report, *static = [read_answer(ProbeReport, a, n) for a, n in zip(answers, nonces, strict=False)]
            driver_says = await backend.driver_problems(held_to, await engine.cgroup(session))
    except BadReport as e:
        return [str(e)]
    except TimeoutError:
        return [f"the check did not end within {within_s} seconds"]
    return [*backend.verify(held_to, report, static[0] if static else None), *driver_says]


def prover(
    engine: Engine, isolation: Isolation, settings: FGPU, *, simulated: Callable[[Session], bool]
) -> ProveLimits:
    """Return a function that proves the limits of running sessions."""

    async def problems(session: Session, held_to: Limits) -> Sequence[str]:
        folder = IN_CONTAINER if engine.capabilities.own_root else isolation.folder(session.id)
        variables = limits.environment(
            session, limits_path=f"{folder}/{limits.NAME}", simulated=simulated(session)
        )
        backend, within_s = isolation.backend_of(session), settings.verify_timeout_s
        return await _problems(engine, backend, session, held_to, variables, within_s=within_s)

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
    return read_answer(SlotReport, answer, nonce)


async def held_bytes(engine: Engine, isolation: Isolation, session: Session) -> int:
    """Ask what a session holds of its GPU, with its kernels' code. Raises as `slots_of` does."""
    found = (await slots_of(engine, isolation, session, ())).held
    code_mib = sum(isolation.code_mib.get(session.id, {}).values())
    return (found[0] if found else 0) + code_mib * MIB
