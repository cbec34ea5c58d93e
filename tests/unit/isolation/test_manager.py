"""Isolation as the Hub has it: what it finds, chooses and writes, and that slots outlive a crash."""

from __future__ import annotations

import json
import logging
import os
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
import sessions

from fgpu_scheduler import BadSettings, Device, Node, Session, Share
from fgpuspawner.isolation import facts, limits, nvml_reader
from fgpuspawner.isolation.base import CannotPrepare
from fgpuspawner.isolation.choice import CHOICES
from fgpuspawner.isolation.manager import Isolation, choices_for
from fgpuspawner.isolation.native import Native
from fgpuspawner.settings import FGPU

SIMULATED = Device("GPU-simulated-lab-0", "lab", 0, "Simulated GPU 8192 MiB", 8192, 2000, True)
REAL = Device("GPU-1f", "rack", 0, "NVIDIA A100", 40960, 2000)
LAB = Node("lab", "default", 16000, 65536, (SIMULATED,))
RACK = Node("rack", "default", 16000, 65536, (REAL,))

pytestmark = pytest.mark.usefixtures("native_parts")


def settings(tmp_path: Path, **given: Any) -> FGPU:
    return FGPU(data_dir=str(tmp_path / "data"), accounting_dir=str(tmp_path / "shm"), **given)


def opened(tmp_path: Path, *nodes: Node, own_root: bool = True, **given: Any) -> Isolation:
    (tmp_path / "data").mkdir(exist_ok=True)
    found = Isolation(settings(tmp_path, **given), nodes or (LAB,))
    found.open(own_root=own_root, installation="abc")
    return found


def session(session_id: int, milli: int = 500, device: Device = SIMULATED) -> Session:
    return sessions.session(session_id, Share.of(device, milli), node=device.node_id)


# --- Opening ---


