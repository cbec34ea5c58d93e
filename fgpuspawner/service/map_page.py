"""The page of the cluster map."""

from __future__ import annotations

import json

from fgpu_scheduler import StoreUnavailable, SystemClock
from fgpuspawner.service.cluster_map import cluster_map
from fgpuspawner.service.figures import instant, moment
from fgpuspawner.service.pages import PageHandler, xsrf_text

PARTS = ("drawing", "words", "read")


class MapPage(PageHandler):
    """Every GPU with its slices, and who waits; the last good reading, with its age, if there is none now."""

    async def get(self) -> None:
        reader, trouble = self.service.reader, None
        try:
            world = await (reader.world() if self.wants_part else reader.recent_world())
            unblockings = await reader.unblockings(world)
        except StoreUnavailable as e:
            last = reader.last_world
            if last is None:
                raise
            trouble, world, unblockings = self.problem_of(503, e), last, {}
            self.set_status(503)
        step = self.service.settings.caps().fgpu_step_milli
        more = {
            "groups": cluster_map(world, self.viewer, unblockings, step_milli=step),
            "trouble": trouble,
            "age_s": SystemClock().now_s() - world.snapshot.now_s,
            "as_of": instant(world.snapshot.now_s),
            "moment": moment,
            "xsrf": xsrf_text(self.xsrf_token),
            "title": "Cluster map",
        }
        if not self.wants_part:
            self.render("map.html", **more)
            return
        parts = {name: self.render_string(f"map_{name}.html", **more).decode() for name in PARTS}
        self.set_header("Content-Type", "application/json; charset=utf-8")
        self.finish(json.dumps({"parts": parts}))
