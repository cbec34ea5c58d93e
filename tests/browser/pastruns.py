"""Runs that have ended long ago, written into a Hub's database beside real sessions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sqlalchemy import create_engine, insert, select

from fgpu_scheduler.store import schema


@dataclass(frozen=True)
class Run:
    """One run on one GPU: its amount, wait, length and measurements."""

    user: str
    image: str
    milli: int
    ended_s: int
    peak_mib: int
    wait_s: int = 3
    run_s: int = 3600
    cause: str = "USER"
    sm_p95_percent: int = 5
    device: int = 0

    @property
    def memory_mib(self) -> int:
        """Its slice of a simulated GPU of 8 GiB, which is 2 fGPU."""
        return self.milli * 4096 // 1000 // 128 * 128


def write_runs(database: Path, runs: Iterable[Run]) -> None:
    """Write the runs, in their order."""
    engine = create_engine(f"sqlite:///{database}", connect_args={"timeout": 30})
    with engine.begin() as connection:
        devices = list(connection.execute(select(schema.devices.c.uuid)).scalars())
        for run in runs:
            started_s = run.ended_s - run.run_s
            session = connection.execute(
                insert(schema.sessions).values(
                    user_name=run.user,
                    server_name="",
                    image=run.image,
                    resource_group="default",
                    account="",
                    name="",
                    setup=0,
                    parked_mib=0,
                    on_demand=False,
                    fgpu_milli=run.milli,
                    cpu_milli=100,
                    memory_mib=512,
                    state="TERMINATED",
                    submitted_at_s=started_s - 2 - run.wait_s,
                    held=False,
                    attempt=1,
                    priority=0,
                    groups="[]",
                    extended_s=0,
                    refused="[]",
                    sizes="[]",
                    node_id="local",
                    scheduled_at_s=started_s - 2,
                    started_at_s=started_s,
                    ended_at_s=run.ended_s,
                    end_cause=run.cause,
                )
            ).inserted_primary_key
            assert session is not None
            connection.execute(
                insert(schema.shares).values(
                    session_id=session[0],
                    position=0,
                    device_uuid=devices[run.device % len(devices)],
                    mode="memory+compute",
                    fgpu_milli=run.milli,
                    memory_mib=run.memory_mib,
                    compute_percent=run.milli // 20,
                )
            )
            connection.execute(
                insert(schema.meters).values(
                    session_id=session[0],
                    at_s=run.ended_s,
                    gpu_millionths=run.milli * 500,
                    limit_mib=run.memory_mib,
                    samples=run.run_s // 10,
                    covered_s=run.run_s,
                    peak_mib=run.peak_mib,
                    p95_mib=run.peak_mib * 95 // 100,
                    sm_p95_percent=run.sm_p95_percent,
                    energy_mj=run.run_s * run.milli * 150,
                    energy_estimated=True,
                    counts="{}",
                )
            )
    engine.dispose()
