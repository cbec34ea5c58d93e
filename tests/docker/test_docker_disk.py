"""Sessions that take too much of the disk, in real containers on an engine that cannot limit them itself."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from dockerhub import DockerHub, Engine

from hubprocess import until

SETTINGS = {
    "session_disk_mib": 64,
    "home_disk_mib": 32,
    "home_files": 1000,
    "disk_every_s": 5,
    "disk_grace_s": 5,
}
COURSE = "fgpu-test-course"
HOME = f"c.FGPUSpawner.volumes = {{'fgpu-test-home-{{username}}': '/home/jovyan', '{COURSE}': '/course'}}\n"
TAKE = """
import ctypes, sys
file = open(sys.argv[1], "ab")
offset, length, KEEP_SIZE = ctypes.c_long(0), ctypes.c_long(int(sys.argv[2]) << 20), 1
assert ctypes.CDLL(None).fallocate(file.fileno(), KEEP_SIZE, offset, length) == 0
"""
NAMELESS = """
import ctypes, os, sys, threading, time
if os.fork():
    sys.exit()
file = open(sys.argv[1], "wb")
os.posix_fallocate(file.fileno(), 0, int(sys.argv[2]) << 20)
os.unlink(sys.argv[1])
for kept in (0, 1, 2):
    os.close(kept)
if len(sys.argv) > 3:
    threading.Thread(target=time.sleep, args=(3600,)).start()
    # The first thread alone ends: SYS_exit.
    ctypes.CDLL(None).syscall(60, 0)
time.sleep(3600)
"""
MANY = "import os\nfor n in range(1500): open(f'/home/jovyan/{n}', 'w').close()"


@pytest.fixture(scope="module")
def limited(make_hub: Callable[..., DockerHub]) -> DockerHub:
    if os.geteuid() != 0:
        pytest.skip("only root can look into containers' files")
    found = make_hub(**SETTINGS)
    found.after += HOME
    return found.start()


def ended(hub: DockerHub, user: str) -> str:
    until(lambda: hub.last(user).end_cause == "DISK_LIMIT", within_s=120, what="it is ended for the disk")
    return hub.last(user).message or ""


def test_session_with_blocks_behind_a_files_end_is_warned_and_then_ended(
    engine: Engine, limited: DockerHub
) -> None:
    running = limited.running("bob", fgpu="0.2")
    engine.python_in(running.id, TAKE, "/tmp/hidden", "70")
    until(lambda: "session takes" in (limited.sessions()["bob/"].message or ""), what="a warning")
    warning = limited.sessions()["bob/"].message or ""
    assert "of 0.1 GiB" in warning
    assert "within 5 s, or the session is ended" in warning
    assert "takes" in ended(limited, "bob")


@pytest.mark.parametrize(
    ("user", "program", "by", "takes"),
    [
        ("hera", (TAKE, "/home/jovyan/x", "40"), "", "this home takes .* GiB"),
        ("many", (MANY,), "", "this home takes .* of 1000 files"),
        ("nora", (NAMELESS, "/tmp/x", "100"), "", "this session takes"),
        ("nils", (NAMELESS, "/home/jovyan/x", "40", "thread"), "", "this home takes"),
        ("rosa", (TAKE, "/etc/hosts", "70"), "0:0", "this session takes"),
    ],
    ids=["home", "files at home", "removed open file", "removed open file at home", "the engine's file"],
)
def test_session_above_its_limit_is_ended(
    engine: Engine, limited: DockerHub, user: str, program: tuple[str, ...], by: str, takes: str
) -> None:
    try:
        engine.python_in(limited.running(user, fgpu="0.2").id, *program, user=by)
        said = ended(limited, user)
        assert re.search(takes, said), said
    finally:
        limited.end_all_but(set())
        engine.remove_volume(f"fgpu-test-home-{user}")


FILL_SHM = """
try:
    with open("/dev/shm/x", "wb") as file:
        while True:
            file.write(b"x" * (1 << 20))
except OSError:
    pass
"""


def test_full_shared_memory_harms_only_its_session(engine: Engine, limited: DockerHub) -> None:
    before = os.statvfs("/dev/shm").f_bfree
    one, other = limited.running("carl", fgpu="0.2"), limited.running("cora", fgpu="0.2")
    engine.python_in(one.id, FILL_SHM)
    engine.python_in(other.id, "open('/dev/shm/x', 'wb').write(b'x' * (16 << 20))")
    assert before - os.statvfs("/dev/shm").f_bfree < (32 << 20) / 4096, "the host's own is another"
    assert {limited.states()[f"{user}/"] for user in ("carl", "cora")} == {"RUNNING"}
