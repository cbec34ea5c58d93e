"""A week of a Hub in minutes: sessions that come and go, faults beside them, and what all that leaves behind."""

from __future__ import annotations

import random
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil
import requests
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

import quickstart
from fgpu_scheduler.store.retention import KEPT_EVENTS, TYPICAL_RUNS
from fgpuspawner.engines.docker import firewall
from hubprocess import HubProcess, until
from launched import launched, processes_of
from leftovers import remove_leftovers
from outages import Locked, Stopped
from servers import MINI, QUICK, server_lines

USERS = [f"user{n:02}" for n in range(8)]
ASKED = {"fgpu": "1", "cpu": "0.1", "memory_mib": 256}
HISTORY_DAYS = 1
LEAST_PAUSE_S = 0.2
_KINDS = ("sessions", "events", "meters", "shares", "audit", "first_forecasts", "end_messages")
TABLES = tuple(f"fgpu_{kind}" for kind in _KINDS)
DAY_S, HOUR_S = 24 * 3600, 3600

PACED = """
import time
from fgpu_scheduler.ports import SystemClock
from fgpu_scheduler.service import forecasts
from fgpuspawner.concurrency.background import Background

FACTOR, BEGAN_S, LEAST_S = {factor!r}, {began_s!r}, {least_s!r}
SystemClock.now_s = lambda self: int(BEGAN_S + FACTOR * (time.time() - BEGAN_S))
forecasts.FORECAST_FOR_S *= FACTOR
unpaced = Background.every

def sooner(seconds):
    return None if seconds is None else max(seconds / FACTOR, min(seconds, LEAST_S))

def every(self, seconds, step, *, first_after_s=0.0, again_after_s=None, **kwargs):
    pauses = {{"first_after_s": sooner(first_after_s), "again_after_s": sooner(again_after_s)}}
    return unpaced(self, sooner(seconds), step, **pauses, **kwargs)

Background.every = every
"""
"""The clock of Hub and service runs faster, and all that they do again and again they do sooner."""
SERVICE = """
import sys
for service in c.JupyterHub.services:
    if service["name"] == "fgpu":
        main = "import sys, fgpuspawner.service.process as process; sys.exit(process.main())"
        service["command"] = [sys.executable, "-c", {paced!r} + main]
"""
HUBS_OWN = """
c.JupyterHub.log_level = "INFO"
c.JupyterHub.last_activity_interval = c.JupyterHub.service_check_interval = 2
"""
AWAY = """
from pathlib import Path
from fgpu_scheduler import Seen
from fgpuspawner.engines.base import LaunchFailed
from fgpuspawner.engines.docker.engine import DockerEngine
from fgpuspawner.engines.local.engine import LocalEngine

def goes_away(engine):
    start, observe = engine.start, engine.observe
    async def refused(self, spec):
        if Path({away!r}).exists():
            raise LaunchFailed("the engine does not answer")
        return await start(self, spec)
    async def silent(self):
        return Seen((), ()) if Path({away!r}).exists() else await observe(self)
    engine.start, engine.observe = refused, silent

goes_away(DockerEngine)
goes_away(LocalEngine)
"""


@dataclass(frozen=True, slots=True)
class Of:
    """What one process has."""

    rss_mib: float
    uss_mib: float
    descriptors: int
    threads: int
    children: int
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Sample:
    """The resources in use after all sessions have ended.

    Attributes:
        sessions: the number of sessions until now.
        simulated_h: the hours of the Hub's clock.
        life: the number of starts of the Hub.
        of: resources of each process (hub, service, proxy).
        rows: by table of the scheduler's database; ``old`` are rows that retention should have deleted.
        hub_rows: by table of the Hub's database.
        files: by folder of data_dir.
        database_kib: the size of both databases.
        left: things that should be gone.
    """

    sessions: int
    simulated_h: float
    life: int
    of: dict[str, Of]
    rows: dict[str, int]
    hub_rows: dict[str, int]
    files: dict[str, int]
    database_kib: dict[str, int]
    left: list[str]


