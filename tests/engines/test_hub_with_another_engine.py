"""A whole Hub with a third-party engine: log-in, queue, the session's page, its end."""

from __future__ import annotations

from pathlib import Path

from hubprocess import running

HERE = Path(__file__).parent
ON_THE_PATH = f"import sys\nsys.path.insert(0, {str(HERE)!r})\n"
WHOLE = {"fgpu": "2", "cpu": "0.1", "memory_mib": 256}


def test_hub_queues_launches_shows_and_ends_sessions_of_a_third_party_engine(
    tmp_path: Path,
) -> None:
    # A thread's limits cannot be verified from inside, so the Hub runs it only without isolation.
    more = {"runtime": "memory_engine:MemorySpawner", "isolation": "none", "simulated_gpus": "1"}
    with running(tmp_path, before=ON_THE_PATH, **more) as hub:
        for user in ("ann", "ben"):
            hub.add_user(user)
            assert hub.spawn(user, options=WHOLE).status_code in (201, 202)
        hub.reach({"ann/": "RUNNING", "ben/": "PENDING"})
        with hub.browser("ann", leads_to="/hub/home") as ann:
            page = ann.get(f"{hub.url}/user/ann/lab", timeout=60)
            assert (page.status_code, page.text) == (200, "a session in memory")
            sessions = ann.get(f"{hub.url}/services/fgpu/", timeout=60)
            assert "RUNNING" in sessions.text
        with hub.browser("ben", leads_to="/hub/home") as ben:
            waiting = ben.get(f"{hub.url}/hub/spawn-pending/ben", timeout=60)
            assert waiting.status_code == 200
            assert "queue" in waiting.text
        assert hub.stop("ann").status_code in (202, 204)
        hub.reach({"ben/": "RUNNING"})
        assert hub.stop("ben").status_code in (202, 204)
        hub.reach({})
