"""Notices to owners by the administrator's program: each event once, and failures of the program."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fgpu_scheduler import (
    BadSettings,
    Device,
    EndCause,
    Node,
    Placement,
    Request,
    Session,
    SessionState,
    Share,
    Store,
)
from fgpu_scheduler.core.planner import Plan, StartDecision
from fgpu_scheduler.core.reclaim import Warn, WithdrawWarning
from fgpuspawner.hub import notices
from fgpuspawner.hub.notices import OLD_S, WAITED_S, Notices
from fgpuspawner.settings import FGPU

S = SessionState
GPU = Device("GPU-1", "lab", 0, "A100", 40_960, 1000)


class Clock:
    """A clock that the test sets."""

    def __init__(self) -> None:
        self.at_s = 0

    def now_s(self) -> int:
        return self.at_s

    def __call__(self) -> int:
        return self.at_s


class Lab:
    """A store, and a program that records its notices."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = Store("sqlite://")
        self.store.open()
        self.store.set_nodes([Node("lab", "default", 8000, 65_536, (GPU,))], now_s=0)
        self.clock = Clock()
        self.program = folder / "program"
        self.does("cat >>told; echo >>told")
        self.hub = self.new_hub()

    def does(self, what: str) -> None:
        self.program.write_text(f"#!/bin/sh\ncd {self.folder}\n{what}\n")
        self.program.chmod(0o755)

    def new_hub(self) -> Notices:
        return Notices(self.store, [str(self.program)], self.clock, data=self.folder, site_name="Lab GPUs")

    @property
    def told(self) -> list[dict[str, object]]:
        path = self.folder / "told"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def submit(self, server_name: str = "") -> Session:
        asked = Request("alice", server_name, "python", "default", 500, 1000, 1024)
        return self.store.submit([asked], now_s=self.clock())[0]

    def runs_out_of_memory(self) -> None:
        session = self.submit()
        self.start(session)
        self.end(session, EndCause.OOM)

    def start(self, session: Session) -> None:
        placed = Placement("lab", (Share.of(GPU, 500),))
        self.store.commit(
            Plan(self.store.version(), (StartDecision(session.id, placed),)), now_s=self.clock()
        )
        self.store.move(session.id, S.PREPARING, now_s=self.clock())
        self.store.move(session.id, S.RUNNING, now_s=self.clock())

    def end(self, session: Session, cause: EndCause, message: str | None = None) -> None:
        self.store.move(session.id, S.TERMINATING, now_s=self.clock(), cause=cause, message=message)
        self.store.move(session.id, S.TERMINATED, now_s=self.clock())


@pytest.fixture
async def lab(tmp_path: Path) -> Iterator[Lab]:  # type: ignore[misc]
    made = Lab(tmp_path)
    await made.hub.look()
    yield made
    made.store.close()


async def test_start_is_notified_only_after_a_wait(lab: Lab) -> None:
    at_once = lab.submit()
    lab.clock.at_s = WAITED_S - 1
    lab.start(at_once)
    waited = lab.submit("gpu-2")
    lab.clock.at_s += 5400
    lab.start(waited)
    await lab.hub.look()
    (told,) = lab.told
    assert told == {
        "event": "started",
        "at": "1970-01-01 01:30:59Z",
        "user": "alice",
        "session": waited.id,
        "server": "gpu-2",
        "image": "python",
        "amount": "0.5 fGPU",
        "resource_group": "default",
        "cause": None,
        "ends_at": None,
        "message": None,
        "subject": "Lab GPUs: Your session (Python 2) has started",
        "text": "Your session (Python 2) has started. It has 0.5 fGPU, and waited for 1:30 (hours:minutes).",
    }


async def test_warning_is_notified_unless_it_was_withdrawn(lab: Lab) -> None:
    session = lab.submit()
    lab.start(session)
    lab.store.reclaim([Warn(session.id, EndCause.IDLE, 10)], lab.store.version(), now_s=0)
    await lab.hub.look()
    (told,) = lab.told
    assert (told["event"], told["cause"], told["ends_at"]) == ("ends_soon", "IDLE", "1970-01-01 00:00:10Z")
    assert told["text"] == (
        "Your session (Python 1) will end soon. "
        "It is idle: use it or keep it running. It ends at 1970-01-01 00:00:10Z."
    )
    lab.store.reclaim([WithdrawWarning(session.id)], lab.store.version(), now_s=1)
    lab.store.reclaim([Warn(session.id, EndCause.TIME_LIMIT, 700)], lab.store.version(), now_s=2)
    lab.store.reclaim([WithdrawWarning(session.id)], lab.store.version(), now_s=3)
    await lab.hub.look()
    assert len(lab.told) == 1