@dataclass
class Soak:
    """One Hub, the sessions and the faults. ``factor``: simulated seconds in one."""

    folder: Path
    factor: float
    kind: str = "local"
    plant: str = ""
    outages: type[Locked | Stopped] = Locked
    """The scheduler's database, and how it is away."""
    warm: int = 0
    """Containers that wait for a session."""
    faults: dict[str, int] = field(default_factory=dict)
    ends: dict[str, int] = field(default_factory=dict)
    lives: int = 0

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.began_s = int(time.time())
        self._away = self.folder / "engine-is-away"
        self._outage = self.outages(self.folder)
        self._chance = random.Random(20261124)
        paced = PACED.format(factor=self.factor, began_s=self.began_s, least_s=LEAST_PAUSE_S)
        # What is kept warm is a real server.
        server = "" if self.warm else server_lines(self.kind, MINI)
        after = HUBS_OWN + QUICK + server + SERVICE.format(paced=paced)
        self.hub = HubProcess(
            self.folder / "hub",
            before=paced + AWAY.format(away=str(self._away)) + self.plant,
            after=after,
            outer_proxy=True,
            runtime=self.kind,
            db_url=self._outage.url,
            simulated_gpus="2",
            history_days=HISTORY_DAYS,
            queue_timeout_s=30 * DAY_S,
            resume_grace_s=30,
            watchdog_every_s=1,
            meter_every_s=1,
            disk_every_s=5,
            **({"warm_pool": {"python": self.warm}} if self.warm else {}),
        )

    def __enter__(self) -> Soak:
        try:
            self._start()
            for user in USERS:
                self.hub.add_user(user)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        installation = self.hub.store.installation_id if self.hub.process is not None else None
        self.hub.close()
        if self.kind == "docker" and installation:
            remove_leftovers(installation)
        self._outage.close()

    def _start(self) -> None:
        self.hub.start()
        self.lives += 1
        until(lambda: service_of(self.hub), what="the service runs")

    # -- sessions -------------------------------------------------------------------------------------

    def sessions(self) -> int:
        """Return how many sessions there have been."""
        self.hub.store  # noqa: B018 - It waits until the Hub has made the database.
        return asked(self._outage.url, "SELECT coalesce(max(id), 0) FROM fgpu_sessions")

    def batch(self, count: int, fault: str) -> None:
        """Start ``count`` more sessions of these users and end them, with a fault in between."""
        begun, done = self.sessions(), []
        enough = begun + count

        def user_does(user: str) -> None:
            chance = random.Random(f"{user} {begun}")
            while not done:
                # A Hub or a service that is away is what this is about.
                with suppress(requests.RequestException, AssertionError, ValueError):
                    self._one(user, chance)

        users = USERS[:count]
        with ThreadPoolExecutor(len(users)) as threads:
            working = [threads.submit(user_does, user) for user in users]
            try:
                until(
                    lambda: self.sessions() >= begun + count // 2, within_s=300, what="half of the sessions"
                )
                getattr(self, f"fault_{fault}")()
                self.faults[fault] = self.faults.get(fault, 0) + 1
                until(lambda: self.sessions() >= enough, within_s=300, what="all of the sessions")
            finally:
                done.append(True)
            for each in working:
                each.result()
        until(self._ended, within_s=120, what="everybody's sessions have ended")

    def _one(self, user: str, chance: random.Random) -> None:
        """Ask for a session, use it, and end it in one of the ways that there are."""
        way = chance.choice(list(ENDS))
        if self.hub.spawn(user, options=ASKED).status_code >= 400:
            # An earlier end is not done yet, or its answer was lost: it must be repeated here.
            self.hub.stop(user)
            time.sleep(0.5)
            return
        if way != "cancelled" and not self._is_ready(user):
            return
        if chance.random() < 0.3:
            self._look_and_leave(user)
        ENDS[way](self, user)
        self.ends[way] = self.ends.get(way, 0) + 1

    def _is_ready(self, user: str) -> bool:
        """Wait until a user's server is there; False if that comes to nothing."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            server = self.hub.servers(user).get("")
            if server is None or server["ready"]:
                return server is not None
            time.sleep(0.4)
        return False

    def _look_and_leave(self, user: str) -> None:
        """Open what a page opens, and go away in the middle of it."""
        headers = {"Authorization": f"token {self.hub.token}"}
        for path in (
            "services/fgpu/api/v1/events",
            "services/fgpu/",
            f"hub/api/users/{user}/server/progress",
            "services/fgpu/api/v1/queue",
        ):
            with requests.get(f"{self.hub.url}/{path}", headers=headers, stream=True, timeout=15) as answer:
                next(answer.iter_content(1), b"")

    def _stopped(self, user: str) -> None:
        self.hub.stop(user)

    def _ended_by_service(self, user: str) -> None:
        session = self.hub.sessions()[f"{user}/"]
        url = f"{self.hub.url}/services/fgpu/api/v1/sessions/{session.id}"
        requests.delete(url, headers={"Authorization": f"token {self.hub.token}"}, timeout=30)

    def _dies(self, user: str) -> None:
        session = self.hub.sessions().get(f"{user}/")
        if session is not None:
            self._kill_server(session.id)

    def _kill_server(self, session_id: int) -> None:
        if self.kind == "local":
            for process in processes_of(self.hub, session_id):
                with suppress(psutil.NoSuchProcess):
                    process.kill()
            return
        for container in self._engine_has("ps", f"label=fgpu.session={session_id}"):
            subprocess.run(["docker", "kill", container], capture_output=True, check=False, timeout=60)

    def _ended(self) -> bool:
        """Ask for the end of what still is there; return whether that is nothing, and nothing is launched either."""
        with suppress(requests.RequestException):
            for key in self.hub.sessions():
                self.hub.stop(key.partition("/")[0])
            return not self.hub.sessions() and not any(self.hub.servers(user) for user in USERS)
        return False

    # -- faults ---------------------------------------------------------------------------------------

    def fault_hub_killed(self) -> None:
        self.hub.kill()
        self._start()

    def fault_hub_restarted(self) -> None:
        self.hub.terminate()
        self._start()

    def fault_service_killed(self) -> None:
        until(lambda: service_of(self.hub), what="the service runs").kill()

    def fault_proxy_replaced(self) -> None:
        assert self.hub.proxy is not None
        self.hub.proxy.kill()
        self.hub.proxy.wait(30)
        self.hub.start_proxy()

    def fault_database_away(self) -> None:
        with self._outage.outage():
            time.sleep(3)  # The duration of the fault.

    def fault_engine_away(self) -> None:
        self._away.touch()
        time.sleep(2)  # The duration of the fault.
        self._away.unlink()

    def fault_servers_die(self) -> None:
        for session in self.hub.sessions().values():
            self._kill_server(session.id)

    def fault_none(self) -> None:
        """Nothing happens but what users do."""

    # -- what there is --------------------------------------------------------------------------------

    def sample(self) -> Sample:
        """Return what there is, once it has had the time to go."""
        with suppress(AssertionError):
            until(lambda: not self._left(), within_s=20)
        assert self.hub.process is not None
        assert self.hub.proxy is not None
        service = until(lambda: service_of(self.hub), what="the service runs")
        pids = {"hub": self.hub.process.pid, "service": service.pid, "proxy": self.hub.proxy.pid}
        data, simulated_s = self.hub.data, self.simulated_s()
        return Sample(
            sessions=self.sessions(),
            simulated_h=round(simulated_s / HOUR_S, 1),
            life=self.lives,
            of={name: figures(psutil.Process(pid)) for name, pid in pids.items()},
            rows=self._rows(self.began_s + simulated_s),
            hub_rows=counted(
                f"sqlite:///{data / 'jupyterhub.sqlite'}",
                ("users", "spawners", "servers", "api_tokens", "oauth_clients", "oauth_codes"),
            ),
            files={
                path.name: sum(1 for each in path.rglob("*") if each.is_file())
                for path in sorted(data.iterdir())
                if path.is_dir()
            },
            database_kib={
                "scheduler": size_kib(self._outage.url),
                "hub": size_kib(f"sqlite:///{data / 'jupyterhub.sqlite'}"),
            },
            left=self._left(),
        )

    def _rows(self, now_s: float) -> dict[str, int]:
        found = counted(self._outage.url, TABLES)
        # Retention looks once an hour, and takes its time: it is about what it could have known three hours ago.
        looked = now_s - 3 * HOUR_S
        old = looked - HISTORY_DAYS * DAY_S
        of_sessions = "SELECT count(*) FROM fgpu_sessions WHERE ended_at_s < :old"
        of_events = (
            "SELECT count(*) FROM fgpu_events WHERE at_s < :old"
            " AND id <= (SELECT max(id) FROM fgpu_events WHERE at_s < :looked) - :kept"
        )
        sessions = asked(self._outage.url, of_sessions, old=old)
        events = asked(self._outage.url, of_events, old=old, looked=looked, kept=KEPT_EVENTS)
        return {**found, "old_sessions": sessions, "old_events": events}

    def _left(self) -> list[str]:
        """Return what is left of sessions, though none lives."""
        data = self.hub.data
        left = [f"a server of session {number}" for number in launched(self.hub, self.kind)]
        left += [
            str(p.relative_to(data))
            for folder in ("limits", "run")
            for p in (data / folder).glob("*")
            if "-warm-" not in p.name
        ]
        left += [f"accounting of {p.name}" for p in self.hub.accounts.glob("fgpu-*/[0-9]*")]
        left += [f"process {p.pid}" for p in self._processes_of_no_hub()]
        if self.kind == "docker":
            own = f"label=fgpu.installation={self.hub.store.installation_id}"
            # What waits for a session comes and goes while this looks: its own name says it, as its network's does.
            left += [f"container {name}" for name in self._engine_has("ps", own) if "-warm-" not in name]
            left += [
                f"network {name}" for name in self._engine_has("network", own) if not name.endswith("-warm")
            ]
            unnamed = f"label=fgpu.unnamed={self.hub.store.installation_id}"
            left += [f"volume {name}" for name in self._engine_has("volume", unnamed)]
        return left

    def _processes_of_no_hub(self) -> list[psutil.Process]:
        """Return the processes that a Hub has left which was killed."""
        assert self.hub.process is not None
        assert self.hub.proxy is not None
        living = {self.hub.proxy.pid, self.hub.process.pid}
        with suppress(psutil.NoSuchProcess):
            living |= {p.pid for p in psutil.Process(self.hub.process.pid).children(recursive=True)}
        return [p for p in psutil.process_iter() if p.pid not in living and self.hub._is_mine(p)]

    def simulated_s(self) -> float:
        """Return how much time has passed on the Hub's clock."""
        return self.factor * (time.time() - self.began_s)

    def rules(self) -> int:
        """Return how many rules of this machine's packet filter name the installation."""
        if not firewall.can_apply():
            return 0
        return sum(len(rules) for rules in firewall.state(self.hub.store.installation_id).values())

    def _engine_has(self, what: str, wanted: str) -> list[str]:
        """Return the names of what an engine has."""
        words = {"ps": ["ps", "--all"], "network": ["network", "ls"], "volume": ["volume", "ls"]}[what]
        name = "{{.Names}}" if what == "ps" else "{{.Name}}"
        command = ["docker", *words, "--format", name, "--filter", wanted]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()


