"""A launch that is not granted its placement leaves nothing behind, and its session is queued again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from memory_queue import MemoryQueue

from fgpu_scheduler import Device, Node, Request, Requeued, Session, SessionState, WaitReason
from fgpuspawner.spawner.launch import Launch

GPU = Device("GPU-1", "n1", 0, "Test GPU", 8192, 1000)
NODE = Node("n1", "default", 8000, 16384, (GPU,))


async def test_gpu_removed_between_placement_and_launch_is_not_used() -> None:
    kept: dict[int, Session] = {}
    queue = MemoryQueue(kept, 2, lambda: 100)
    await queue.start([NODE])
    (session,) = await queue.submit([Request("ann", "", "python", "default", 1000, 1000, 1024)])
    placed = await queue.placed(session.id)
    cleared: list[int] = []

    async def clear(session: Session) -> None:
        assert kept[session.id].state is SessionState.PREPARING, "before it is back in the queue"
        cleared.append(session.id)

    runtime = SimpleNamespace(
        queue=queue,
        clear=clear,
        engine=None,
        settings=SimpleNamespace(launch_timeout_s=60),
        isolation=SimpleNamespace(devices_of=lambda session: ()),
    )
    describe: Any = None
    with pytest.raises(Requeued, match="the GPU is not there any more"):
        await Launch(cast(Any, runtime), placed, describe, path="/", token=None).run()
    waits = kept[session.id]
    assert (waits.state, waits.wait_reason) == (SessionState.PENDING, WaitReason.CLUSTER)
    assert ([node.node_id for node in waits.refused], cleared) == (["n1"], [session.id])
