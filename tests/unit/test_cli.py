"""The command ``fgpu``: what it prints, its one line where something is wrong, and that all of it is documented."""

from __future__ import annotations

import argparse
import getpass
import json
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fgpu_scheduler import (
    Device,
    EndCause,
    Node,
    NodeState,
    Policy,
    Request,
    SessionState,
    plan,
)
from fgpu_scheduler.audit import Audit
from fgpu_scheduler.store import Store
from fgpuspawner import __version__, cli
from fgpuspawner.isolation import native
from fgpuspawner.isolation.native import Native

ROOT = Path(__file__).parents[2]
S = SessionState
AT_S = 1_790_000_000
CONFIG = """
from fgpuspawner.config import configure

c = get_config()  # noqa: F821
c.JupyterHub.bind_url = "http://127.0.0.1:8000"
configure(c, data_dir={data!r}, simulated_gpus="2", **{settings!r})
"""
ROW = re.compile(r" {2,}")


def request(user: str, fgpu_milli: int, server_name: str = "") -> Request:
    return Request(user, server_name, "python", "default", fgpu_milli, 1000, 1024)


def node(node_id: str = "local", *, simulated: bool = True, gpus: int = 1, group: str = "default") -> Node:
    devices = tuple(
        Device(f"GPU-{node_id}-{n}", node_id, n, "Tesla T4", 8192, 2000, simulated) for n in range(gpus)
    )
    return Node(node_id, group, 8000, 16384, devices)


@pytest.fixture
def url(tmp_path: Path) -> str:
    return f"sqlite:///{tmp_path / 'fgpu.sqlite'}"


def filled(url: str, *nodes: Node) -> None:
    """Make a database in which one session runs, one launches, one ends, and two wait."""
    store = Store(url)
    store.open()
    store.set_nodes(nodes or (node(),), now_s=AT_S)

    def placed(asked: Request, at_s: int) -> int:
        (session,) = store.submit([asked], now_s=at_s)
        store.commit(plan(store.snapshot(at_s), Policy()), now_s=at_s)
        return session.id

    running = placed(request("alice", 500, "gpu-2"), AT_S)
    ending = placed(request("zoe", 500), AT_S)
    for session_id in (running, ending):
        store.move(session_id, S.PREPARING, now_s=AT_S + 1)
        store.move(session_id, S.RUNNING, now_s=AT_S + 2)
    store.move(ending, S.TERMINATING, now_s=AT_S + 3, cause=EndCause.USER)
    store.move(placed(request("bob", 500), AT_S + 4), S.PREPARING, now_s=AT_S + 5)
    store.submit([request("carol", 1000), request("dave", 1500, "big")], now_s=AT_S + 6)
    store.commit(plan(store.snapshot(AT_S + 6), Policy()), now_s=AT_S + 6)
    store.close()


def fgpu(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    status = cli.main(arguments)
    out, err = capsys.readouterr()
    return status, out, err


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Return the status and the one line of a command that fails."""
    status, out, err = fgpu(capsys, *arguments)
    assert out == ""
    assert err.startswith("fgpu: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return status, err.removeprefix("fgpu: ").removesuffix("\n")


def section(out: str, name: str) -> list[list[str]]:
    """Return a table's rows, in cells."""
    text = out.partition(f"{name}\n")[2].partition("\n\n")[0]
    return [ROW.split(line.strip()) for line in text.splitlines()]


# --- What it prints ---


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["--version"])
    assert (caught.value.code, capsys.readouterr().out) == (0, f"fgpu {__version__}\n")


def test_status_shows_capacity_sessions_and_the_queue(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(url)
    status, out, err = fgpu(capsys, "status", "--db", url)
    assert (status, err) == (0, "")
    assert out.startswith("SIMULATED GPUs: no real GPU is behind the amounts marked so\n\nCapacity\n")
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
         "1 fGPU is not free: 0.5 fGPU is free now"],
        ["2", "5", "dave/big", "1.5 fGPU", "default", "2026-09-21 14:13:26Z",
         "1.5 fGPU is not free: 0.5 fGPU is free now"],
    ]  # fmt: skip


