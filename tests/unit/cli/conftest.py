from __future__ import annotations

from pathlib import Path

import pytest

from commandline import Fgpu


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'fgpu.sqlite'}"


@pytest.fixture
def fgpu(capsys: pytest.CaptureFixture[str]) -> Fgpu:
    return Fgpu(capsys)
