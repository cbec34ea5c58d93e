"""The page of the cluster map."""

from __future__ import annotations

from fgpu_scheduler import StoreUnavailable, SystemClock
from fgpuspawner.service.pages.base import PageHandler
from fgpuspawner.service.pages.cluster_map import cluster_map

PARTS = ("drawing", "words", "read")


class MapPage(PageHandler):
    """Every GPU with its slices, and the queue; from the last good reading, with its age, if none is possible now."""

    async def get(self) -> None:
        reader, trouble = self.service.reader, None
        try:
            world = await (reader.world() if self.wants_part else reader.recent_world())
        except StoreUnavailable as e:
            last = reader.last_world
            if last is None:
                raise
            trouble, world = self.problem_of(503, e), last
            self.set_status(503)
        step = self.service.settings.caps().fgpu_step_milli
        more = {
            "groups": cluster_map(world, self.viewer, step_milli=step, beside=reader.beside(world)),
            "trouble": trouble,
            "age_s": SystemClock().now_s() - world.snapshot.now_s,
            "read_at_s": world.snapshot.now_s,
            "xsrf": self.xsrf,
            "title": "Cluster map",
        }
        if not self.wants_part:
            self.render("map.html", **more)
            return
        parts = {name: self.render_string(f"map_{name}.html", **more).decode() for name in PARTS}
        self.send_parts({"parts": parts})
