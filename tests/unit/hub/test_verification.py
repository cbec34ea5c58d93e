"""The proof that a session's limits are in force: what it says is noted, and the Hub's event loop waits for no disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from traitlets.config import Config

from fgpu_scheduler import EndCause, Placement, Request, Session, SessionState, Share
from fgpuspawner.engines.base import Endpoint, Installation, LaunchFailed
from fgpuspawner.engines.local.engine import LocalEngine
from fgpuspawner.hub.session_probes import Verification
from fgpuspawner.images.model import Catalogue
from fgpuspawner.isolation.backends import Interposer
from fgpuspawner.isolation.base import Backend, Host, Prepared
from fgpuspawner.isolation.choice import VERDICTS
from fgpuspawner.isolation.limits import Limits
from fgpuspawner.isolation.report import Answer
from fgpuspawner.settings import FGPU

ASKED = Request("alice", "", "python", "default", 500, 1000, 1024)
SESSION = Session(
    7, ASKED, SessionState.PREPARING, 0, placement=Placement("lab", (Share("GPU-1f", 500, 2048, 25),))
)
PREPARED = Prepared("interposer", Limits(7, "charge", ()))


class Unprobed(LocalEngine):
    """Sessions whose probe prints nothing that it should."""

    asked = 0

    async def probe(
        self, session: Session, command: Sequence[str], *, told: Mapping[str, str], timeout_s: float
    ) -> Answer:
        self.asked += 1
        return Answer(b"hello", 0)


async def proved(folder: Path, kind: type[Backend], *, has_driver: bool = True) -> Unprobed:
    settings = FGPU(data_dir=str(folder))
    engine = Unprobed(Installation("abc", settings, Config(), lambda: Catalogue(())), stop_timeout_s=1)
    backend = kind(Host(data=folder, own_root=False, native=None))
    verification = Verification(engine, backend, timeout_s=10, data=folder)
    await verification.prove(SESSION, PREPARED, Endpoint("127.0.0.1", 1, has_driver), {})
    return engine


async def test_what_is_not_proved_does_not_run_and_is_noted_beside_the_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[threading.Thread] = []
    flush = os.fsync
    monkeypatch.setattr(os, "fsync", lambda d: (flushed.append(threading.current_thread()), flush(d)))
    with pytest.raises(LaunchFailed) as failed:
        await proved(tmp_path, Interposer)
    assert failed.value.cause is EndCause.ISOLATION_FAILED
    (verdict,) = VERDICTS.read(tmp_path)
    assert (verdict.node_id, verdict.session_id, verdict.backend) == ("lab", 7, "interposer")
    assert verdict.problems
    assert flushed
    assert threading.current_thread() not in flushed, "all other users would wait for this disk"


@pytest.mark.parametrize(("kind", "has_driver"), [(Backend, True), (Interposer, False)])
async def test_where_nothing_holds_or_nothing_can_be_asked_nothing_is_proved(
    tmp_path: Path, kind: type[Backend], has_driver: bool
) -> None:
    engine = await proved(tmp_path, kind, has_driver=has_driver)
    assert engine.asked == 0
    assert VERDICTS.read(tmp_path) == ()
