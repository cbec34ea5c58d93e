"""Where the engine's own queue decides which request is next, administrators are not offered to decide it here."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import requests
from standing import asked, gpus, standing

from fgpuspawner.engines.base import WhoseQueue

ROOT = {"Authorization": "token token-root"}


def test_an_administrator_reads_that_the_engine_decides_and_cannot_set_a_priority(tmp_path: Path) -> None:
    with standing(tmp_path) as service:
        service.engine = replace(service.engine, queue=WhoseQueue.ENGINE)
        service.store.set_nodes([gpus(1)], now_s=1)
        waits = service.store.submit([asked("ann", fgpu_milli=500)], now_s=1)[0]
        service.start()
        page = requests.get(f"{service.url}admin/queue", headers=ROOT, timeout=60)
        assert "ann" in page.text
        assert "The engine's own queue decides which request is next." in page.text
        assert 'name="priority"' not in page.text
        where = f"{service.url}api/v1/admin/sessions/{waits.id}/priority"
        answer = requests.put(where, headers=ROOT, json={"priority": 7}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "engines_queue")
        assert service.store.session(waits.id).request.priority == 0
