"""The server extension against a service over HTTP, in every way that the service can be."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from standin import TOKEN, StandIn, pending, resize, running
from support import SESSION_ENVIRONMENT, Caller, answers, driver

from jupyterlab_fgpu.service_client import SCHEMAS, parse


async def test_the_payload_holds_this_session_the_others_and_the_queue(
    caller: Caller, standin: StandIn
) -> None:
    status = await caller.status()
    assert status["hub"] == "ok"
    assert status["hub_message"] is None
    assert 0 <= status["as_of_s"] < 20
    assert status["simulated"] is True
    session = status["session"]
    assert (session["id"], session["fgpu"], session["gpu_memory_mib"]) == (12, "0.5", 2048)
    assert session["source"] == "service"
    assert session["gpu_memory_used_mib"] is None
    assert "driver" in session["gpu_memory_used_reason"]
    assert session["gpus"][0]["model"] == "Simulated 8 GiB"
    [other] = status["others"]
    assert (other["display_name"], other["state"], other["position"]) == ("gpu-2", "PENDING", 1)
    assert other["wait_text"].startswith("1 fGPU does not fit")
    assert other["pull"]["text"] == "fetching the image: 45 of 200 MiB"
    assert status["queue"] == {"group": "default", "length": 3, "reason": None}
    assert standin.calls == ["GET me", "GET sessions", "GET queue", "GET capacity"]


async def test_a_simulated_slice_shows_what_is_used_of_it(
    caller: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, driver(total_mib=2048, used_mib=700))
    session = (await caller.status())["session"]
    assert session["simulated"] is True
    assert (session["gpu_memory_used_mib"], session["gpu_memory_mib"]) == (700, 2048)


async def test_tabs_that_ask_together_share_one_read(caller: Caller, standin: StandIn) -> None:
    standin.delay_s = 0.05
    await asyncio.gather(*(caller.status() for _ in range(5)))
    await caller.status()
    assert standin.calls == ["GET me", "GET sessions", "GET queue", "GET capacity"]


async def test_a_service_that_went_down_leaves_stale_data_with_its_age(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    await caller.status()
    await standin.stop()
    extension.shared.forget()
    clock = extension.reader._clock
    extension.reader._clock = lambda: clock() + 90
    status = await caller.status()
    assert status["hub"] == "unreachable"
    assert status["hub_message"] == "The fGPU service cannot be reached."
    # In whole seconds; some may pass in the test itself.
    assert 90 <= status["as_of_s"] < 120
    assert status["session"]["id"] == 12
    assert [other["id"] for other in status["others"]] == [13]
    assert status["queue"]["length"] == 3


async def test_a_service_that_never_answered_leaves_the_environment(caller: Caller, standin: StandIn) -> None:
    await standin.stop()
    status = await caller.status()
    assert status["hub"] == "unreachable"
    assert status["as_of_s"] is None
    session = status["session"]
    assert session["source"] == "environment"
    assert (session["id"], session["fgpu"], session["gpu_memory_mib"]) == (12, "0.5", 2048)
    assert session["compute_percent"] == 25
    assert session["simulated"] is True
    assert status["others"] == []
    assert status["queue"]["length"] is None
    assert status["queue"]["reason"] == "The fGPU service cannot be reached."


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"delay_s": 3}, "The fGPU service did not answer in time."),
        ({"instead": {"*": (503, "no")}}, "The fGPU service is failing (status 503)."),
        # It is not followed with the token.
        ({"instead": {"me": (302, "")}}, "The fGPU service is failing (status 302)."),
    ],
)
async def test_a_slow_failing_or_leading_service_counts_as_unreachable(
    caller: Caller, standin: StandIn, extension: Any, fault: dict[str, Any], message: str
) -> None:
    vars(standin).update(fault)
    extension.reader.client._timeout_s = 0.3
    status = await caller.status()
    assert (status["hub"], status["hub_message"]) == ("unreachable", message)
    assert standin.calls == ["GET me"]


async def test_a_refused_token_shows_the_message_and_nothing_older(
    caller: Caller, standin: StandIn, extension: Any
) -> None:
    await caller.status()
    standin.refuse("sessions", 403, "Your account may not use fGPU here.")
    extension.shared.forget()
    status = await caller.status()
    assert status["hub"] == "forbidden"
    assert status["hub_message"] == "Your account may not use fGPU here."
    assert status["as_of_s"] is None
    assert status["others"] == []
    assert status["session"]["source"] == "environment"


async def test_a_refused_queue_leaves_the_sessions(caller: Caller, standin: StandIn) -> None:
    standin.refuse("queue", 403, "You may not read the queue.")
    status = await caller.status()
    assert status["hub"] == "ok"
    assert status["session"]["id"] == 12
    assert status["queue"]["length"] is None
    assert status["queue"]["reason"] == "You may not read the queue."


@pytest.mark.parametrize(
    "body",
    [
        "<html>not JSON</html>",
        "[]",
        "{}",
        '{"sessions": {}}',
        '{"sessions": [1]}',
        '{"sessions": [{"id": "12"}]}',
        json.dumps({"sessions": [running(gpu_memory_mib="2048")]}),
        json.dumps({"sessions": [running(id=True)]}),
        *(json.dumps({"sessions": [running(**{name: None})]}) for name in ("state", "display_name", "gpus")),
        "[" * 100_000,
    ],
)
async def test_an_answer_that_is_not_understood_is_not_shown(
    caller: Caller, standin: StandIn, body: str
) -> None:
    standin.instead["sessions"] = (200, body)
    status = await caller.status()
    assert status["hub"] == "unreachable"
    assert status["hub_message"].startswith("The fGPU service's answer was not understood")
    assert status["session"]["source"] == "environment"


async def test_field_that_an_older_service_lacks_counts_as_its_default(
    caller: Caller, standin: StandIn
) -> None:
    for name in ("folders", "can_park", "can_save", "can_keep", "never_park", "priority"):
        standin.sessions[0].pop(name, None)
    status = await caller.status()
    assert status["hub"] == "ok"
    assert parse("SessionMeter", {"every_s": 10}) == {"simulated": False, "every_s": 10, "points": []}
    assert status["session"]["can_park"] is status["session"]["can_save"] is False
    assert status["session"]["never_park"] is None


@pytest.mark.parametrize(
    ("name", "required"),
    [
        (
            "Session",
            "id user mine server_name display_name state url pending_url image image_name resource_group "
            "amount cpu memory_mib gpus simulated",
        ),
        ("Gpu", "uuid fgpu memory_mib simulated"),
        ("Meter", "at_s memory_limit_mib"),
        ("Resize", "amounts"),
        ("Me", ""),
    ],
)
def test_only_these_fields_must_be_in_an_older_services_answer(name: str, required: str) -> None:
    """Give a new field a default in objects.py, or a newer image's JupyterLab fails with an older Hub."""
    fields = SCHEMAS[name]["properties"].items()
    assert {field for field, schema in fields if not {"anyOf", "default"} & schema.keys()} == {
        *required.split()
    }


