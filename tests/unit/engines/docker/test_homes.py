"""Homes that are mounted into what runs already, with all of the host's mounts shared, as systemd makes them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOST = """
import os, subprocess, sys, time
from pathlib import Path
from fgpuspawner.engines.docker import homes

def run(*words):
    subprocess.run(words, check=True)

run("mount", "--make-rshared", "/")
here = Path(sys.argv[1])
disk, home = here / "disk", here / "disk" / "alice"
disk.mkdir()
run("mount", "-t", "tmpfs", "none", str(disk))
for sub in ("early", "late"):
    (home / sub).mkdir(parents=True)
run("mount", "-t", "tmpfs", "none", str(home / "early"))
(home / "early" / "precious").touch()
homes.PLACE = here
own = homes.Homes("x")
own.open()
place, = own.places("warm-1", 1)
target = here / "target"
target.mkdir()
inside = f"mount --bind {place} {target} && echo there && exec sleep 60"
container = subprocess.Popen(
    ["unshare", "-m", "--propagation", "slave", "sh", "-c", inside], stdout=subprocess.PIPE
)
container.stdout.readline()
"""
AT_THE_END = """
container.kill()
container.wait()
own.remove(["warm-1"])
assert own.names() == [], own.names()
own.close()
assert not (here / "fgpu-homes-x").exists()
"""


def on_a_host(folder: Path, code: str) -> str:
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, for mounts of its own")
    command = ["unshare", "-m", sys.executable, "-c", HOST + code + AT_THE_END, str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_hosts_mounts_in_a_home_stay_after_the_session(tmp_path: Path) -> None:
    output = on_a_host(
        tmp_path,
        """
own.bring("warm-1", [(home, str(target))], pid=container.pid)
run("mount", "-t", "tmpfs", "none", str(home / "late"))
(home / "late" / "precious").touch()
container.kill()
container.wait()
own.remove(["warm-1"])
print(sorted(str(p.relative_to(home)) for p in home.glob("*/precious")))
""",
    )
    assert output == "['early/precious', 'late/precious']\n"


def test_mounts_in_a_home_are_in_the_session(tmp_path: Path) -> None:
    output = on_a_host(
        tmp_path,
        """
own.bring("warm-1", [(home, str(target))], pid=container.pid)
print(os.listdir(f"/proc/{container.pid}/root{target}/early"))
""",
    )
    assert output == "['precious']\n"


def test_a_home_is_mounted_once(tmp_path: Path) -> None:
    output = on_a_host(
        tmp_path,
        """
own.bring("warm-1", [(home, str(target))], pid=container.pid)
print([line.split()[4] for line in open("/proc/self/mountinfo")].count(str(place)))
""",
    )
    assert output == "1\n"