async def test_end_is_notified_with_its_reason_unless_a_user_ended_it(lab: Lab) -> None:
    for cause, message in ((EndCause.USER, None), (EndCause.OOM, None), (EndCause.IDLE, "it was idle")):
        session = lab.submit()
        lab.start(session)
        lab.end(session, cause, message)
    waits = lab.submit()
    lab.store.move(waits.id, S.CANCELLED, now_s=0, cause=EndCause.QUEUE_TIMEOUT)
    await lab.hub.look()
    assert [(told["cause"], str(told["text"]).partition("Why: ")[2]) for told in lab.told] == [
        ("OOM", "it ran out of memory."),
        ("IDLE", "it was idle."),
        ("QUEUE_TIMEOUT", "waited longer than the queue allows."),
    ]


async def test_restarted_hub_continues_after_the_last_notice(lab: Lab) -> None:
    session = lab.submit()
    lab.start(session)
    await lab.hub.look()
    lab.end(session, EndCause.OOM)
    again = lab.new_hub()
    await again.look()
    await again.look()
    await lab.new_hub().look()
    assert [told["event"] for told in lab.told] == ["ended"]


async def test_earlier_and_old_events_are_not_notified(lab: Lab) -> None:
    lab.runs_out_of_memory()
    (lab.folder / notices.TOLD.name).unlink()
    await lab.new_hub().look()
    lab.runs_out_of_memory()
    lab.clock.at_s = OLD_S + 1
    await lab.hub.look()
    assert lab.told == []


async def test_invalid_position_file_does_not_stop_notices(lab: Lab) -> None:
    for broken in ('{"told": 100000}', "{", '{"told": null}'):
        (lab.folder / notices.TOLD.name).write_text(broken)
        hub = lab.new_hub()
        await hub.look()
        lab.runs_out_of_memory()
        await hub.look()
    assert len(lab.told) == 3


async def test_failed_program_is_logged_and_the_next_notice_is_sent(
    lab: Lab, caplog: pytest.LogCaptureFixture
) -> None:
    lab.does("echo first >&2; echo no such user >&2; exit 67")
    lab.runs_out_of_memory()
    with caplog.at_level(logging.WARNING):
        await lab.hub.look()
    assert caplog.messages == [f"An owner was not told: {lab.program} ended with status 67: no such user"]
    lab.does("cat >>told; echo >>told")
    lab.runs_out_of_memory()
    await lab.hub.look()
    assert len(lab.told) == 1


async def test_hanging_program_is_killed_with_its_children(
    lab: Lab, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(notices, "PROGRAM_TIMEOUT_S", 0.5)
    lab.does("(sleep 60; touch late) & sleep 60")
    lab.runs_out_of_memory()
    began_s = time.monotonic()
    await lab.hub.look()
    assert time.monotonic() - began_s < 30
    assert caplog.messages == [f"An owner was not told: {lab.program} did not end within 0.5 s"]


async def test_program_gets_few_variables_of_the_hubs_environment(
    lab: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIGPROXY_AUTH_TOKEN", "planted")
    lab.does("env >seen")
    lab.runs_out_of_memory()
    await lab.hub.look()
    names = {line.partition("=")[0] for line in (lab.folder / "seen").read_text().splitlines()}
    assert names <= {*notices.KEPT, "PWD", "OLDPWD", "SHLVL", "_"}


def test_a_command_that_is_no_program_is_refused_with_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("hello")
    for program in ("mail", str(tmp_path / "none"), str(tmp_path / "text"), str(tmp_path)):
        with pytest.raises(BadSettings, match=r"notice_command begins with .*; it must be the absolute path"):
            FGPU(notice_command=[program, "--from", "lab"]).checked()
