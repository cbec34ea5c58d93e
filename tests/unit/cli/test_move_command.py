"""``fgpu move``: the database becomes another one, and never under a running Hub."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from commandline import failure, fgpu, filled, write_config
from fgpu_scheduler import Claim, Store


def test_the_sessions_of_one_database_are_in_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, data = write_config(tmp_path), tmp_path / "data"
    data.mkdir()
    filled(f"sqlite:///{data}/fgpu.sqlite")
    new = f"sqlite:///{tmp_path}/new.sqlite"
    with closing(Claim(f"sqlite:///{data}/fgpu.sqlite")) as claim:
        claim.take()
        assert "another Hub serves the sessions of" in failure(capsys, "move", new, "--config", config)[1]
    status, out, _ = fgpu(capsys, "move", new, "--config", config)
    assert status == 0
    assert out.startswith(
        "OK: 5 sessions, with all that belongs to them\nnext: write this URL into c.FGPU.db_url"
    )
    with closing(Store(new)) as store:
        store.connect_readonly()
        assert len(store.snapshot(0).sessions) == 5
    assert failure(capsys, "move", new, "--config", config) == (
        1,
        "the database that is copied to holds sessions already; make an empty one",
    )
