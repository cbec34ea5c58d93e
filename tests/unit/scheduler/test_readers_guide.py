"""The guide at the top of the core."""

from __future__ import annotations

import re
from pathlib import Path

import fgpu_scheduler.core


def test_the_guide_names_every_file_of_the_core_once_and_no_other() -> None:
    folder = Path(fgpu_scheduler.core.__file__).parent
    named = re.findall(r"^    (\w+) {2,}", fgpu_scheduler.core.__doc__ or "", flags=re.MULTILINE)
    there = [path.stem for path in folder.iterdir() if path.stem.strip("_") == path.stem]
    assert sorted(named) == sorted(there)
