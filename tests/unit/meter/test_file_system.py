"""Files of a whole file system are counted while the Hub runs, and no longer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import psutil


def test_a_count_ends_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    begun = tmp_path / "begun"
    os.mkfifo(begun)
    endless = tmp_path / "du"
    endless.write_text(f"#!/bin/sh\necho $$ > {begun}\nexec sleep infinity\n")
    endless.chmod(0o755)
    count = "from fgpuspawner.meter.file_system import nameless_bytes; nameless_bytes('/')"
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    hub = subprocess.Popen([sys.executable, "-c", count], env=environment)
    du = psutil.Process(int(begun.read_text()))
    hub.kill()
    hub.wait()
    _, alive = psutil.wait_procs([du], timeout=30)
    for process in alive:
        process.kill()
    assert not alive
