"""A running service with data of every kind, to check what each caller may read."""

from __future__ import annotations

from pathlib import Path

from test_service import World, end, now_s, place, run, submit

from fgpu_scheduler import ImageQuota, Meters, PrivateImages, SessionMeasurements
from fgpuspawner.meter.model import METERS, Live, Meter, MeterState, Point, Process

SECRET = "s3cret"
"""In every name and message of bob's: in no answer to alice or carol may it be."""
SERVER_SCOPES = ["access:services!service=fgpu", "custom:fgpu:queue:read", "access:servers!server=alice/"]


class Filled(World):
    """The `World`, where bob has sessions, measures, receipts and private images that name his secret."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        store = self.store
        self.bobs_past = run(store, "bob", f"{SECRET}-past", 100, image=f"{SECRET}-image")
        end(store, self.bobs_past)
        self.alices_past = run(store, "alice", "past", 100)
        end(store, self.alices_past)
        self.bobs_secret = submit(store, "bob", f"{SECRET}-waits", 1000)
        place(store)
        Meters(store).save(
            [
                SessionMeasurements(
                    s.id,
                    now_s(),
                    50_000,
                    400,
                    samples=9,
                    covered_s=90,
                    peak_mib=123,
                    p95_mib=120,
                    sm_p95_percent=3,
                )
                for s in (self.bobs_past, self.alices_past)
            ]
        )
        self.bobs_image = self._wish(self.bob_runs.id, SECRET)
        self.tell_meters()
        self.alices_server = self._token(SERVER_SCOPES)
        self.only_access = self._token(SERVER_SCOPES[:1])

    def _token(self, scopes: list[str]) -> str:
        return str(self.hub.api("POST", "users/alice/tokens", json={"scopes": scopes}).json()["token"])

    def _wish(self, session_id: int, name: str) -> int:
        session = self.store.session(session_id)
        assert session is not None
        wishes = PrivateImages(self.store)
        asked_by = session.request.user
        return wishes.request(session_id, name=name, asked_by=asked_by, quota=ImageQuota(), now_s=now_s()).id

    def alices_image(self) -> int:
        """Return the id of an image that alice's running session is being saved as."""
        own = [image.id for image in PrivateImages(self.store).all() if image.owner == "alice"]
        return own[0] if own else self._wish(self.alice_runs.id, "mine")

    def tell_meters(self) -> None:
        """Tell of both who run, as the Hub would."""
        at_s = now_s()

        def live(name: str) -> Live:
            meter = Meter(at_s, 300, 2048, 12.5, 25, 10.0, None)
            return Live(
                meter, (Point(at_s - 10, 299, None), Point(at_s, 300, 12.5)), (Process(7, name, 300),)
            )

        found = {self.alice_runs.id: live("python3"), self.bob_runs.id: live(SECRET)}
        METERS.write(self.hub.fgpu.data_path(), MeterState(300, found))
