"""How far a pull is, from an engine's own lines; and what is told of it."""

from __future__ import annotations

from pathlib import Path

from fgpuspawner.engines.docker.images.pull_output import PullMeter
from fgpuspawner.images.pull_state import MIB, Phase, Progress, PullState, read_pulls, write_pulls


def line(status: str, layer: str = "1", done: int | None = None, of: int | None = None) -> dict[str, object]:
    detail = {} if done is None else {"current": done * MIB, "total": of * MIB if of else None}
    return {"status": status, "id": layer, "progressDetail": detail}


def test_total_and_time_left_need_all_sizes() -> None:
    meter = PullMeter()
    meter.note({"status": "Pulling from lab/torch", "id": "1.0"}, 0)
    for layer in "abc":
        meter.note(line("Pulling fs layer", layer), 0)
    meter.note(line("Already exists", "a"), 0)
    meter.note(line("Downloading", "b", 1, 10), 0)
    meter.note(line("Downloading", "b", 3, 10), 2)
    assert meter.progress(2) == Progress(1, 3, 3 * MIB, None, None)
    meter.note(line("Downloading", "c", 1, 10), 2)
    found = meter.progress(2)
    assert (found.bytes_done, found.bytes_total) == (4 * MIB, 20 * MIB)
    # 4 MiB took 2 s.
    assert found.seconds_left == 8
    assert found.words() == "1 of 3 layers, 4 of 20 MiB, about 8 s left"


def test_fetched_layers_have_no_time_left() -> None:
    meter = PullMeter()
    meter.note(line("Downloading", "a", 1, 10), 0)
    meter.note(line("Download complete", "a"), 3)
    meter.note(line("Extracting", "a", 2, 10), 4)
    assert meter.progress(4) == Progress(0, 1, 10 * MIB, 10 * MIB, None, unpacks=True)
    meter.note(line("Pull complete", "a"), 5)
    assert meter.progress(5).layers_done == 1


def test_broken_download_is_shown_until_the_layer_goes_on() -> None:
    meter = PullMeter()
    meter.note(line("Downloading", "a", 1, 10), 0)
    meter.note(line("Retrying in 5 seconds", "a"), 1)
    assert meter.progress(1).broke_off
    meter.note(line("Downloading", "a", 2, 10), 6)
    assert not meter.progress(6).broke_off


def test_a_small_layer_without_a_size_does_not_keep_the_total_unknown() -> None:
    meter = PullMeter()
    meter.note(line("Pulling fs layer", "tiny"), 0)
    meter.note(line("Downloading", "a", 1, 10), 0)
    meter.note(line("Download complete", "tiny"), 0)
    assert meter.progress(0).bytes_total == 10 * MIB


def test_pull_without_sizes_has_no_total_and_no_time_left() -> None:
    meter = PullMeter()
    meter.note(line("Downloading", "a", 1), 0)
    meter.note(line("Downloading", "a", 5), 5)
    assert meter.progress(5) == Progress(0, 1, 5 * MIB, None, None)
    assert meter.progress(5).words() == "0 of 1 layers, 5 MiB so far"


def test_invalid_lines_of_a_pull_are_ignored() -> None:
    meter = PullMeter()
    for told in ({}, {"status": 1, "id": "a"}, {"status": "Downloading"}, {"status": "Downloading", "id": 3}):
        meter.note(told, 0)
    meter.note({"status": "Downloading", "id": "a", "progressDetail": "much"}, 0)
    assert meter.progress(0) == Progress(0, 1)


def test_a_copy_is_counted_in_bytes_and_never_above_its_size() -> None:
    meter = PullMeter()
    meter.count(10 * MIB, 100 * MIB, 0)
    meter.count(60 * MIB, 100 * MIB, 5)
    assert meter.progress(5) == Progress(0, 0, 60 * MIB, 100 * MIB, 4)
    meter.count(101 * MIB, 100 * MIB, 6)
    assert meter.progress(6).bytes_done == 100 * MIB


def test_written_states_are_read_until_they_are_old(tmp_path: Path) -> None:
    states = {
        7: PullState(Phase.FETCHING, Progress(1, 2, 3, 4, 5, unpacks=True), 2, "x"),
        8: PullState(Phase.WAITING),
    }
    write_pulls(tmp_path, states, now_s=1000)
    assert read_pulls(tmp_path, now_s=1009) == states
    assert read_pulls(tmp_path, now_s=1011) == {}
    assert read_pulls(tmp_path, now_s=900) == {}


def test_invalid_file_of_states_is_empty(tmp_path: Path) -> None:
    assert read_pulls(tmp_path, now_s=0) == {}
    for text in ("", "[]", "{}", '{"written_at_s": 0, "sessions": {"a": 1}}', '{"written_at_s": "x"}'):
        (tmp_path / "pulls.json").write_text(text)
        assert read_pulls(tmp_path, now_s=0) == {}
