"""A frozen container, or a registry that never answers, does not delay other users."""

from __future__ import annotations

import socket
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dockerhub import BASE, MINI, ONE, DockerHub, Engine, until

from fgpuspawner.engines.docker.containers import THREADS


def test_stop_of_a_frozen_container_delays_no_spawn(
    make_hub: Callable[..., DockerHub], engine: Engine
) -> None:
    # Longer than any spawn takes: it does not run out.
    hub = make_hub(after=MINI + "c.FGPUSpawner.stop_timeout_s = 240\n").start()
    frozen = hub.running("alice")
    # Its first process takes no signal now but SIGKILL, so stopping it takes all of the grace.
    engine.client.kill(frozen.id, "SIGSTOP")
    with ThreadPoolExecutor(1) as thread:
        stopping = thread.submit(hub.stop, "alice")
        hub.wait_state("alice", "", "TERMINATING")
        hub.running("bob")
        assert hub.states() == {"alice/": "TERMINATING", "bob/": "RUNNING"}
        # Now it takes the SIGTERM that waits for it.
        engine.client.kill(frozen.id, "SIGCONT")
        assert stopping.result(60).status_code in (202, 204)
    hub.wait_state("alice", "", None)
    engine.wait_gone(frozen.id)


def test_pulls_from_a_silent_registry_delay_neither_a_spawn_nor_the_hubs_end(
    make_hub: Callable[..., DockerHub],
) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=128) as registry:
        silent = f"127.0.0.1:{registry.getsockname()[1]}/fgpu-test/silent:1"
        images = {"python": BASE, "silent": silent}
        hub = make_hub(after=MINI, images=images, max_pending_per_user=100).start()
        hub.add_user("alice")
        options = {**ONE, "image": "silent", "fgpu": "0.1", "cpu": "0.1"}
        servers = [f"s{n}" for n in range(THREADS + 1)]
        with ThreadPoolExecutor(8) as threads:
            list(threads.map(lambda server: hub.spawn("alice", server, options=options), servers))
        pulling = {f"alice/{server}": "PULLING" for server in servers}
        until(lambda: hub.states() == pulling, what="all of them pull")
        hub.add_user("bob")
        hub.spawn("bob", options=ONE)
        hub.wait_ready("bob", within_s=45)  # A call to an engine may take a minute.
        assert hub.states() == {**pulling, "bob/": "RUNNING"}, "they pull still"
        # This waits for a minute. A silent pull is given up after three.
        hub.terminate()