@pytest.mark.parametrize(("of_token", "own", "other"), [("gpu-2", 13, 12), (None, 12, 13)])
async def test_this_session_is_the_tokens_server_else_the_environments_and_others_are_of_its_owner(
    caller: Caller, standin: StandIn, of_token: str | None, own: int, other: int
) -> None:
    standin.server_name = of_token
    standin.sessions.append(pending(id=99, user="bob", mine=False))
    status = await caller.status()
    assert (status["session"]["id"], [one["id"] for one in status["others"]]) == (own, [other])


async def test_stop_cancels_and_the_next_status_knows(caller: Caller, standin: StandIn) -> None:
    await caller.status()
    code, body = await caller.call("sessions", "13", "stop", method="POST")
    assert code == 202
    assert body["session"]["state"] == "CANCELLED"
    assert (await caller.status())["others"] == []
    assert "DELETE sessions/13" in standin.calls
    # Also the one that it runs in.
    code, body = await caller.call("sessions", "12", "stop", method="POST")
    assert (code, body["session"]["state"]) == (202, "TERMINATING")


async def test_stop_passes_a_refusal_on(caller: Caller, standin: StandIn) -> None:
    standin.refuse("DELETE sessions/13", 403, "This server may not stop others.")
    code, body = await caller.call("sessions", "13", "stop", method="POST")
    assert code == 403
    assert body["error"]["message"] == "This server may not stop others."
    standin.refuse("DELETE sessions/13", 409, "It has ended already.", code="ended")
    code, body = await caller.call("sessions", "13", "stop", method="POST")
    assert (code, body["error"]["code"]) == (409, "ended")
    code, body = await caller.call("sessions", "77", "stop", method="POST")
    assert (code, body["error"]["code"]) == (404, "not_found")
    await standin.stop()
    code, body = await caller.call("sessions", "13", "stop", method="POST")
    assert (code, body["error"]["code"]) == (502, "down")


