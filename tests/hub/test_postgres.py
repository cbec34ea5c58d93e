"""The Hub with the scheduler's database on PostgreSQL: queue, restart, and the same order as before."""

from __future__ import annotations

from collections.abc import Callable

from hubprocess import HubProcess, until

ONE = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}


def test_requests_wait_start_and_survive_a_killed_hub_on_postgresql(
    make_hub: Callable[..., HubProcess], postgresql: str
) -> None:
    hub = make_hub(db_url=postgresql).start()
    users = ["a", "b", "c", "d"]
    for user in users:
        hub.add_user(user)
        assert hub.spawn(user, options=ONE).status_code in (201, 202)
    expected = {"a/": "RUNNING", "b/": "RUNNING", "c/": "PENDING", "d/": "PENDING"}
    hub.reach(expected)
    before = {key: s.id for key, s in hub.sessions().items()}
    hub.kill()
    hub.start()
    until(lambda: not any(s.held for s in hub.sessions().values()), what="the requests are resumed")
    hub.reach(expected)
    assert {key: s.id for key, s in hub.sessions().items()} == before
    assert hub.stop("a").status_code in (202, 204)
    hub.reach({"b/": "RUNNING", "c/": "RUNNING", "d/": "PENDING"})
