"""``fgpu replay``: this installation's own log, trace files, its table and its JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from commandline import Fgpu
from fgpu_scheduler import (
    Device,
    EndCause,
    Job,
    Node,
    Outcome,
    Policy,
    Quota,
    QuotaScope,
    Request,
    SessionState,
    Store,
    group_policy,
    plan,
    replay,
)
from fgpuspawner import replay as history
from fgpuspawner.replay import TraceRow, read_trace

S = SessionState
AT_S = 1_790_000_000
TRACE = """\
submitted_at_s,user,fgpu,length_s,waited_s
0,ann,1,100,0
10,bob,1,100,90
20,cy,1,,30
"""


def request(user: str, fgpu_milli: int = 1000) -> Request:
    return Request(user, "", "python", "lab", fgpu_milli, 1000, 1024)


def lab(gpus: int = 1) -> Node:
    devices = tuple(Device(f"GPU-{n}", "n1", n, "Tesla T4", 8192, 1000, True) for n in range(gpus))
    return Node("n1", "lab", 8000, 16384, devices)


class Lab:
    """A store that lives through a history, one second-precise step after another."""

    def __init__(self, store: Store) -> None:
        self.store = store
        store.set_nodes([lab()], now_s=AT_S)

    def asks(self, user: str, at_s: int) -> int:
        (session,) = self.store.submit([request(user)], now_s=AT_S + at_s)
        self.plans(at_s)
        return session.id

    def plans(self, at_s: int) -> None:
        now_s = AT_S + at_s
        for session in self.store.commit(plan(self.store.snapshot(now_s), Policy()), now_s=now_s):
            self.store.move(session.id, S.PREPARING, now_s=now_s)
            self.store.move(session.id, S.RUNNING, now_s=now_s + 1)

    def ends(self, session_id: int, at_s: int) -> None:
        self.store.move(session_id, S.TERMINATING, now_s=AT_S + at_s, cause=EndCause.USER)
        self.store.move(session_id, S.TERMINATED, now_s=AT_S + at_s)
        self.plans(at_s)

    def leaves_the_queue(self, session_id: int, at_s: int) -> None:
        self.store.move(session_id, S.CANCELLED, now_s=AT_S + at_s, cause=EndCause.USER)


@pytest.fixture
def url(tmp_path: Path) -> str:
    """The database of an installation in which ann, bob and cy asked for the one GPU, and cy gave up."""
    url = f"sqlite:///{tmp_path / 'fgpu.sqlite'}"
    store = Store(url)
    store.open()
    past = Lab(store)
    ann = past.asks("ann", 0)
    bob = past.asks("bob", 10)
    cy = past.asks("cy", 20)
    past.leaves_the_queue(cy, 50)
    past.ends(ann, 100)
    past.ends(bob, 200)
    store.close()
    return url


def table(fgpu: Fgpu, *arguments: str) -> list[str]:
    status, out, err = fgpu("replay", *arguments)
    assert (status, err) == (0, "")
    return out.splitlines()


def runs(fgpu: Fgpu, *arguments: str) -> dict[str, Any]:
    found = json.loads("\n".join(table(fgpu, *arguments, "--json")))
    return {run["policy"]: run for run in found["runs"]}


def trace(folder: Path, text: str) -> str:
    path = folder / "trace.csv"
    path.write_text(text, encoding="utf-8")
    return str(path)


# --- An installation's own log ---


def test_history_is_read_from_the_log(url: str) -> None:
    store = Store(url)
    store.connect_readonly()
    found = history.read_history(store, now_s=AT_S + 1000)
    store.close()
    ann, bob, cy = (
        Job(request("ann"), AT_S, 100),
        Job(request("bob"), AT_S + 10, 100),
        # As long as the others did, had it ever started.
        Job(request("cy"), AT_S + 20, 100, patience_s=30),
    )
    assert found.jobs == (ann, bob, cy)
    assert found.happened == (
        Outcome(ann, AT_S, AT_S + 100, 1000),
        Outcome(bob, AT_S + 100, AT_S + 200, 1000),
        Outcome(cy, None, AT_S + 50),
    )
    assert found.nodes == (lab(),)


def test_a_replay_of_the_same_policy_is_what_happened(url: str) -> None:
    store = Store(url)
    store.connect_readonly()
    found = history.read_history(store, now_s=AT_S + 1000)
    store.close()
    assert replay(found.jobs, found.nodes, Policy(group_policy(order="fifo-skip"))) == found.happened


def test_running_and_waiting_sessions_are_replayed_until_now(url: str) -> None:
    store = Store(url)
    store.open()
    past = Lab(store)
    past.asks("dee", 300)
    past.asks("eve", 310)
    found = history.read_history(store, now_s=AT_S + 400)
    store.close()
    assert found.happened is not None
    dee, eve = found.happened[-2:]
    assert (dee.placed_at_s, dee.left_at_s, dee.job.length_s) == (AT_S + 300, AT_S + 400, 100)
    assert (eve.placed_at_s, eve.left_at_s, eve.job.patience_s) == (None, AT_S + 400, None)


def test_session_that_lost_its_node_waits_again(url: str) -> None:
    store = Store(url)
    store.open()
    (session,) = store.submit([request("dee")], now_s=AT_S + 300)
    store.commit(plan(store.snapshot(AT_S + 300), Policy()), now_s=AT_S + 300)
    store.move(session.id, S.PENDING, now_s=AT_S + 310)
    store.commit(plan(store.snapshot(AT_S + 350), Policy()), now_s=AT_S + 350)
    found = history.read_history(store, now_s=AT_S + 400)
    store.close()
    assert found.happened is not None
    assert found.happened[-1].placed_at_s == AT_S + 350


def test_table_compares_history_with_each_policy(url: str, fgpu: Fgpu) -> None:
    lines = table(fgpu, "--db", url, "--policy", "fifo-skip", "--policy", "lifo", "--gpus", "2")
    assert lines[0] == ("3 sessions of 3 users, submitted 2026-09-21 14:13Z to 2026-09-21 14:13Z, on 2 fGPU")
    assert [line[:13].strip() for line in lines[2:]] == ["policy", "what happened", "fifo-skip", "lifo"]
    assert lines[3].split() == (
        ["what", "happened", "2", "1", "0", "0:00:40", "0:00:30", "0:01:30", "0:01:30", "50.0", "%", "0.608"]
    )


def test_more_gpus_shorten_the_waits(url: str, fgpu: Fgpu) -> None:
    found = runs(fgpu, "--db", url, "--gpus", "2", "--policy", "fifo-skip")
    assert found["what happened"]["longest_wait_s"] == 90
    assert found["fifo-skip"]["longest_wait_s"] == 30
    assert found["fifo-skip"]["never_started"] == 1
    more = runs(fgpu, "--db", url, "--gpus", "3", "--policy", "fifo-skip")
    assert (more["fifo-skip"]["longest_wait_s"], more["fifo-skip"]["started"]) == (0, 3)


def test_quotas_of_the_installation_apply_by_default(
    url: str, fgpu: Fgpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Store.snapshot

    def with_quota(self: Store, now_s: int) -> Any:
        from dataclasses import replace

        return replace(real(self, now_s), quotas=(Quota(QuotaScope.USER, "*", max_pending=0),))

    monkeypatch.setattr(Store, "snapshot", with_quota)
    own = runs(fgpu, "--db", url, "--policy", "fifo")["fifo"]
    assert (own["refused"], own["started"]) == (3, 0)
    other = runs(fgpu, "--db", url, "--policy", "fifo", "--quota", "user:ann:pending=0")["fifo"]
    assert (other["refused"], other["started"]) == (1, 1)
    assert runs(fgpu, "--db", url, "--policy", "fifo", "--quota", "none")["fifo"]["refused"] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            ("--quota", "user:*:fgpu=2", "--quota", "all:*:sessions=9"),
            "the quotas user:*:fgpu=2 all:*:sessions=9",
        ),
        (("--quota", "none"), "no quota"),
    ],
)
def test_table_names_the_quotas(url: str, fgpu: Fgpu, words: tuple[str, ...], said: str) -> None:
    lines = table(fgpu, "--db", url, "--policy", "fifo", *words)
    assert lines[1:3] == [f"each policy with {said}, unlike what happened", ""]
    assert table(fgpu, "--db", url, "--policy", "fifo")[1] == ""


def test_a_lifetime_quota_ends_sessions(tmp_path: Path, fgpu: Fgpu) -> None:
    path = trace(tmp_path, TRACE)
    words = ("--trace", path, "--gpus", "1", "--policy", "fifo-skip", "--quota", "user:*:lifetime=10")
    found = runs(fgpu, *words)["fifo-skip"]
    # bob comes when ann is ended, and cy when he is.
    assert (found["longest_wait_s"], found["started"]) == (0, 3)


def test_days_limit_the_counted_sessions(tmp_path: Path, fgpu: Fgpu) -> None:
    path = trace(tmp_path, TRACE + f"{10 * 86400},dee,1,50,0\n")
    found = runs(fgpu, "--trace", path, "--gpus", "1", "--days", "2", "--policy", "fifo")
    assert [run["sessions"] for run in found.values()] == [1, 1]
    status, said = fgpu.failure("replay", "--trace", path, "--gpus", "1", "--days", "0")
    assert (status, said) == (
        2,
        "Invalid value for '--days': 0 is not in the range x>=1; see fgpu replay --help",
    )


def test_default_is_the_configured_policy(url: str, fgpu: Fgpu) -> None:
    assert list(runs(fgpu, "--db", url)) == ["what happened", "as configured"]


def test_empty_history_is_refused(tmp_path: Path, fgpu: Fgpu) -> None:
    url = f"sqlite:///{tmp_path / 'empty.sqlite'}"
    store = Store(url)
    store.open()
    store.close()
    status, said = fgpu.failure("replay", "--db", url)
    assert status == 2
    assert said.startswith("no session was ever submitted here; --trace FILE.csv")


# --- Trace files ---


def test_trace_without_waits_has_no_history(tmp_path: Path, fgpu: Fgpu) -> None:
    path = trace(tmp_path, "user,submitted_at_s,length_s,fgpu\nann,5,10,0.5\n")
    assert list(runs(fgpu, "--trace", path, "--gpus", "1", "--policy", "lifo")) == ["lifo"]


def test_trace_has_all_fields_of_a_request(tmp_path: Path) -> None:
    cells = {
        "submitted_at_s": "7",
        "user": "ann",
        "length_s": "60",
        "fgpu": "",
        "gpu_memory_mib": "4096",
        "compute_percent": "25",
        "gpu_models": "Tesla T4;L4",
        "resource_group": "lab",
        "cpu": "1.5",
        "memory_mib": "2048",
        "time_limit_s": "90",
        "priority": "-2",
        "groups": "ml101;staff",
        "waited_s": "3",
    }
    assert {*cells, "gpu_model"} == {*TraceRow.model_fields}, "the old name of one model"
    path = trace(tmp_path, f"{','.join(cells)}\n{','.join(cells.values())}\n\n")
    (job,) = read_trace(path).jobs
    models, groups = ("Tesla T4", "L4"), ("ml101", "staff")
    asked = Request("ann", "", "", "lab", 0, 1500, 2048, 4096, 25, models, 90, -2, groups)
    assert job == Job(asked, 7, 60)


def test_trace_may_name_one_gpu_model(tmp_path: Path) -> None:
    (job,) = read_trace(trace(tmp_path, "submitted_at_s,user,length_s,fgpu,gpu_model\n7,ann,60,1,T;4\n")).jobs
    assert job.request.gpu_models == ("T;4",)


HEAD = "submitted_at_s,user,fgpu,length_s,waited_s\n"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "",
            "line 1: columns are missing; submitted_at_s, user, length_s and fgpu or gpu_memory_mib are needed",
        ),
        (
            "submitted_at_s,user,length_s\n",
            "line 1: columns are missing; submitted_at_s, user, length_s and fgpu",
        ),
        ("submitted_at_s,user,fgpu,length\n", "line 1: 'length' is no column, or there twice; "),
        (HEAD.replace("fgpu", "user"), "line 1: 'user' is no column, or there twice; "),
        (HEAD, "has no session; a row is one session"),
        (HEAD + "0,ann,1,60,0\n5,bob,1,60\n", "line 3: has 4 fields, and 5 columns are named"),
        (HEAD + "soon,ann,1,60,0\n", "line 2: submitted_at_s: 'soon': Input should be a valid integer"),
        (HEAD + ",ann,1,60,0\n", "line 2: submitted_at_s: '': Field required"),
        (
            HEAD + "0,ann,1,60,0\n\n0,bob,half,60,0\n",
            "line 4: fgpu: 'half': 'half' is not a number such as 0.5",
        ),
        (HEAD + "0,ann,0,60,0\n", "line 2: fgpu: '0': Input should be greater than or equal to 1"),
        (HEAD + "0,ann,1,-5,0\n", "line 2: length_s: '-5': Input should be greater than or equal to 0"),
        (HEAD + "0,,1,5,0\n", "line 2: user: '': Field required"),
        (HEAD + "0,ann,,5,0\n", "line 2: fgpu: give either fgpu or gpu_memory_mib"),
        (HEAD + '0,"ann,1,5,0\n', "is not CSV in UTF-8: "),
        (
            "submitted_at_s,user,length_s,fgpu,gpu_model,gpu_models\n0,ann,5,1,T4,T4;L4\n",
            "line 2: gpu_models: give either gpu_models or gpu_model",
        ),
        (
            "submitted_at_s,user,length_s,fgpu,compute_percent\n0,ann,5,1,50\n",
            "line 2: compute_percent: goes with gpu_memory_mib only",
        ),
    ],
)
def test_bad_trace_is_refused_with_line_and_field(tmp_path: Path, fgpu: Fgpu, text: str, said: str) -> None:
    path = trace(tmp_path, text)
    status, line = fgpu.failure("replay", "--trace", path, "--gpus", "1")
    assert status == 1
    assert line.startswith(f"{path}: {said}")


def test_unreadable_trace_is_refused(tmp_path: Path, fgpu: Fgpu) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(b"\xff\xfe\x00")
    assert ": is not CSV in UTF-8: " in fgpu.failure("replay", "--trace", str(path), "--gpus", "1")[1]
    path.unlink()
    assert "No such file" in fgpu.failure("replay", "--trace", str(path), "--gpus", "1")[1]


def test_a_trace_needs_gpus(tmp_path: Path, fgpu: Fgpu, url: str) -> None:
    path = trace(tmp_path, TRACE.replace("waited_s", "waited_s,resource_group").replace("\n", ",lab\n", 0))
    status, said = fgpu.failure("replay", "--trace", trace(tmp_path, TRACE))
    assert (status, said.startswith("a trace tells no GPUs: give --gpus 8")) == (2, True)
    lines = "submitted_at_s,user,fgpu,length_s,resource_group\n0,ann,1,60,lab\n0,bob,1,60,lab\n"
    path = trace(tmp_path, lines)
    # The nodes of an installation will do.
    assert runs(fgpu, "--trace", path, "--db", url, "--policy", "fifo")["fifo"]["longest_wait_s"] == 60
    path = trace(tmp_path, lines + "0,cy,1,60,class\n")
    status, said = fgpu.failure("replay", "--trace", path, "--gpus", "1")
    assert (status, "several resource groups (class, lab)" in said) == (2, True)
