"""Volumes that images ask for: they end with their session, and other volumes stay."""

from __future__ import annotations

from dockerhub import DockerHub, Engine

from hubprocess import until

OURS, UNNAMED = "fgpu.unnamed", "/srv/scratch"


def unnamed(engine: Engine, hub: DockerHub) -> set[str]:
    filters = {"label": f"{OURS}={hub.installation}"}
    return {v["Name"] for v in engine.client.volumes(filters=filters)["Volumes"] or ()}


def test_a_volume_that_an_image_asks_for_ends_with_its_session(engine: Engine, hub: DockerHub) -> None:
    foreign = engine.client.create_volume()["Name"]
    try:
        running = hub.running("vera", image="volume", fgpu="0.2")
        mounts = {m["Destination"]: m for m in running.container["Mounts"] if m["Type"] == "volume"}
        assert mounts[UNNAMED]["RW"], "the image's programs write there"
        assert {mounts[UNNAMED]["Name"]} <= unnamed(engine, hub)
        assert engine.run_in(running.id, "touch", f"{UNNAMED}/x", user="0")[0] == 0
        hub.end("vera")
        until(lambda: not unnamed(engine, hub), what="the volume is gone with its session")
        assert engine.client.inspect_volume(foreign), "another's stays"
    finally:
        engine.client.remove_volume(foreign)