def test_which_and_why_is_said_and_written_down(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fgpu.isolation"):
        opened(tmp_path, LAB, RACK, context_mib=300)
    said = {r.getMessage(): r.levelname for r in caplog.records if r.getMessage().startswith("Node ")}
    assert set(said.values()) == {"INFO"}
    chosen = CHOICES.read(tmp_path / "data")
    assert [(c.node_id, c.backend) for c in chosen] == [("lab", "interposer"), ("rack", "interposer")]
    assert all(any(c.reason in line for line in said) for c in chosen)
    assert "not driver-cgroup: driver 580.65 has no memory limits" in chosen[1].reason


def test_missing_isolation_is_a_warning(
    tmp_path: Path, native_parts: Native, caplog: pytest.LogCaptureFixture
) -> None:
    native_parts.library.unlink()
    opened(tmp_path)
    (warned,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert "Node lab: isolation none: NOTHING holds a session to its slice" in warned.getMessage()
    assert "apt-get install gcc make libc6-dev" in warned.getMessage()


def test_hub_does_not_start_without_isolation_for_a_real_gpu(tmp_path: Path, native_parts: Native) -> None:
    native_parts.library.unlink()
    with pytest.raises(BadSettings, match="nothing isolates the sessions of node 'rack'"):
        opened(tmp_path, LAB, RACK)


def test_the_command_line_asks_without_writing(tmp_path: Path) -> None:
    (choice,) = choices_for(settings(tmp_path), [LAB], own_root=False)
    assert choice.backend.name == "interposer"
    assert not (tmp_path / "data").exists()
    assert not (tmp_path / "shm").exists()


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_a_simulated_machine_and_the_commands_are_written_for_everybody_to_read(
    tmp_path: Path, umask: int
) -> None:
    (tmp_path / "data").mkdir()
    before = os.umask(umask)
    try:
        opened(tmp_path)
    finally:
        os.umask(before)
    data = tmp_path / "data"
    machine = data / "simulated" / "lab"
    assert (machine / "machine").read_text() == (
        "gpu uuid=GPU-simulated-lab-0 memory_mib=8192 context_mib=0 name=Simulated GPU 8192 MiB\n"
    )
    assert (machine / "libcuda.so").readlink() == Path("libcuda.so.1")
    modes = {p.name: stat.S_IMODE(p.stat().st_mode) for p in machine.iterdir() if p.name != "libcuda.so"}
    assert modes == {
        "machine": 0o444,
        "libcuda.so.1": 0o755,
        "libnvidia-ml.so.1": 0o755,
        "ledger": 0o666,
        "log": 0o666,
    }
    assert not (machine / "libcuda.so.1").is_symlink(), "a link leads nowhere in a container"
    for folder in (machine, machine.parent, data / "tools", data / "tools" / "simulated"):
        assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    for program in (data / "tools").rglob("*-*"):
        assert stat.S_IMODE(program.stat().st_mode) == 0o755
        assert program.read_bytes().startswith(b"#!/usr/bin/env python3\n")
    assert sorted(p.name for p in (data / "tools").rglob("*-*")) == ["fgpu-smi", "fgpu-verify", "nvidia-smi"]


def test_what_running_sessions_have_mounted_stays_over_a_restart(
    tmp_path: Path, native_parts: Native
) -> None:
    opened(tmp_path)
    machine = tmp_path / "data" / "simulated" / "lab"
    (machine / "ledger").write_bytes(b"who holds what")
    before = {p.name: p.stat().st_ino for p in machine.iterdir()}
    opened(tmp_path)
    assert {p.name: p.stat().st_ino for p in machine.iterdir()} == before
    assert (machine / "ledger").read_bytes() == b"who holds what"
    # A newer build takes the old one's place; who has that mapped keeps it.
    native_parts.simulated["libcuda.so.1"].write_text("newer")
    opened(tmp_path)
    changed = {p.name for p in machine.iterdir() if p.stat().st_ino != before[p.name]}
    assert changed == {"libcuda.so.1", "libcuda.so"}  # a link to it


def test_what_only_the_installer_may_read_is_copied_for_the_users_of_containers(
    tmp_path: Path, native_parts: Native
) -> None:
    assert opened(tmp_path).host.native == native_parts
    for part in native_parts.parts:
        part.chmod(0o700)
    copied = opened(tmp_path).host.native
    assert copied == Native(tmp_path / "data" / "native")
    assert [part.read_text() for part in copied.parts] == [part.name for part in native_parts.parts]
    assert {stat.S_IMODE(part.stat().st_mode) for part in copied.parts} == {0o755}


# --- Contexts ---


def test_a_context_is_measured_once_for_each_model_and_driver_and_remembered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    monkeypatch.setattr(facts, "measure_context", lambda uuid: asked.append(uuid) or 411)
    twin = Device("GPU-2a", "rack", 1, "NVIDIA A100", 40960, 2000)
    both = Node("rack", "default", 16000, 65536, (REAL, twin))
    for _ in range(2):
        found = opened(tmp_path, LAB, both)
        assert found.host.context_mib == {"GPU-1f": 411, "GPU-2a": 411, "GPU-simulated-lab-0": 0}
    assert asked == ["GPU-1f"]
    assert json.loads((tmp_path / "data" / "context.json").read_text()) == {"NVIDIA A100, driver 580.65": 411}
    monkeypatch.setattr(facts, "driver_facts", lambda: {"driver": "590.1"})
    opened(tmp_path, both)
    assert asked == ["GPU-1f", "GPU-1f"], "another driver's contexts are others"


def test_a_context_that_cannot_be_measured_is_guessed_loudly_and_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(facts, "measure_context", lambda uuid: "cuInit failed with 999")
    assert opened(tmp_path, RACK).host.context_mib == {"GPU-1f": 512}
    assert "could not be measured (cuInit failed with 999); 512 MiB are charged" in caplog.text
    monkeypatch.setattr(facts, "measure_context", lambda uuid: 300)
    assert opened(tmp_path, RACK).host.context_mib == {"GPU-1f": 300}


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"NVIDIA A100, driver 580.65": "x"}', '{"NVIDIA A100, driver 580.65": 0}']
)
def test_a_memory_of_contexts_that_makes_no_sense_is_made_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "context.json").write_text(text)
    monkeypatch.setattr(facts, "measure_context", lambda uuid: 300)
    assert opened(tmp_path, RACK).host.context_mib == {"GPU-1f": 300}


def test_a_context_that_is_set_is_charged_as_it_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(facts, "measure_context", lambda uuid: pytest.fail("not asked for"))
    found = opened(tmp_path, LAB, RACK, context_mib=77)
    assert found.host.context_mib == {"GPU-1f": 77, "GPU-simulated-lab-0": 77}
    prepared = found.prepare(session(1), [1])
    assert prepared.limits.devices[0].context_mib == 77


# --- Sessions ---


def test_slots_are_those_that_live_sessions_leave_also_after_a_crash(tmp_path: Path) -> None:
    first = opened(tmp_path)
    a = first.prepare(session(1, 1000), [1]).limits
    b = first.prepare(session(2, 500), [1, 2]).limits
    again = opened(tmp_path)
    c = again.prepare(session(3, 500), [1, 2, 3]).limits
    assert [x.devices[0].slots for x in (a, b, c)] == [((0, 50),), ((50, 75),), ((75, 100),)]
    # 2 has ended: its folder goes, and its slots are free.
    d = again.prepare(session(4, 500), [1, 3, 4]).limits
    assert d.devices[0].slots == ((50, 75),)
    assert sorted(p.name for p in (tmp_path / "data" / "limits").iterdir()) == ["1", "3", "4"]
    in_memory = tmp_path / "shm" / "fgpu-abc"
    assert {p.name.partition("-")[0] for p in in_memory.iterdir()} == {"simulated", "owners", "lending"}
    assert sorted(p.name for p in (in_memory / "lending").iterdir()) == ["1", "3", "4"]


