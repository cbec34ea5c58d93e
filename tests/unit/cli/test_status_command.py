"""``fgpu status``: what it prints, and as JSON."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from commandline import AT_S, Fgpu, filled, node, request, write_config
from fgpu_scheduler import (
    NodeState,
    Policy,
    Request,
    Store,
    plan,
)
from fgpuspawner.isolation.choice import CHOICES, StoredChoice

ROW = re.compile(r" {2,}")


def section(out: str, name: str) -> list[list[str]]:
    """Return a table's rows, in cells."""
    text = out.partition(f"{name}\n")[2].partition("\n\n")[0]
    return [ROW.split(line.strip()) for line in text.splitlines()]


def test_status_shows_capacity_sessions_and_the_queue(url: str, fgpu: Fgpu) -> None:
    filled(url)
    status, out, err = fgpu("status", "--db", url)
    assert (status, err) == (0, "")
    assert out.startswith(
        "SIMULATED GPUs: the queue and the sessions are real, the GPUs are not\n\nCapacity\n"
    )
    assert section(out, "Capacity") == [
        ["group default: 1.5 of 2 fGPU in use"],
        ["node local: 3 of 8 CPU, 3072 of 16384 MiB"],
        ["0: 1.5 of 2 fGPU, Tesla T4, GPU-local-0 (simulated)"],
    ]
    amount = "0.5 fGPU (simulated)"
    assert section(out, "Sessions") == [
        ["id", "user/server", "state", "amount", "node", "since"],
        ["1", "alice/gpu-2", "RUNNING", amount, "local", "2026-09-21 14:13:22Z"],
        ["2", "zoe/", "TERMINATING", amount, "local", "2026-09-21 14:13:22Z"],
        ["3", "bob/", "PREPARING", amount, "local", "2026-09-21 14:13:24Z"],
    ]
    assert section(out, "Queue") == [
        ["position", "id", "user/server", "amount", "group", "since", "why"],
        ["1", "4", "carol/", "1 fGPU", "default", "2026-09-21 14:13:26Z",
         "a place is kept for it"],
        ["2", "5", "dave/big", "1.5 fGPU", "default", "2026-09-21 14:13:26Z",
         "1.5 fGPU is not free, only 0.5 is"],
    ]  # fmt: skip


def test_status_as_json(url: str, fgpu: Fgpu) -> None:
    filled(url)
    status, out, err = fgpu("status", "--json", "--db", url)
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    assert (found["version"], found["simulated"]) == (1, True)
    (group,) = found["groups"]
    assert (group["name"], group["fgpu_used"], group["fgpu_total"]) == ("default", "1.5", "2")
    assert group["nodes"][0]["devices"] == [
        {
            "uuid": "GPU-local-0",
            "index": 0,
            "model": "Tesla T4",
            "memory_mib": 8192,
            "fgpu_total": "2",
            "fgpu_used": "1.5",
            "simulated": True,
            "cordoned": False,
            "cordon_reason": None,
        }
    ]
    assert found["sessions"][0] == {
        "id": 1,
        "user": "alice",
        "server_name": "gpu-2",
        "state": "RUNNING",
        "amount": "0.5 fGPU",
        "fgpu": "0.5",
        "resource_group": "default",
        "node": "local",
        "gpus": ["GPU-local-0"],
        "since_s": AT_S + 2,
        "simulated": True,
    }
    assert found["queue"][1] == {
        "position": 2,
        "id": 5,
        "user": "dave",
        "server_name": "big",
        "amount": "1.5 fGPU",
        "fgpu": "1.5",
        "resource_group": "default",
        "wait_reason": "RESOURCES",
        "wait_text": "1.5 fGPU is not free, only 0.5 is",
        "expected_start_at_s": None,
        "since_s": AT_S + 6,
    }


def test_parked_session_that_wants_its_gpu_is_not_in_use(url: str, fgpu: Fgpu) -> None:
    filled(url)
    store = Store(url)
    store.open()
    store.park(1, 0, now_s=AT_S + 7)
    store.commit(plan(store.snapshot(AT_S + 7), Policy()), now_s=AT_S + 7)
    store.want(1, True, now_s=AT_S + 8)
    store.close()
    out = fgpu("status", "--db", url)[1]
    assert section(out, "Capacity")[::2] == [
        ["group default: 2 of 2 fGPU in use"],
        ["0: 2 of 2 fGPU, Tesla T4, GPU-local-0 (simulated)"],
    ]


def test_status_of_a_new_installation(url: str, fgpu: Fgpu) -> None:
    store = Store(url)
    store.open()
    store.close()
    assert fgpu("status", "--db", url)[1] == "Capacity\n  no node\n\nSessions\n  none\n\nQueue\n  none\n"


def test_status_counts_queues_by_group_and_shows_node_states(url: str, fgpu: Fgpu) -> None:
    filled(url, node(), node("other", group="class"))
    store = Store(url)
    store.open()
    store.set_node_state("other", NodeState.CORDONED, now_s=AT_S)
    store.submit([Request("eve", "", "python", "class", 500, 1000, 1024)], now_s=AT_S + 7)
    store.close()
    _, out, _ = fgpu("status", "--db", url)
    assert "    node other CORDONED: 0 of 8 CPU, 0 of 16384 MiB\n" in out
    assert [(row[0], row[2]) for row in section(out, "Queue")[1:]] == [
        ("1", "eve/"),
        ("1", "carol/"),
        ("2", "dave/big"),
    ]


def test_request_that_starts_next_has_the_position_now(url: str, fgpu: Fgpu) -> None:
    store = Store(url)
    store.open()
    store.set_nodes([node()], now_s=AT_S)
    store.submit([request("alice", 500)], now_s=AT_S)
    store.close()
    _, out, _ = fgpu("status", "--db", url)
    assert section(out, "Queue")[1][0] == "now"


