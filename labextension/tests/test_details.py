"""What an open panel asks for beside the status, and explanations of out-of-memory errors."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from standin import StandIn, capacity, gpu, meter, resize, running
from support import Caller, answers, driver

from jupyterlab_fgpu.amounts import bars, next_larger
from jupyterlab_fgpu.details import notebook_of, process_name
from jupyterlab_fgpu.service_client import Unreachable, parse


async def test_the_bars_are_what_is_mine_of_that_and_what_i_could_get(caller: Caller) -> None:
    found = (await caller.status())["bars"]
    assert found["group"] == "default"
    fgpu, cpu, memory = found["rows"]
    assert fgpu == {
        "kind": "fgpu",
        "mine": "0.5",
        "total": "2",
        "percent": 25.0,
        "mine_overall": "0.5",
        "total_overall": "4",
        "percent_overall": 12.5,
    }
    assert (cpu["kind"], cpu["mine"], cpu["total"]) == ("cpu", "1", "8")
    assert (memory["kind"], memory["total_overall"]) == ("memory_mib", "32768")


def test_amounts_are_added_exactly_and_nothing_of_nothing_is_no_bar() -> None:
    found = capacity()
    found["groups"][0]["mine"]["fgpu"], found["groups"][0]["allocatable"]["fgpu"] = "0.3", "0.6"
    found["mine_overall"]["cpu"] = found["allocatable_overall"]["cpu"] = "0"
    fgpu, cpu, _ = bars(found, "default")["rows"]
    assert (fgpu["total"], fgpu["percent"]) == ("0.9", 33.3)
    assert (cpu["total_overall"], cpu["percent_overall"]) == ("0", 0.0)
    found["mine_overall"]["cpu"] = "Infinity"
    with pytest.raises(Unreachable, match="cpu is no amount"):
        bars(found, "default")


async def test_bars_that_cannot_be_read_are_left_out_and_nothing_else(
    caller: Caller, standin: StandIn
) -> None:
    standin.refuse("capacity", 403, "no")
    status = await caller.status()
    assert status["bars"] is None
    assert status["hub"] == "ok"


async def test_bars_outlive_a_call_that_was_lost_and_are_asked_for_again_at_once(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    before = (await caller.status())["bars"]
    assert before is not None
    clock, passed_s = extension.reader._clock, 31
    extension.reader._clock = lambda: clock() + passed_s
    standin.instead["capacity"] = (500, "{}")
    extension.shared.forget()
    assert (await caller.status())["bars"] == before
    del standin.instead["capacity"]
    extension.shared.forget()
    standin.calls.clear()
    assert (await caller.status())["bars"] == before
    assert "GET capacity" in standin.calls
    # Not for ever: they would be wrong without a word.
    standin.instead["capacity"] = (500, "{}")
    passed_s = 400
    extension.shared.forget()
    assert (await caller.status())["bars"] is None


async def test_the_banner_and_the_bars_are_asked_for_seldom(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    await caller.status()
    standin.banner = {"text": "<b>18:00</b>", "level": "warning", "until_at_s": 1790000000}
    clock, passed_s = extension.reader._clock, 0
    extension.reader._clock = lambda: clock() + passed_s
    extension.shared.forget()
    standin.calls.clear()
    assert (await caller.status())["banner"] is None
    assert standin.calls == ["GET sessions", "GET queue"]
    passed_s = 31
    extension.shared.forget()
    assert (await caller.status())["banner"] == standin.banner


async def test_the_bars_follow_at_once_when_a_session_starts(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    await caller.status()
    standin.promote()
    extension.shared.forget()
    standin.calls.clear()
    await caller.status()
    assert standin.calls == ["GET sessions", "GET queue", "GET capacity"]


async def test_details_are_there_only_for_those_who_ask(caller: Caller, standin: StandIn) -> None:
    assert "details" not in await caller.status()
    assert "GET sessions/12/meter" not in standin.calls
    details = (await caller.details())["details"]
    assert len(details["history"]["points"]) == 60
    assert details["history"]["every_s"] == 10
    assert details["advice"].startswith("your last five runs")
    assert details["processes"] == []
    assert standin.queries[standin.calls.index("GET advice")] == "image=python"
    # To run out of memory is not enough of it.
    await caller.call("explain", params={"tried_mib": "1000"})
    assert (await caller.details())["details"]["advice"] is None


async def test_an_older_service_has_no_history_and_no_advice(caller: Caller, standin: StandIn) -> None:
    for path in ("sessions/12/meter", "advice"):
        standin.refuse(path, 404, "no such endpoint")
    status = await caller.details()
    assert status["hub"] == "ok"
    assert status["details"] == {"history": None, "processes": [], "advice": None}


async def test_a_meter_is_passed_on_and_one_of_the_wrong_type_is_not(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    status = await caller.status()
    assert status["session"]["meter"].items() >= meter(at_s=status["session"]["meter"]["at_s"]).items()
    assert status["others"][0]["meter"] is None
    known = {"compute_borrowed_percent": 9.5, "compute_lent_percent": 0.0, "memory_context_mib": 412}
    standin.sessions[0]["meter"] |= known
    extension.shared.forget()
    assert (await caller.status())["session"]["meter"].items() >= known.items()
    standin.sessions[0]["meter"]["sm_percent"] = "20"
    extension.shared.forget()
    assert "sm_percent" in (await caller.status())["hub_message"]


async def test_an_explanation_has_the_limit_who_holds_it_and_more_with_its_forecast(
    caller: Caller, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml = driver(total_mib=2048, used_mib=1800, processes={os.getpid(): 1800, 999999999: 5})
    answers(monkeypatch, nvml)
    monkeypatch.setattr("jupyterlab_fgpu.gpu_memory.GpuMemory._is_mine", lambda self, pid: pid == os.getpid())
    code, found = await caller.call("explain", params={"tried_mib": "1000"})
    assert code == 200
    assert (found["limit_mib"], found["used_mib"], found["tried_mib"]) == (2048, 1800, 1000)
    [process] = found["processes"]
    assert (process["pid"], process["memory_mib"], process["notebook"]) == (os.getpid(), 1800, None)
    assert "python" in process["name"]
    # 2800 MiB of 8192, which is worth 2 fGPU: 0.7 has 2816.
    assert found["larger"]["amount"] == "0.7 fGPU"
    assert found["larger"]["gpu_memory_mib"] == 2816
    assert found["larger"]["text"] == "Starts now."
    asked = standin.queries[standin.calls.index("GET forecast")]
    assert asked == ("image=python&group=default&cpu=1&memory_mib=2048&fgpu=0.7&instead_of=12")


async def test_an_explanation_is_of_now_also_right_after_a_status(
    caller: Caller, standin: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, driver(total_mib=2048, used_mib=0))
    assert (await caller.status())["session"]["gpu_memory_used_mib"] == 0
    answers(monkeypatch, driver(total_mib=2048, used_mib=1800))
    _, found = await caller.call("explain", params={"tried_mib": "1000"})
    assert found["used_mib"] == 1800
    assert found["larger"]["gpu_memory_mib"] == 2816
    # Who looks next sees what it saw.
    assert (await caller.status())["session"]["gpu_memory_used_mib"] == 1800


async def test_a_larger_amount_that_is_free_on_the_same_gpu_is_had_in_place(
    caller: Caller, standin: StandIn
) -> None:
    async def larger(**changes: Any) -> Any:
        standin.sessions[0]["resize"] = resize(**changes)
        standin.calls.clear()
        _, found = await caller.call("explain", params={"tried_mib": "1000"})
        return found["larger"]

    found = await larger()
    assert (found["amount"], found["in_place"]) == ("0.8 fGPU", True)
    assert "GET forecast" not in standin.calls, "nothing would have to start"
    for no_longer in (
        {"amounts": ["0.5", "0.6", "0.7"]},
        {"why_not": "MIG", "amounts": []},
        {"state": "ASKED", "asked": "0.6 fGPU"},
    ):
        found = await larger(**no_longer)
        assert (found["amount"], found["in_place"]) == ("0.8 fGPU", False)
        assert found["text"] == "Starts now."


@pytest.mark.parametrize(("amount", "percent"), [("2048 MiB + 25 %", "25"), ("2048 MiB", None)])
async def test_a_session_of_exact_amounts_grows_in_place_too(
    caller: Caller, standin: StandIn, amount: str, percent: str | None
) -> None:
    async def larger(**changes: Any) -> Any:
        exact = resize(**{"amounts": [], "most_memory_mib": 3072, **changes})
        standin.sessions[0] |= {"amount": amount, "fgpu": None, "resize": exact}
        _, found = await caller.call("explain", params={"tried_mib": "1000"})
        return found["larger"]

    found = await larger()
    assert (found["gpu_memory_mib"], found["in_place"]) == (3072, True)
    assert found["options"].get("compute_percent") == percent
    for no_longer in ({"most_memory_mib": 2944}, {"why_not": "MIG", "most_memory_mib": None}):
        assert (await larger(**no_longer))["in_place"] is False


async def test_a_larger_amount_that_is_refused_says_why(caller: Caller, standin: StandIn) -> None:
    standin.forecast = {
        "starts_now": True,
        "text": "",
        "refusals": [{"field": "fgpu", "message": "fgpu: your quota is 0.5"}],
    }
    _, found = await caller.call("explain")
    assert found["larger"]["text"] == "your quota is 0.5"
    assert found["larger"]["starts_now"] is False


@pytest.mark.parametrize("bad", ["-1", "1e9", "9999999999", "٣"])
async def test_what_was_tried_is_a_number_of_mib(caller: Caller, bad: str) -> None:
    code, body = await caller.call("explain", params={"tried_mib": bad})
    assert code == 400
    assert "tried_mib" in body["message"]


@pytest.mark.parametrize(
    ("needed_mib", "amount"),
    [
        (None, "0.8 fGPU"),  # half as much again, 3072 MiB, is 0.75; the step is 0.1
        (1, "0.6 fGPU"),  # what is needed would fit: it is in pieces
        (2049, "0.6 fGPU"),
        (8192, "2 fGPU"),
        (8193, None),
    ],
)
def test_the_next_larger_amount_holds_what_is_needed(needed_mib: int | None, amount: str | None) -> None:
    larger = next_larger(parse("Session", running()), capacity(), needed_mib)
    assert (None if larger is None else larger.amount) == amount


def test_an_exact_amount_grows_in_mib_and_keeps_its_compute() -> None:
    session = parse("Session", running(amount="2048 MiB + 25 %", fgpu="0.5"))
    larger = next_larger(session, capacity(), 2050)
    assert larger is not None
    assert larger.amount == "2176 MiB + 25 %"
    assert larger.options["gpu_memory_mib"] == "2176"
    assert larger.options["compute_percent"] == "25"
    assert "fgpu" not in larger.options


def test_a_larger_amount_is_asked_for_of_the_same_model_where_there_are_others() -> None:
    session = parse("Session", running())
    found = capacity()
    alone = next_larger(session, found, None)
    assert alone is not None
    assert "gpu_model" not in alone.options
    (group,) = [g for g in found["groups"] if g["name"] == session["resource_group"]]
    group["devices"].append(group["devices"][0] | {"uuid": "GPU-other", "model": "Smaller GPU"})
    larger = next_larger(session, found, None)
    assert larger is not None
    assert larger.options == alone.options | {"gpu_model": session["gpus"][0]["model"]}


def test_a_whole_gpu_and_several_have_nothing_larger() -> None:
    whole = running(gpu_memory_mib=8192, fgpu="2", amount="2 fGPU", gpus=[gpu(memory_mib=8192)])
    assert next_larger(parse("Session", whole), capacity(), None) is None
    several = running(gpus=[gpu(), gpu(uuid="GPU-2")])
    assert next_larger(parse("Session", several), capacity(), None) is None


def test_a_process_is_of_the_notebook_whose_kernel_started_it() -> None:
    child = subprocess.Popen(
        [sys.executable, "-c", "print('up', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert child.stdout is not None
    # In its first instant a process has no command line.
    assert child.stdout.readline() == b"up\n"
    try:
        assert notebook_of(child.pid, {os.getpid(): "a/b.ipynb"}) == "a/b.ipynb"
        assert notebook_of(child.pid, {}) is None
        assert "input()" in (process_name(child.pid) or "")
    finally:
        child.communicate(b"\n")
    assert process_name(child.pid) is None
    assert notebook_of(child.pid, {os.getpid(): "a/b.ipynb"}) is None


def test_a_process_may_be_called_anything(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_text("7 (a) R 1 (b) S 5 7 7 0")
    assert notebook_of(7, {5: "c.ipynb"}, tmp_path) == "c.ipynb"
