"""Every field of a request with what is no amount: each is refused in words, starts nothing, and the Hub goes on."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from hubprocess import MINI, PATIENT, WITHOUT_SERVICE, HubProcess, until

FIELDS = (
    *("fgpu", "cpu", "memory_mib", "gpu_memory_mib", "compute_percent"),
    *("count", "time_limit", "time_limit_s", "priority", "gpu_model", "gpu_models", "image", "group"),
)
VALUES = (
    *("-1", "0.3333333", "1e-9", "1e309", "NaN", "Infinity", "true", "{}", "[1]", '"0x10"', '"1\\u0000"'),
    *('"\\ud800"', '"\u0661"', '"1_0"', '"--1"', '"1; DROP TABLE fgpu_sessions"', "18446744073709551616"),
    *("1" * 4000, '"' + "9" * 5000 + '"', "1e400", "[" * 300 + "]" * 300),
)
"""As JSON has them, also where it has no such number."""


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubProcess]:
    quotas = [{"user": "*", "max_fgpu": 1, "max_pending": 6}]
    folder = tmp_path_factory.mktemp("hub")
    found = HubProcess(folder, before=PATIENT, after=MINI + WITHOUT_SERVICE, quotas=quotas)
    try:
        yield found.start()
    finally:
        found.close()


def sent(hub: HubProcess, token: str, body: str) -> requests.Response:
    headers = {"Authorization": f"token {token}", "Content-Type": "application/json"}
    url = f"{hub.url}/hub/api/users/mallory/server"
    return requests.post(url, data=body.encode("utf-8", "surrogatepass"), headers=headers, timeout=60)


def test_invalid_amounts_start_nothing(hub: HubProcess) -> None:
    token = hub.add_user("mallory")
    other = hub.add_user("alice")
    for field, value in itertools.product(FIELDS, VALUES):
        answer = sent(hub, token, f'{{"user_options": {{"{field}": {value}}}}}')
        assert answer.status_code == 400, (field, value[:40], answer.status_code, answer.text[:300])
        assert len(answer.content) < 4000, (field, value[:40])
    # Deep enough that the Hub could parse it once, and afterwards not read its own database.
    for depth in range(60, 1000, 20):
        answer = sent(hub, token, f'{{"user_options": {{"fgpu": {"[" * depth}{"]" * depth}}}}}')
        assert answer.status_code == 400, (depth, answer.text[:300])
        assert hub.api("GET", "users/alice", token=other).status_code == 200
    assert hub.states() == {}
    assert hub.store.ended(user=None, limit=1) == ()
    assert hub.spawn("alice", options={"fgpu": "0.5"}).status_code in (201, 202)
    hub.reach({"alice/": "RUNNING"})


def test_fifty_requests_at_once_respect_quotas(hub: HubProcess) -> None:
    token = hub.add_user("racer")
    one = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}

    def ask(number: int) -> int:
        url = f"users/racer/servers/s-{number}"
        return hub.api("POST", url, token=token, json={"user_options": one}).status_code

    with ThreadPoolExecutor(50) as pool:
        assert all(status in (201, 202, 400, 409) for status in pool.map(ask, range(50)))

    def asked_for() -> int:
        return sum(bool(s["pending"] or s["ready"]) for s in hub.servers("racer").values())

    until(lambda: asked_for() == 7, what="all others are refused")
    own = [s for s in hub.sessions().values() if s.request.user == "racer"]
    holds = [s for s in own if s.placement is not None]
    assert len(holds) == 1
    assert len(own) - len(holds) == 6
    # A request after a cancel is last, and a forbidden priority is refused.
    first = min((s for s in own if s.placement is None), key=lambda s: s.id)
    assert hub.stop("racer", first.request.server_name).status_code in (202, 204)
    hub.reach(
        {key: state for key, state in hub.states().items() if not key.endswith(first.request.server_name)}
    )
    assert hub.spawn("racer", first.request.server_name, options=one).status_code in (201, 202)
    newest = max(hub.sessions().values(), key=lambda s: s.id)
    assert newest.request.server_name == first.request.server_name
    hub.add_user("bea")
    refused = hub.refused("bea", options={**one, "priority": 1})
    assert "priority: 1 is too high; choose at most 0" in refused.text
