"""A Hub with a warm pool, for tests."""

from __future__ import annotations

from typing import Any

from dockerhub import DockerHub, Engine, Running, until

HALF = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 700}


class Pool:
    """A Hub with a warm pool of one image."""

    def __init__(self, hub: DockerHub, engine: Engine) -> None:
        self.hub = hub
        self.engine = engine

    def waiting(self) -> dict[str, str]:
        """Return the containers that wait and are ready: ids by name."""
        names = {
            name: container
            for name, container in self.engine.of_installation(self.hub.installation).items()
            if "-warm-" in name
        }
        return {
            name: container
            for name, container in names.items()
            if (found := self.engine.inspect(container)) and not found["NetworkSettings"]["Networks"]
        }

    def filled(self, count: int) -> dict[str, str]:
        """Wait until this number of containers is ready, and return them."""
        return until(
            lambda: found if len(found := self.waiting()) == count else {},
            within_s=180,
            what=f"{count} containers wait",
        )

    def take(self, user: str, **options: Any) -> tuple[Running, set[str]]:
        """Start a session that takes a warm container; return it, and the ids that waited before."""
        before = set(self.waiting().values())
        running = self.hub.running(user, **{**HALF, **options})
        assert running.id in before, self.hub.said()[-4000:]
        return running, before
