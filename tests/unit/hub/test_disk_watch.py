"""Looks at what sessions take of the disk: what one of them does hides no other, and no file hides."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace

import pytest
from sessions import session

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    Session,
    Store,
)
from fgpuspawner.engines.base import EngineSilent
from fgpuspawner.hub import disks
from fgpuspawner.hub.disks import HubDisk, SessionDisks, close_machine
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.meter.disk import DISK, MIB, DiskLimit, DiskLimits, DiskUse, FolderUse
from fgpuspawner.meter.file_system import ANSWERS, ASKED, answer
from fgpuspawner.settings import FGPU
from hubprocess import until


class Fake:
    """Engine and scheduler: session 1 cannot be looked at, the others take too much."""

    def __init__(self, failure: Exception, *mounts: Path) -> None:
        self.failure = failure
        self.mounts = tuple(map(str, mounts))
        self.warned: list[int] = []
        self.closed: list[str | None] = []

    async def close(self, reason: str | None) -> None:
        self.closed.append(reason)

    async def disk_use(self, session: Session) -> DiskUse:
        if session.id == 1:
            raise self.failure
        return DiskUse(FolderUse(2 << 30), mounts=self.mounts)

    async def live(self) -> tuple[Session, ...]:
        return session(1), session(2)

    async def warn(
        self, session_id: int, message: str | None, cause: EndCause = EndCause.DISK_LIMIT
    ) -> Session:
        self.warned.append(session_id)
        return session(session_id)

    async def end(self, session_id: int, cause: EndCause, message: str | None = None) -> Session:
        raise AssertionError


@pytest.mark.parametrize("failure", [EngineSilent("away"), OSError("gone"), KeyError("State")])
async def test_unreadable_session_does_not_hide_others(failure: Exception, tmp_path: Path) -> None:
    fake = Fake(failure)
    limits = DiskLimits(DiskLimit(1024), DiskLimit(), 600)
    await SessionDisks(fake, fake, limits, data=tmp_path, every_s=60, close=fake.close).look()
    assert fake.warned == [2]
    assert list(DISK.read(tmp_path)) == [2]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, which programs of a session write to."""
    found = tmp_path / "disk"
    found.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", found], capture_output=True, check=False).returncode:
        pytest.skip("only root can mount a file system")
    yield found
    subprocess.run(["umount", "-l", found], check=True)


def in_flight(path: Path, mib: int) -> tuple[socket.socket, socket.socket]:
    """Make a file, remove it, and have its only descriptor on the way between two sockets: no process shows it."""
    ends = socket.socketpair()
    with path.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, mib * MIB)
        path.unlink()
        socket.send_fds(ends[0], [b"x"], [file.fileno()])
    return ends


async def test_machine_is_closed_while_unexplained_removed_files_take_too_much(
    disk: Path, tmp_path: Path
) -> None:
    fake, limits = Fake(EngineSilent("away"), disk), DiskLimits(DiskLimit(8), DiskLimit(), 600)
    before = in_flight(disk / "of the system itself", 20)
    watch = SessionDisks(fake, fake, limits, data=tmp_path, every_s=60, close=fake.close)
    await watch.look()
    await watch.compare()
    (disk / "a file with a name").write_bytes(b"x" * 20 * MIB)
    await watch.compare()
    assert fake.closed == [None], "what was there first, and what has a name, is explained"
    ends = in_flight(disk / "x", 9)
    await watch.compare()
    await watch.compare()
    reason = f"0.0 GiB of {disk} are taken by removed files that are still open"
    assert fake.closed == [None, reason]
    # A Hub that is started again knows what was there at first.
    again = SessionDisks(fake, fake, limits, data=tmp_path, every_s=60, close=fake.close)
    await again.compare()
    assert fake.closed == [None, reason, reason]
    for end in ends:
        end.close()
    await again.compare()
    assert fake.closed == [None, reason, reason, None]
    for end in before:
        end.close()


AS_NOBODY = """
import os, sys
from pathlib import Path
from fgpuspawner.meter.file_system import counted
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
top, data, answers = sys.argv[1:]
print(*counted(top, Path(data), Path(answers)))
"""


def test_root_counts_for_a_hub_that_is_not_root(disk: Path) -> None:
    with TemporaryDirectory() as folder:
        data, answers = Path(folder, "data"), Path(folder, "run")
        for path in (data, answers):
            path.mkdir()
        Path(folder).chmod(0o755)
        os.chown(data, 65534, 65534)
        data.chmod(0o700)
        # Only whole file systems: a Hub that was taken over has root read nothing else.
        (disk / "below").mkdir()
        ASKED.write(data, {str(disk / "below"): 1, "/proc": 2})
        answer(data, answers)
        assert ANSWERS.read(answers) == {}
        ends = in_flight(disk / "x", 9)
        hub = subprocess.Popen(
            [sys.executable, "-c", AS_NOBODY, str(disk), str(data), str(answers)], stdout=subprocess.PIPE
        )
        try:
            until(lambda: str(disk) in ASKED.read(data))
            answer(data, answers)
            said, _ = hub.communicate(timeout=60)
        finally:
            hub.kill()
        assert said.split() == [str(9 * MIB).encode()] * 2
        for end in ends:
            end.close()


def test_a_closed_machine_starts_no_session_and_an_administrators_cordon_stays(
    tmp_path: Path, store: Store
) -> None:
    settings = FGPU(
        data_dir=str(tmp_path), nodes=[{"name": "lab"}, {"name": "away", "engine": "ssh://away"}],
        hub_address="10.0.0.1", isolation="none",
    )  # fmt: skip
    nodes = tuple(
        Node(
            name,
            "default",
            1000,
            1024,
            tuple(Device(f"GPU-{name}{n}", name, n, "A100", 8192, 2000) for n in (0, 1)),
        )
        for name in ("lab", "away")
    )
    store.set_nodes(nodes, now_s=0)
    store.set_cordon("GPU-lab1", "a fan is broken", now_s=0)
    reason = "30.0 GiB of /srv are taken by removed files that are still open"
    isolation = Isolation(settings, nodes)

    def cordons() -> dict[str, str | None]:
        return {d.uuid: d.cordon_reason for node in store.snapshot(0).nodes for d in node.devices}

    for why in (reason, reason, None, None):
        close_machine(store, isolation, why)
        assert cordons() == {
            "GPU-lab0": why, "GPU-lab1": "a fan is broken", "GPU-away0": None, "GPU-away1": None
        }  # fmt: skip


async def test_ending_hub_logs_that_its_reserve_could_not_be_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ended: list[str] = []

    async def cleanup() -> None:
        ended.append("cleanup")

    app = SimpleNamespace(cleanup=cleanup)
    HubDisk(app, tmp_path).exit_on_full_disk()

    def unreadable(data: Path) -> None:
        raise OSError(f"{data} cannot be read")

    monkeypatch.setattr(disks, "room_of", unreadable)
    await app.cleanup()
    assert ended == ["cleanup"]
    assert f"could not be given up: {tmp_path} cannot be read" in caplog.text