ENDS: dict[str, Callable[[Soak, str], None]] = {
    "stopped": Soak._stopped,
    "ended by the service": Soak._ended_by_service,
    "died": Soak._dies,
    "cancelled": Soak._stopped,
}
HARMLESS = ("proxy_replaced", "database_away", "engine_away", "servers_die", "none")
"""Faults that Hub and service live through."""
DEADLY = ("hub_killed", "service_killed", "database_away", "hub_restarted", "engine_away", "servers_die")


def faults_of(batches: int) -> list[str]:
    """Return the fault of each batch: Hub and service are killed in the first and the last fifth, and live in between.

    What grows can be seen in a long life alone.
    """
    edge = max(1, batches // 5)
    middle = batches - 2 * edge
    ends = [DEADLY[n % len(DEADLY)] for n in range(2 * edge)]
    return [*ends[:edge], *(HARMLESS[n % len(HARMLESS)] for n in range(middle)), *ends[edge:]]


def soaked(soak: Soak, *, sessions: int, batch: int, say: Callable[[str], None] = print) -> list[Sample]:
    """Run ``sessions`` sessions through a Hub; return a sample after each batch."""
    samples = [soak.sample()]
    for fault in faults_of(-(-sessions // batch)):
        soak.batch(batch, fault)
        samples.append(soak.sample())
        own, last = samples[-1].of, samples[-1]
        memory = ", ".join(f"{name} {each.rss_mib:.0f} MiB" for name, each in own.items())
        say(
            f"{last.sessions} sessions, {last.simulated_h:.0f} h, {fault}: {memory}; left: {last.left or 'nothing'}"
        )
    return samples


def service_of(hub: HubProcess) -> psutil.Process | None:
    """Return the service's process, None while there is none."""
    assert hub.process is not None
    for child in psutil.Process(hub.process.pid).children():
        with suppress(psutil.Error):
            # The forked process, a later one, or one with a faster clock.
            if child.name() == quickstart.SERVICE_NAME or quickstart.SERVICE in " ".join(child.cmdline()):
                return child
    return None


def figures(process: psutil.Process) -> Of:
    """Return what a process has now."""
    with process.oneshot():
        memory, times = process.memory_full_info(), process.cpu_times()
        return Of(
            rss_mib=round(memory.rss / 2**20, 2),
            uss_mib=round(memory.uss / 2**20, 2),
            descriptors=process.num_fds(),
            threads=process.num_threads(),
            children=len(process.children()),
            cpu_s=round(times.user + times.system, 2),
        )


def asked(url: str, question: str, **given: float) -> int:
    """Return the one number that a database answers with. It is waited for a minute."""
    slow = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
    engine = create_engine(url, poolclass=NullPool, **slow)
    with engine.connect() as own:
        return int(own.execute(text(question), given).scalar_one())


def counted(url: str, tables: Sequence[str]) -> dict[str, int]:
    """Return how many rows tables have."""
    return {name: asked(url, f"SELECT count(*) FROM {name}") for name in tables}


def size_kib(url: str) -> int:
    """Return how much a database holds. SQLite's log beside it is 4 MiB at most."""
    if not url.startswith("sqlite"):
        return asked(url, "SELECT pg_database_size(current_database())") // 1024
    pages, page, free = (
        asked(url, f"PRAGMA {what}") for what in ("page_count", "page_size", "freelist_count")
    )
    return (pages - free) * page // 1024


def long_life(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of the Hub's longest life, without its first third, in which all is used for the first time."""
    lives = [s.life for s in samples]
    own = [s for s in samples if s.life == max(set(lives), key=lives.count)]
    return own[len(own) // 3 :]


def growth(samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Return by process how much more it has at the end of the Hub's longest life than at its beginning.

    Of memory, medians of the first and of the last few samples, since one alone says when garbage was collected last.
    """
    own = long_life(samples)
    few = max(1, min(3, len(own) // 2))
    found: dict[str, dict[str, float]] = {}
    for name in ("hub", "service"):
        of = [s.of[name] for s in own]
        first = statistics.median(each.rss_mib for each in of[:few])
        last = statistics.median(each.rss_mib for each in of[-few:])
        found[name] = {
            "memory_mib": round(last - first, 2),
            "memory_percent": round(100 * (last - first) / first, 2),
            "descriptors": of[-1].descriptors - of[0].descriptors,
            "threads": of[-1].threads - of[0].threads,
            "children": of[-1].children - of[0].children,
        }
    return found


MOST_PERCENT = 5.0
FEW = 6
"""The number of pooled connections and threads varies by this much."""


def wrong(samples: Sequence[Sample]) -> list[str]:
    """Return in words what is left behind, and what has grown more than it may."""
    found = [f"after {s.sessions} sessions there is still {thing}" for s in samples for thing in s.left]
    for name, more in growth(samples).items():
        if more["memory_percent"] > MOST_PERCENT:
            found.append(f"the {name}'s memory has grown by {more['memory_percent']} %")
        found += [
            f"the {name} has {more[what]:.0f} more {what}"
            for what in ("descriptors", "threads", "children")
            if more[what] > FEW
        ]
    first, last = long_life(samples)[0], samples[-1]
    found += [
        f"the Hub's database has {last.hub_rows[name]} {name}, and had {first.hub_rows[name]}"
        for name in ("servers", "api_tokens", "oauth_clients", "oauth_codes")
        if last.hub_rows[name] > first.hub_rows[name] + FEW
    ]
    if last.rows["old_sessions"] > TYPICAL_RUNS:
        found.append(f"{last.rows['old_sessions']} sessions are there that should be forgotten")
    if last.rows["old_events"]:
        found.append(f"{last.rows['old_events']} events are there that should be forgotten")
    return found
