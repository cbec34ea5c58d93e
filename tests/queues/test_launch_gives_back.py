"""A launch that is not granted its placement leaves nothing behind, and its session is queued again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from queue_lab import NODE, Lab

from fgpu_scheduler import Request, Requeued, Session, SessionState, WaitReason
from fgpuspawner.spawner.launch import Launch


async def test_gpu_removed_between_placement_and_launch_is_not_used(lab: Lab) -> None:
    (session,) = await lab.queue.submit([Request("ann", "", "python", "default", 1000, 1000, 1024)])
    placed = await lab.queue.placed(session.id)
    cleared: list[int] = []

    async def clear(session: Session) -> None:
        now = await lab.queue.session(session.id)
        assert now.state is SessionState.PREPARING, "before it is back in the queue"
        cleared.append(session.id)

    runtime = SimpleNamespace(
        queue=lab.queue,
        clear=clear,
        engine=None,
        settings=SimpleNamespace(launch_timeout_s=60),
        isolation=SimpleNamespace(devices_of=lambda session: ()),
    )
    describe: Any = None
    with pytest.raises(Requeued, match="the GPU is gone"):
        await Launch(cast(Any, runtime), placed, describe, path="/", token=None).run()
    waits = await lab.queue.session(session.id)
    assert (waits.state, waits.wait_reason) == (SessionState.PENDING, WaitReason.CLUSTER)
    assert ([node.node_id for node in waits.refused], cleared) == ([NODE.id], [session.id])
