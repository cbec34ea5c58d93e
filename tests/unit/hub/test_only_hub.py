"""One Hub for an installation on a machine, and the note in the data folder that says which."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

from fgpuspawner.hub.only_hub import NOTE, OnlyHub


def test_a_note_that_a_full_disk_left_empty_refuses_no_start(tmp_path: Path) -> None:
    (tmp_path / "limits/1").mkdir(parents=True)
    (tmp_path / NOTE).touch()
    only = OnlyHub(SimpleNamespace(init_db=None))
    only._data = tmp_path
    only.serve(f"test-{os.getpid()}")
    assert (tmp_path / NOTE).read_text() == f"test-{os.getpid()}"
    only._name.close()
