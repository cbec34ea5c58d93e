"""The check from inside a session that its limits are in force; without it no session of such a backend runs."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from fgpu_scheduler import EndCause, Session
from fgpuspawner.engines.base import Endpoint, Engine, LaunchFailed
from fgpuspawner.isolation.base import Backend, Prepared
from fgpuspawner.isolation.choice import note_verdict
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.report import (
    BadReport,
    ProbeReport,
    not_in_force,
    probe_command,
    read_report,
    static_command,
)

log = logging.getLogger("fgpu")


class Verification:
    """The check of one session. The last verdict of each node is stored in ``data``, for the administrators' page."""

    def __init__(self, engine: Engine, backend: Backend, *, timeout_s: int, data: Path) -> None:
        self._engine = engine
        self._backend = backend
        self._timeout_s = timeout_s
        self._data = data

    async def prove(
        self, session: Session, prepared: Prepared, endpoint: Endpoint, told: Mapping[str, str]
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
        problems = await self.problems(session, prepared.limits, told)
        await asyncio.to_thread(note_verdict, self._data, session, name, problems)
        if not problems:
            log.info("Session %d is verified: %s", session.id, name)
            return
        log.error("Session %d is not held by %s: %s", session.id, name, "; ".join(problems))
        raise LaunchFailed(
            not_in_force(prepared.limits, problems, image=session.request.image), EndCause.ISOLATION_FAILED
        )

    async def problems(self, session: Session, limits: Limits, told: Mapping[str, str]) -> Sequence[str]:
        """Return where a session sees other limits or could exceed them; empty if nowhere."""
        try:
            async with asyncio.timeout(self._timeout_s):
                report, static = await self._reports(session, limits, told)
                driver_says = await self._backend.driver_problems(limits, await self._engine.cgroup(session))
        except BadReport as e:
            return [str(e)]
        except TimeoutError:
            return [f"the check did not end within {self._timeout_s} seconds"]
        return [*self._backend.verify(limits, report, static), *driver_says]

    async def _reports(
        self, session: Session, limits: Limits, told: Mapping[str, str]
    ) -> tuple[ProbeReport, ProbeReport | None]:
        """Return the probe's report, and for a session with its own image the static probe's."""
        timeout_s = self._timeout_s * 4 // 5 or 1
        nonces = secrets.token_hex(16), secrets.token_hex(16)
        commands = [probe_command(nonces[0], limits, timeout_s=timeout_s)]
        if self._engine.capabilities.own_root:
            commands.append(static_command(nonces[1], timeout_s=timeout_s))
        probes = (
            self._engine.probe(session, command, told=told, timeout_s=self._timeout_s) for command in commands
        )
        found = [
            read_report(answer, nonce)
            for answer, nonce in zip(await asyncio.gather(*probes), nonces, strict=False)
        ]
        return found[0], found[1] if len(found) > 1 else None
