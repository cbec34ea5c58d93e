"""What the meter tells the service, in a file."""

from __future__ import annotations

from pathlib import Path

import pytest

from fgpuspawner.meter.model import (
    METERS,
    Live,
    Meter,
    MeterFile,
    MeterState,
    Point,
)


def live(at_s: int, mib: int | None = 5) -> Live:
    meter = Meter(at_s, mib, 2048, 1.5, 25, 2.5, None)
    return Live(meter, (Point(at_s, mib, 1.5),))


def test_the_service_reads_what_the_hub_wrote(tmp_path: Path) -> None:
    assert MeterFile(tmp_path).read() == MeterState()
    told = MeterState(10, {3: live(1000)})
    METERS.write(tmp_path, told)
    reads = MeterFile(tmp_path)
    assert reads.read() == told
    assert reads.read() is reads.read(), "read once for each time that it is written"
    newer = MeterState(10, {3: live(1010)})
    METERS.write(tmp_path, newer)
    assert reads.read() == newer
    assert (tmp_path / "meters.json").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"sessions": 5}', '{"every_s": 1, "sessions": {"x": {}}}'])
def test_a_file_that_makes_no_sense_tells_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "meters.json").write_text(text)
    assert METERS.read(tmp_path) == MeterState()


def test_old_readings_become_unknown_with_their_time() -> None:
    told = MeterState(10, {3: live(1000)})
    assert told.of(3, 1060) == live(1000)
    assert told.of(4, 1060) is None
    old = told.of(3, 1061)
    assert old is not None
    assert (old.now.memory_used_mib, old.now.sm_percent, old.now.compute_received_percent) == (
        None,
        None,
        None,
    )
    assert old.now.trouble == "nothing has been measured since 1970-01-01 00:16:40 UTC"
    assert old.points == live(1000).points