def test_status_on_real_gpus_marks_nothing_as_simulated(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(url, node(simulated=False))
    _, out, _ = fgpu(capsys, "status", "--db", url)
    assert "simulated" not in out.lower()


def test_status_as_json_says_the_same_to_programs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    filled(url)
    status, out, err = fgpu(capsys, "status", "--json", "--db", url)
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
        "wait_text": "1.5 fGPU is not free: 0.5 fGPU is free now",
        "expected_start_at_s": None,
        "since_s": AT_S + 6,
    }


def test_status_of_an_installation_where_nothing_happened_yet(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(url)
    store.open()
    store.close()
    assert (
        fgpu(capsys, "status", "--db", url)[1] == "Capacity\n  no node\n\nSessions\n  none\n\nQueue\n  none\n"
    )


def test_status_counts_the_queue_of_each_group_and_says_what_a_node_is(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(url, node(), node("other", group="class"))
    store = Store(url)
    store.open()
    store.set_node_state("other", NodeState.CORDONED, now_s=AT_S)
    store.submit([Request("eve", "", "python", "class", 500, 1000, 1024)], now_s=AT_S + 7)
    store.close()
    _, out, _ = fgpu(capsys, "status", "--db", url)
    assert "    node other CORDONED: 0 of 8 CPU, 0 of 16384 MiB\n" in out
    assert [(row[0], row[2]) for row in section(out, "Queue")[1:]] == [
        ("1", "eve/"),
        ("1", "carol/"),
        ("2", "dave/big"),
    ]


def test_what_fits_and_starts_at_the_next_moment_has_the_position_now(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store = Store(url)
    store.open()
    store.set_nodes([node()], now_s=AT_S)
    store.submit([request("alice", 500)], now_s=AT_S)
    store.close()
    _, out, _ = fgpu(capsys, "status", "--db", url)
    assert section(out, "Queue")[1][0] == "now"


def test_a_name_cannot_tell_the_terminal_what_to_do(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store(url)
    store.open()
    store.set_nodes([node()], now_s=AT_S)
    store.submit([request("mal\x1b[2Jlory\n", 500)], now_s=AT_S)
    store.close()
    _, out, _ = fgpu(capsys, "status", "--db", url)
    assert "mal?[2Jlory?/" in out
    assert "\x1b" not in out


def test_status_changes_nothing(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(url)

    def dump() -> list[str]:
        with sqlite3.connect(tmp_path / "fgpu.sqlite") as db:
            lines = list(db.iterdump())
        db.close()
        return lines

    before = dump()
    fgpu(capsys, "status", "--db", url)
    assert dump() == before


def test_status_finds_the_database_through_the_hubs_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_config(tmp_path)
    (tmp_path / "data").mkdir()
    filled(f"sqlite:///{tmp_path}/data/fgpu.sqlite")
    _, named, _ = fgpu(capsys, "status", "--config", str(tmp_path / "jupyterhub_config.py"))
    monkeypatch.chdir(tmp_path)
    status, found, _ = fgpu(capsys, "status")
    assert (status, named) == (0, found)
    assert "alice/gpu-2" in found


def test_status_says_what_holds_the_sessions_of_each_node(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, data = write_config(tmp_path), tmp_path / "data"
    data.mkdir()
    url = f"sqlite:///{data}/fgpu.sqlite"
    filled(url)
    (data / "isolation.json").write_text(
        '{"local": {"backend": "driver-cgroup", "reason": "the driver can"}}'
    )
    node = next(
        line for line in fgpu(capsys, "status", "--config", path)[1].splitlines() if "node local" in line
    )
    assert node.endswith("MiB, isolation driver-cgroup")
    found = json.loads(fgpu(capsys, "status", "--config", path, "--json")[1])
    assert found["isolation"] == {"local": "driver-cgroup"}
    assert "isolation" not in fgpu(capsys, "status", "--db", url)[1]


# --- fgpu check ---


def write_config(folder: Path, *, after: str = "", **settings: Any) -> str:
    path = folder / "jupyterhub_config.py"
    path.write_text(CONFIG.format(data=str(folder / "data"), settings=settings) + after)
    return str(path)


@pytest.fixture
def built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Native:
    """Files in the places of what a compiler would have built."""
    monkeypatch.setattr(native, "FOLDER", tmp_path / "native")
    found = Native(tmp_path / "native")
    for part in found.parts:
        part.parent.mkdir(parents=True, exist_ok=True)
        part.touch()
    return found


def test_check_says_what_a_good_configuration_gives(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], built: Native
) -> None:
    nodes = [{"name": "box", "cpu": 4, "memory_mib": 8192, "gpus": {"simulated": 1}}]
    path = write_config(tmp_path, nodes=nodes, fgpu_per_gpu=5)
    status, out, err = fgpu(capsys, "check", "--config", path)
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        f"OK: {path}",
        "  sessions: local processes, all of one system user (LocalFGPUSpawner)",
        "  node box (group default): 4 CPU, 8192 MiB, 1 GPU",
        "    0: Simulated GPU 8192 MiB, 8192 MiB = 5 fGPU, GPU-simulated-box-0 (simulated)",
        "    isolation: interposer: libfgpu holds memory and compute; its GPUs are simulated",
        "  images: 1 (python), 8 not enabled",
        f"  database: sqlite:///{tmp_path}/data/fgpu.sqlite, made ready when the Hub starts",
    ]
    assert not (tmp_path / "data" / "fgpu.sqlite").exists()


def test_check_says_that_nothing_is_held_where_nothing_was_built(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], built: Native
) -> None:
    built.library.unlink()
    status, out, err = fgpu(capsys, "check", "--config", write_config(tmp_path))
    assert (status, err) == (0, "")
    assert "    isolation: none: NOTHING holds a session to its slice, as libfgpu is not built; " in out


def test_check_refuses_an_isolation_that_cannot_be_had(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], built: Native
) -> None:
    status, out, err = fgpu(capsys, "check", "--config", write_config(tmp_path, isolation="mig"))
    assert (status, out) == (1, "")
    assert err.startswith("fgpu: c.FGPU.isolation is 'mig', which node 'local' cannot have: ")
    assert not (tmp_path / "data" / "isolation.json").exists(), "nothing is written"


def test_check_tells_a_database_that_answers_from_one_that_is_not_used_yet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path)
    database = tmp_path / "data" / "fgpu.sqlite"
    database.parent.mkdir()
    database.touch()
    assert fgpu(capsys, "check", "--config", path)[1].endswith(
        "fgpu.sqlite, made ready when the Hub starts\n"
    )
    filled(f"sqlite:///{database}")
    assert fgpu(capsys, "check", "--config", path)[1].endswith("fgpu.sqlite, answers\n")


def test_check_of_the_shipped_example_is_ok(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run("check", "--config", str(ROOT / "jupyterhub_config.py"), cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith(f"OK: {ROOT}/jupyterhub_config.py\n")


@pytest.mark.parametrize(
    ("after", "settings", "line"),
    [
        (
            "",
            {"fgpu_per_gpu": 0},
            "c.FGPU.fgpu_per_gpu is 0; one GPU must be worth more than 0 fGPU, such as 2",
        ),
        ("c.FGPU.queue_timeout_s = 0", {}, "c.FGPU.queue_timeout_s is 0; it must be at least 1 second"),
        (
            "c.JupyterHub.bind_url = 'http://0.0.0.0:8000'",
            {},
            "c.JupyterHub.bind_url is http://0.0.0.0:8000: sessions as local processes all run as one system user, "
            "so the Hub binds to 127.0.0.1 only; use runtime='docker', or set "
            "c.FGPU.local_sessions_beyond_loopback = True",
        ),
        (
            "",
            {"service_port": 8001},
            "c.FGPU.service_port is 8001, which the proxy's API uses too; give one of them another port",
        ),
        (
            "",
            {"catalogue": "/nowhere/catalogue.toml"},
            "catalogue.toml: there is no such file; c.FGPU.catalogue names the catalogue",
        ),
        (
            "",
            {"nodes": [{"name": "a", "gpus": ["GPU-none"]}]},
            "c.FGPU.nodes: node 'a' names GPU GPU-none, which NVML does not report; "
            "it has GPU-simulated-a-0, GPU-simulated-a-1",
        ),
        ("", {"db_url": "nonsense"}, "the database URL cannot be read; one is sqlite:////srv/fgpu.sqlite"),
        ("import nowhere", {}, "jupyterhub_config.py:7: ModuleNotFoundError: No module named 'nowhere'"),
        ("raise SystemExit(3)", {}, "{path} ends the process with status 3"),
        (
            "c.JupyterHub.spawner_class = 'simple'",
            {},
            "{path} does not set up fgpuspawner: call fgpuspawner.config.configure(c) in it",
        ),
        (
            "c.JupyterHub.hub_port = 'x'",
            {},
            "{path}: The 'hub_port' trait of a JupyterHub instance expected an int, not the str 'x'.",
        ),
    ],
)
def test_check_says_in_one_line_why_a_configuration_cannot_work(
    after: str, settings: dict[str, Any], line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, after=after, **settings)
    assert failure(capsys, "check", "--config", path) == (1, line.format(path=path))


def test_check_tells_where_a_file_is_no_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "broken.py"
    path.write_text("c = get_config()\nc.FGPU.max_fgpu = (\n")
    status, line = failure(capsys, "check", "--config", str(path))
    assert (status, line) == (1, "broken.py:2: SyntaxError: '(' was never closed (broken.py, line 2)")


# --- What is wrong, in one line ---


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ([], "the following arguments are required: COMMAND; see fgpu --help"),
        (
            ["start"],
            "argument COMMAND: invalid choice: 'start' (choose from 'status', 'check', 'firewall', 'node', 'images', "
            "'replay'); see fgpu --help",
        ),
        (["status", "--jsn"], "unrecognized arguments: --jsn; see fgpu --help"),
        (["status", "--db"], "argument --db: expected one argument; see fgpu status --help"),
        (
            ["status", "--db", "sqlite://", "--config", "x"],
            "argument --config: not allowed with argument --db; see fgpu status --help",
        ),
        (
            ["check", "--config", "none.py"],
            "there is no file none.py; --config names the Hub's configuration",
        ),
        (
            ["status", "--config", "none.py"],
            "there is no file none.py; --config names the Hub's configuration",
        ),
        (
            ["status", "postgresql://u:s3cret@db/x"],
            "unrecognized arguments: postgresql://***@db/x; see fgpu --help",
        ),
    ],
)
def test_wrong_use_ends_with_status_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, said = failure(capsys, *arguments)
    # The list of choices is worded differently by later versions of Python.
    assert (status, said.replace("status, check", "'status', 'check'")) == (2, line)


def test_a_database_that_is_not_there_is_not_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none.sqlite"
    assert failure(capsys, "status", "--db", f"sqlite:///{path}") == (
        1,
        f"sqlite:///{path} does not exist yet; the Hub makes it when it starts",
    )
    assert not path.exists()


def test_a_damaged_database_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "damaged.sqlite"
    path.write_text("this is not a database, whatever its name says" * 100)
    status, line = failure(capsys, "status", "--db", f"sqlite:///{path}")
    assert (status, line) == (1, f"sqlite:///{path}: file is not a database")


def test_an_unreachable_database_is_one_line_without_the_password(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = "postgresql+psycopg://fgpu:s3cret@127.0.0.1:1/fgpu?password=s3cret"
    config = write_config(tmp_path, db_url=url)
    for arguments in (("status", "--db", url), ("status", "--config", config), ("check", "--config", config)):
        status, line = failure(capsys, *arguments)
        assert status == 1
        assert line.startswith("postgresql+psycopg://***@127.0.0.1:1/fgpu: ")
        assert "s3cret" not in line


def test_a_password_in_what_a_configuration_raises_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_config(tmp_path, after="raise ValueError('cannot use postgresql://fgpu:s3cret@db/x')")
    _, line = failure(capsys, "check", "--config", path)
    assert line == "jupyterhub_config.py:7: ValueError: cannot use postgresql://***@db/x"


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run the installed command itself."""
    return subprocess.run(
        [str(Path(sys.executable).parent / "fgpu"), *arguments],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        env={k: v for k, v in os.environ.items() if not k.startswith(("FGPU_", "JUPYTERHUB"))},
    )


def test_the_installed_command_ends_with_its_status_and_no_traceback(tmp_path: Path) -> None:
    ended = run("status", cwd=tmp_path)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert (
        ended.stderr
        == "fgpu: there is no file jupyterhub_config.py; --config names the Hub's configuration\n"
    )


def test_a_reader_that_has_seen_enough_is_no_error(url: str, tmp_path: Path) -> None:
    filled(url)
    program = Path(sys.executable).parent / "fgpu"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [str(program), "status", "--db", url],
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
        )
    finally:
        os.close(writing)
    assert (ended.returncode, ended.stderr) == (0, "")


# --- Documentation ---


def commands() -> dict[str, argparse.ArgumentParser]:
    (chosen,) = (a for a in cli.make_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(chosen.choices)


def own_commands(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    found = [a for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    return dict(found[0].choices) if found else {}


def test_every_command_and_option_is_documented() -> None:
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    assert "`fgpu --version`" in text
    assert set(re.findall(r"^### `fgpu (\w+)`$", text, flags=re.MULTILINE)) == set(commands())
    for name, parser in commands().items():
        own = text.partition(f"### `fgpu {name}`\n")[2].partition("\n## ")[0].partition("\n### ")[0]
        parsers = [parser, *own_commands(parser).values()]
        options = {
            o for p in parsers for a in p._actions for o in a.option_strings if o not in ("-h", "--help")
        }
        assert [sub for sub in own_commands(parser) if f"`{sub}" not in own] == [], name
        assert set(re.findall(r"`(--[a-z]+)", own)) == options, name
        assert f"fgpu {name}" in own


def test_every_command_has_help() -> None:
    for parser in commands().values():
        for one in (parser, *own_commands(parser).values()):
            assert one.description
            for action in one._actions:
                assert action.help or isinstance(action, argparse._SubParsersAction)


# --- fgpu node ---


def test_a_node_is_cordoned_and_the_audit_log_says_by_which_system_user(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, url = write_config(tmp_path), f"sqlite:///{tmp_path}/data/fgpu.sqlite"
    (tmp_path / "data").mkdir()
    filled(url, node())
    assert (
        fgpu(capsys, "node", "local", "cordon", "--config", path)[1] == "node local: takes no more sessions\n"
    )
    status, _, said = fgpu(capsys, "node", "local", "cordon", "--config", path)
    assert (status, said) == (1, "fgpu: node 'local' is CORDONED; cordon is for a node that is READY\n")
    store = Store(url)
    store.open()
    try:
        lines = Audit(store).lines(limit=9)
    finally:
        store.close()
    assert [(line.actor, line.action, line.target) for line in lines] == [
        (f"{getpass.getuser()} (fgpu)", "node.cordon", "node local")
    ]