def test_control_characters_of_names_are_escaped(url: str, fgpu: Fgpu) -> None:
    store = Store(url)
    store.open()
    store.set_nodes([node()], now_s=AT_S)
    store.submit([request("mal\x1b[2Jlory\n", 500)], now_s=AT_S)
    store.close()
    _, out, _ = fgpu("status", "--db", url)
    assert "mal?[2Jlory?/" in out
    assert "\x1b" not in out


def test_status_finds_the_database_through_the_hubs_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fgpu: Fgpu
) -> None:
    write_config(tmp_path)
    (tmp_path / "data").mkdir()
    filled(f"sqlite:///{tmp_path}/data/fgpu.sqlite")
    _, named, _ = fgpu("status", "--config", str(tmp_path / "jupyterhub_config.py"))
    monkeypatch.chdir(tmp_path)
    status, found, _ = fgpu("status")
    assert (status, named) == (0, found)
    assert "alice/gpu-2" in found


def test_status_shows_the_isolation_of_each_node(tmp_path: Path, fgpu: Fgpu) -> None:
    path, data = write_config(tmp_path), tmp_path / "data"
    data.mkdir()
    url = f"sqlite:///{data}/fgpu.sqlite"
    filled(url)
    CHOICES.write(data, (StoredChoice("local", "driver-cgroup", "the driver can"),))
    node = next(line for line in fgpu("status", "--config", path)[1].splitlines() if "node local" in line)
    assert node.endswith("MiB, isolation driver-cgroup")
    found = json.loads(fgpu("status", "--config", path, "--json")[1])
    assert found["isolation"] == {"local": "driver-cgroup"}
    assert "isolation" not in fgpu("status", "--db", url)[1]


def test_commands_on_the_database_work_while_the_engine_is_down(
    tmp_path: Path, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody.sock")
    data = tmp_path / "data"
    data.mkdir()
    filled(f"sqlite:///{data}/fgpu.sqlite")
    path = Path(write_config(tmp_path))
    path.write_text(path.read_text().replace("configure(c,", 'configure(c, runtime="docker",'))
    config = ("--config", str(path))
    assert fgpu("status", *config)[0] == 0
    assert fgpu("node", "local", "cordon", *config)[0] == 0


SYSTEMCTL = """#!/bin/sh
case "$2" in
jupyterhub.service) printf '{hub}';;
*) printf 'LoadState=not-found\\nActiveState=inactive\\n';;
esac
"""
JOURNAL = """#!/bin/sh
cat <<'END'
[E 2026-11-23 23:32:09 fgpu] The database cannot be read
fgpuspawner: \x1b[31mc.FGPU.fgpu_per_gpu\x1b[0m is 0; one GPU must be worth more than 0 fGPU, such as 2
[I 2026-11-23 23:33:08 JupyterHub app:12] Bye
END
"""
WHY = "fgpuspawner: c.FGPU.fgpu_per_gpu is 0; one GPU must be worth more than 0 fGPU, such as 2"


@pytest.mark.parametrize(
    ("active", "sub", "result", "restarts", "ran_s", "said"),
    [
        ("active", "running", "success", 0, 2, "running"),
        ("active", "running", "success", 1, 3600, "running (1 time)"),
        ("active", "running", "success", 5, 2, f"restarting (5 times): {WHY}"),
        ("activating", "start", "success", 0, 0, "starting"),
        ("activating", "start", "success", 5, 0, f"restarting (5 times): {WHY}"),
        ("activating", "auto-restart", "exit-code", 0, 0, f"restarting: {WHY}"),
        (
            *("activating", "auto-restart", "oom-kill", 2, 0),
            "restarting (2 times): ended, as systemd says, by oom-kill",
        ),
        ("inactive", "dead", "success", 0, 0, "stopped"),
        (
            *("failed", "failed", "exit-code", 60, 0),
            f"failed (60 times): {WHY}; systemd has given up. Fix it, then run: systemctl reset-failed jupyterhub; "
            "systemctl start jupyterhub",
        ),
    ],
)
def test_status_shows_why_the_hubs_unit_fails(
    active: str,
    sub: str,
    result: str,
    restarts: int,
    ran_s: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    fgpu: Fgpu,
) -> None:
    # No systemd runs where tests do: what it says is in its own form.
    since = int((time.monotonic() - ran_s) * 1e6)
    hub = f"LoadState=loaded\\nActiveState={active}\\nSubState={sub}\\nResult={result}\\nNRestarts={restarts}\\n"
    hub += f"ActiveEnterTimestampMonotonic={since}\\n"
    for name, text in (("systemctl", SYSTEMCTL.replace("{hub}", hub)), ("journalctl", JOURNAL)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "data").mkdir()
    filled(f"sqlite:///{tmp_path}/data/fgpu.sqlite")
    config = Path(write_config(tmp_path))
    status, out, _ = fgpu("status", "--config", str(config))
    assert out.startswith(f"Services\n  jupyterhub.service: {said}\n\nSIMULATED")
    assert status == (0 if said.startswith(("running", "starting")) else 1)
    (found,) = json.loads(fgpu("status", "--config", str(config), "--json")[1])["services"]
    assert found["restarts"] == restarts
    # What ends the Hub can keep the command from reading more; it tells what it knows.
    config.write_text(config.read_text().replace("configure(c,", "configure(c, fgpu_per_gpu=0,"))
    if status:
        status, out, _ = fgpu("status", "--config", str(config))
        assert (status, out.split("\n\n")) == (
            1,
            [
                f"Services\n  jupyterhub.service: {said}",
                f"Not known: {WHY.removeprefix('fgpuspawner: ')}\n",
            ],
        )
