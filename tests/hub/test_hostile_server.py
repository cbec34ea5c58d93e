"""A session whose server means harm to the Hub that asks whether it is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import psutil

from hubprocess import HubProcess, until

MINE = Path(__file__).parent / "hostileserver.py"


def test_servers_that_answer_with_100_mb_again_and_again_do_not_fill_the_hubs_memory(
    make_hub: Callable[..., HubProcess], tmp_path: Path
) -> None:
    asked = tmp_path / "asked"
    asked.mkdir()
    after = f"c.Spawner.cmd = ['python', {str(MINE)!r}, {str(asked)!r}]\n"
    hub = make_hub(mini=False, service=False, after=after, launch_timeout_s=600).start()
    assert hub.process is not None
    process = psutil.Process(hub.process.pid)
    users = ("mallory", "mick")
    for user in users:
        hub.add_user(user)
    before = process.memory_info().rss
    for user in users:
        hub.spawn(user, options={"fgpu": 0.5})

    def times() -> list[int]:
        return [path.stat().st_size for path in asked.iterdir()]

    until(lambda: len(found := times()) == 2 and min(found) >= 6, what="both were asked again and again")
    assert process.memory_info().rss - before < 60_000_000, "one answer alone has 100 MB"
    for user in users:
        hub.stop(user)