def test_the_folder_in_memory_goes_with_the_hub_unless_sessions_run(tmp_path: Path) -> None:
    found = opened(tmp_path)
    found.prepare(session(1), [1])
    found.close()
    assert (tmp_path / "shm" / "fgpu-abc").is_dir()
    found.remove(1)
    found.close()
    assert not (tmp_path / "shm" / "fgpu-abc").exists()


def test_unreadable_limits_are_logged_and_ignored(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    found = opened(tmp_path)
    own = tmp_path / "data" / "limits" / "1"
    own.mkdir(parents=True)
    (own / "limits").write_text("fgpu-limits 0\n")
    assert found.prepare(session(2), [1, 2]).limits.devices[0].slots == ((0, 25),)
    assert "The slots of session 1 are not known" in caplog.text


def test_other_folders_are_left_alone(tmp_path: Path) -> None:
    found = opened(tmp_path)
    folder = tmp_path / "data" / "limits"
    for name in ("notes", "12x", "²"):
        (folder / name).mkdir(parents=True)
        (tmp_path / "shm" / "fgpu-abc" / name).mkdir(parents=True)
    found.prune([])
    assert sorted(p.name for p in folder.iterdir()) == ["12x", "notes", "²"]


def test_session_of_a_removed_node_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CannotPrepare, match="node rack was removed"):
        opened(tmp_path).prepare(session(1, device=REAL), [1])


# --- What there is ---


def test_an_mps_daemon_is_known_by_its_pipe_and_its_process(tmp_path: Path) -> None:
    assert "no MPS daemon has its pipes in" in str(facts.mps_trouble(tmp_path))
    (tmp_path / "control").touch()
    assert "is no pipe of an MPS daemon" in str(facts.mps_trouble(tmp_path))
    (tmp_path / "control").unlink()
    os.mkfifo(tmp_path / "control")
    pid = tmp_path / "nvidia-cuda-mps-control.pid"
    assert "start it with nvidia-cuda-mps-control -d" in str(facts.mps_trouble(tmp_path))
    pid.write_text("4194305\n")
    assert "has ended" in str(facts.mps_trouble(tmp_path))
    pid.write_text(f"{os.getpid()}\n")
    assert facts.mps_trouble(tmp_path) is None
    (tmp_path / "control").unlink()
    with socket.socket(socket.AF_UNIX) as control:
        control.bind(str(tmp_path / "control"))
        assert facts.mps_trouble(tmp_path) is None


def test_a_childs_environment_loads_nothing_of_the_hubs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LD_PRELOAD", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "FGPU_SETTINGS", "PYTHONPATH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LANG", "C")
    found = nvml_reader.clean_environment()
    assert found["LANG"] == "C"
    assert not [name for name in found if name.startswith(("LD_", "CUDA_", "FGPU_", "PYTHON"))]


# --- A slice that changes ---


def test_a_slice_that_changes_has_other_limits_and_another_revision(tmp_path: Path) -> None:
    isolation = opened(tmp_path)
    held, neighbour = session(1, 500), session(2, 500)
    for one in (held, neighbour):
        isolation.prepare(one, [1, 2])
    before = limits.read(isolation.folder(1)).devices[0]
    assert isolation.resizes(held) is None
    isolation.resize(session(1, 1000))
    (after,) = limits.read(isolation.folder(1)).devices
    assert (after.memory_mib, after.compute_percent) == (4096, 50)
    assert (before.memory_mib, before.context_mib) == (2048, after.context_mib)
    beside = limits.read(isolation.folder(2)).devices[0].slots
    taken = {h for first, end in after.slots for h in range(first, end)}
    assert len(taken) == 50
    assert not taken & {h for first, end in beside for h in range(first, end)}
    assert (isolation.folder(1) / "revision").read_bytes() == (1).to_bytes(16, "little")
    modes = [stat.S_IMODE((isolation.folder(1) / name).stat().st_mode) for name in ("limits", "revision")]
    assert modes == [0o444, 0o444]


def test_slice_cannot_change_under_other_backends(tmp_path: Path, native_parts: Native) -> None:
    isolation = opened(tmp_path, isolation="none")
    isolation.prepare(session(1), [1])
    assert "(isolation 'none')" in (isolation.resizes(session(1)) or "")