async def test_extend_passes_on_the_longer_limit_or_why_it_stays(caller: Caller, standin: StandIn) -> None:
    ends_at_s = int(time.time()) + 600
    standin.sessions[0].update(ends_at_s=ends_at_s, extend_by_s=3600)
    assert (await caller.status())["session"]["extend_by_s"] == 3600
    code, body = await caller.call("sessions", "12", "extend", method="POST")
    assert (code, body["session"]["ends_at_s"]) == (200, ends_at_s + 3600)
    assert (await caller.status())["session"]["ends_at_s"] == ends_at_s + 3600
    standin.refuse("POST sessions/12/extend", 409, "A start was promised.")
    code, body = await caller.call("sessions", "12", "extend", method="POST")
    assert (code, body["error"]["message"]) == (409, "A start was promised.")


async def test_polling_is_no_activity_and_needs_a_login(
    caller: Caller, jp_serverapp: Any, http_server_client: Any, jp_base_url: str
) -> None:
    before = jp_serverapp.web_app.settings.get("api_last_activity")
    await caller.status()
    assert jp_serverapp.web_app.settings.get("api_last_activity") == before
    await caller.call("sessions", "13", "stop", method="POST")
    assert jp_serverapp.web_app.settings.get("api_last_activity") != before
    answer = await http_server_client.fetch(jp_base_url + "fgpu/api/status", raise_error=False)
    assert answer.code == 403


async def test_input_is_noted_when_it_is_told_and_asking_for_it_is_none(
    caller: Caller, extension: Any, jp_serverapp: Any, http_server_client: Any, jp_base_url: str
) -> None:
    started = extension.input_at_s
    assert started > 0
    extension.input_at_s = 7
    before = jp_serverapp.web_app.settings.get("api_last_activity")
    assert await caller.call("input") == (200, {"input_at_s": 7})
    code, body = await caller.call("input", method="POST")
    assert (code, body["input_at_s"] >= started) == (200, True)
    assert await caller.call("input") == (200, body)
    assert jp_serverapp.web_app.settings.get("api_last_activity") == before
    answer = await http_server_client.fetch(
        jp_base_url + "fgpu/api/input", method="POST", body="{}", raise_error=False
    )
    assert answer.code == 403
    assert extension.input_at_s == body["input_at_s"]


async def test_a_failed_start_script_is_told_once(caller: Caller, extension: Any) -> None:
    for state, left in (("running", True), ("failed", False)):
        extension.own_setup = SimpleNamespace(script={"state": state, "status": None})
        assert (await caller.status())["script"] == {"state": state, "status": None}
        assert await caller.call("script", method="POST") == (200, {})
        assert ((await caller.status())["script"] is not None) == left


