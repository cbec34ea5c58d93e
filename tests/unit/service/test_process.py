"""The service's start: without what keeps it safe it does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from fgpuspawner.service import process
from fgpuspawner.settings import FGPU


@pytest.mark.parametrize("key", ["", None])
def test_without_a_key_for_tickets_the_service_does_not_start(
    key: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FGPU_SETTINGS", FGPU(data_dir=str(tmp_path)).to_json())
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "sesame")
    monkeypatch.delenv("FGPU_FORECAST_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("FGPU_FORECAST_KEY", key)
    assert process.main() == 1
    assert "FGPU_FORECAST_KEY is not set" in capsys.readouterr().err
