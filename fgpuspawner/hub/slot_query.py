"""Asks libfgpu's accounting file for a session's slots: in its container, or here for a local process."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
from collections.abc import Sequence

from fgpu_scheduler import Session
from fgpuspawner.concurrency.waiting import in_a_thread_of_its_own
from fgpuspawner.engines.base import Engine, EngineSilent
from fgpuspawner.isolation.base import IN_CONTAINER, WRITTEN
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import clean_environment
from fgpuspawner.isolation.report import Answer, BadReport, SlotReport, read_slots, slots_command

WITHIN_S = 20


async def slots_of(
    engine: Engine, isolation: Isolation, session: Session, processes: Sequence[int]
) -> SlotReport:
    """Return which processes of a session hold a slot, and which of ``processes`` run.

    Raises:
        BadReport: the probe started in the session and gave no report in time.
        LaunchFailed, EngineSilent: the engine did not start it.
    """
    nonce, own = secrets.token_hex(16), isolation.folder(session.id)
    inside = engine.capabilities.own_root
    account = f"{IN_CONTAINER}/{WRITTEN}/accounting" if inside else str(own / "accounting")
    command = slots_command(nonce, account, processes)
    try:
        async with asyncio.timeout(WITHIN_S):
            if inside:
                answer = await engine.probe(session, command, told={}, timeout_s=WITHIN_S)
            else:
                answer = await in_a_thread_of_its_own(_run, [str(own / command[0]), *command[1:]])
    except (OSError, subprocess.SubprocessError) as e:
        # TimeoutError is an OSError.
        if engine.is_away(session):
            raise EngineSilent("its machine does not answer") from e
        raise BadReport(f"the account of libfgpu could not be asked for ({e or 'no answer in time'})") from e
    return read_slots(answer, nonce)


def _run(words: list[str]) -> Answer:
    done = subprocess.run(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=False,
        timeout=WITHIN_S,
        env=clean_environment(),
    )
    return Answer(done.stdout, done.returncode)