async def test_the_token_is_in_no_answer_and_no_log_line(
    caller: Caller, standin: StandIn, extension: Any, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    await caller.status()
    echo = json.dumps({"error": {"code": TOKEN, "field": TOKEN, "message": f"bad {TOKEN}"}})
    for status in (200, 302, 400, 403, 404, 500):
        standin.instead["*"] = (status, echo)
        extension.shared.forget()
        await caller.status()
        await caller.call("sessions", "13", "stop", method="POST")
    standin.instead.clear()
    standin.sessions[1]["wait_text"] = f"leaked {TOKEN}"
    extension.shared.forget()
    assert "leaked [token]" in json.dumps(await caller.status())
    await standin.stop()
    extension.shared.forget()
    await caller.status()
    assert TOKEN not in caller.sent
    assert TOKEN not in caplog.text
    assert TOKEN not in repr(vars(extension.reader.client))


class TestWithoutAHub:
    @pytest.fixture
    def session_environment(self) -> dict[str, str]:
        return {}

    async def test_there_is_no_session_and_the_reason_is_told(self, caller: Caller) -> None:
        status = await caller.status()
        assert status["hub"] == "absent"
        assert status["hub_message"] == "This server was not started by a Hub with fGPU."
        assert status["session"] is None
        assert status["others"] == []
        assert status["queue"]["length"] is None
        code, body = await caller.call("sessions", "13", "stop", method="POST")
        assert (code, body["error"]["code"]) == (502, "absent")


class TestWithoutAService:
    @pytest.fixture
    def session_environment(self) -> dict[str, str]:
        return SESSION_ENVIRONMENT

    async def test_the_slice_of_the_environment_is_still_shown(self, caller: Caller) -> None:
        status = await caller.status()
        assert status["hub"] == "absent"
        assert status["session"]["fgpu"] == "0.5"


async def test_an_idle_session_is_kept_through_the_service(caller: Caller, standin: StandIn) -> None:
    warned = {"warning": "idle", "ends_at_s": 1790000600, "can_keep": True}
    standin.sessions = [running(**warned), pending()]
    session = (await caller.status())["session"]
    assert {name: session[name] for name in warned} == warned
    _, answer = await caller.call("sessions", "12", "keep", method="POST")
    assert answer["session"]["can_keep"] is False
    # What every tab sees next is not what was read before.
    assert (await caller.status())["session"]["warning"] is None
    assert "POST sessions/12/keep" in standin.calls
    standin.refuse("POST sessions/12/keep", 409, "It is not idle.", code="nothing_to_keep")
    code, body = await caller.call("sessions", "12", "keep", method="POST")
    assert (code, body["error"]["code"], body["error"]["message"]) == (
        409,
        "nothing_to_keep",
        "It is not idle.",
    )


async def test_a_session_is_resized_with_the_servers_token_and_told_once_it_has_it(
    caller: Caller, standin: StandIn
) -> None:
    standin.sessions[0]["resize"] = resize()
    assert (await caller.status())["session"]["resize"]["amounts"][-1] == "0.8"
    code, body = await caller.call("sessions", "12", "resize", method="POST", body='{"fgpu": "0.8"}')
    found = body["session"]
    assert (code, found["amount"], found["resize"]["state"]) == (200, "0.8 fGPU", "DONE")
    assert json.loads(standin.sent) == {"fgpu": "0.8"}
    assert "PATCH sessions/12" in standin.calls
    # At once, and not as it was read before.
    assert (await caller.status())["session"]["amount"] == "0.8 fGPU"
    assert TOKEN not in caller.sent


async def test_a_session_is_renamed_and_the_next_status_has_its_name(
    caller: Caller, standin: StandIn
) -> None:
    await caller.status()
    code, body = await caller.call("sessions", "12", "rename", method="POST", body='{"name": "thesis"}')
    assert (code, body["session"]["display_name"]) == (200, "thesis")
    assert json.loads(standin.sent) == {"name": "thesis"}
    assert (await caller.status())["session"]["display_name"] == "thesis"
    error = {"code": "bad_argument", "field": "name", "message": "name: give a name"}
    standin.instead["PATCH sessions/12"] = (400, json.dumps({"error": error}))
    code, body = await caller.call("sessions", "12", "rename", method="POST", body='{"name": ""}')
    assert (code, body["error"]["message"]) == (400, "give a name")


async def test_a_slice_that_stays_says_why_in_the_services_words(caller: Caller, standin: StandIn) -> None:
    async def asked(body: str) -> tuple[int, str, str]:
        code, answer = await caller.call("sessions", "12", "resize", method="POST", body=body)
        return code, answer["error"]["code"], answer["error"]["message"]

    standin.sessions[0]["resize"] = resize()
    # The Hub's, which comes later.
    standin.refusal = "The session uses 2.9 GiB of GPU memory: choose at least 0.8."
    assert await asked('{"fgpu": "0.3"}') == (409, "not_resized", standin.refusal)
    # The service's, at once.
    error = {"code": "bad_argument", "field": "fgpu", "message": "fgpu: choose 0.5 or 0.6"}
    standin.instead["PATCH sessions/12"] = (400, json.dumps({"error": error}))
    assert await asked('{"fgpu": "0.55"}') == (400, "bad_argument", "choose 0.5 or 0.6")
    standin.refuse("PATCH sessions/12", 403, "a session's own token resizes that session only")
    assert (await asked('{"fgpu": "0.6"}'))[:2] == (403, "forbidden")
    # What is no amount is not passed on.
    standin.calls.clear()
    assert (await asked("[]"))[:2] == (400, "bad_argument")
    assert standin.calls == []
