"""The Hub's contract for a spawn that waits.

`start` stays pending in the queue and returns when the server answers; only what can never run is refused
there. The rules that the Hub imposes, each with a test in tests/hub/test_contract.py:

- `poll` says "running" from the first hook before `start` until `stop` has been called, so that a cancelled
  spawn reaches `stop`, which releases. A cancelled task releases nothing: the Hub cancels its tasks when it
  shuts down, too.
- After a restart a mere ticket polls as stopped. It keeps its place in the store, and the next `start` of
  the same server takes it up again.
- `ready` is false while a start is pending, or the Hub routes to a server that is not there.
- Every start validates its options again: they may be old, or forged.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, MutableMapping, Sequence
from datetime import UTC
from typing import Any, ClassVar

from jupyterhub.spawner import Spawner
from traitlets.config import Config

from fgpu_scheduler import (
    LAUNCHING,
    EndCause,
    FGPUError,
    Refusal,
    Session,
    SessionExists,
    SessionState,
    StoreUnavailable,
    TooManyPending,
)
from fgpu_scheduler.service import Requeued, SessionEnded
from fgpuspawner import idle, progress
from fgpuspawner.asking import AskingSpawner, NotStarted, refusal, refused_here
from fgpuspawner.failed import REFUSED_NEXT, failed_html, next_step
from fgpuspawner.images.live import Images
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.backend import Prepared
from fgpuspawner.isolation.driver_cgroup import DriverCgroup
from fgpuspawner.isolation.report import (
    Answer,
    BadReport,
    Report,
    not_in_force,
    probe_command,
    read_report,
    static_command,
)
from fgpuspawner.isolation.sealing import without_knobs
from fgpuspawner.isolation.verified import note_verdict
from fgpuspawner.options import Refused, Wanted, asks_the_same, parse
from fgpuspawner.runtime import SessionLauncher
from fgpuspawner.settings import FGPU
from fgpuspawner.waiting import it_answers

LOOK_EVERY_S = 0.5
STOP_AGAIN_S = 2.0
LONGEST_LOOK_S = 2.0
OWN_TOKEN_S = 3600
TELL_WITHIN_S = 6.0
"""A waiting page is told something by then: if nothing else, that the database does not answer."""
PULL_TOLD_EVERY_S = 1.0


class LaunchFailed(FGPUError):
    """A launch that came to nothing; the message is for the owner."""

    code = "launch_failed"

    def __init__(self, message: str, cause: EndCause = EndCause.LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class QueuedSpawner(AskingSpawner, Spawner):
    """Mixin: waits in the scheduler's queue, then launches with the shares that it got.

    A class that mixes it in gives `launch`, `exit_status`, `take_down` and `make_launcher`.
    """

    containers: ClassVar[bool]
    """Whether sessions are containers; else they are local processes."""

    _fetching: str | None = None
    """The image that its launch waits for, while it does."""

    # What the Hub has its spawners remember.
    _check_pending: bool
    _stop_pending: bool

    # The phases are of this object, not of the session: a fresh object after a restart is IDLE.
    IDLE: ClassVar[str] = "idle"
    STARTING: ClassVar[str] = "starting"
    UP: ClassVar[str] = "up"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = self.IDLE
        self._session: Session | None = None
        self._prepared: Prepared | None = None
        self._failure: tuple[EndCause, str] | None = None
        self._own_token = "", 0.0
        self._notifying = asyncio.Lock()

    # -- for the classes that mix this in -------------------------------------------------------------

    async def launch(self, session: Session) -> tuple[str, int]:
        """Start the server of ``session`` and return where it will listen.

        Raises:
            LaunchFailed: with words for the owner.
        """
        raise NotImplementedError

    def too_late(self, limit_s: int) -> LaunchFailed:
        """Return what a launch fails with that took longer than it may."""
        return LaunchFailed(f"the server did not answer within the launch limit of {limit_s} seconds")

    async def exit_status(self, session: Session) -> tuple[int, EndCause, str] | None:
        """Return None while the session's server lives, else its status, the cause and words for the owner."""
        raise NotImplementedError

    async def probe(self, session: Session, command: Sequence[str]) -> Answer:
        """Run one of the probes inside the session and return what it prints. What is cancelled may take its time.

        Raises:
            LaunchFailed: it could not be run at all.
        """
        raise NotImplementedError

    def is_away(self, session: Session) -> bool:
        """Return whether the session's machine does not answer, so that it is not known what runs there."""
        return False

    async def has_driver(self, session: Session) -> bool:
        """Return whether the session was given a driver for its GPUs, so that there is something to hold."""
        return True

    async def cgroup(self, session: Session) -> str | None:
        """Return the session's cgroup (version 2), as a path below the file system's root; None if it is not known."""
        return None

    async def take_down(self, session: Session, *, now: bool) -> bool:
        """End everything that any attempt of the session left; return whether it is known to be gone."""
        raise NotImplementedError

    @classmethod
    def make_launcher(
        cls, *, config: Config, settings: FGPU, images: Images, installation: str
    ) -> SessionLauncher:
        """Return what sees and removes what this class launches."""
        raise NotImplementedError

    # -- what the session is asked and told -----------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session that this spawner launches, or launched."""
        assert self._session is not None, "no session was placed yet"
        return self._session

    @property
    def prepared(self) -> Prepared:
        """What was written for the session's launch, and what it is given of it."""
        assert self._prepared is not None, "nothing was prepared yet"
        return self._prepared

    @property
    def ready(self) -> bool:
        """Whether the server can be used. Not while a start is pending, cancelled or not."""
        return bool(super().ready) and not self._start_pending

    def get_env(self) -> dict[str, str]:
        """Return the server's environment, with what it is told of its slice."""
        env: dict[str, str] = without_knobs(super().get_env())
        if self._session is not None and self._session.placement is not None:
            env.update(self.told())
            env["FGPU_SERVICE_URL"] = self.runtime.settings.service_url()
        return env

    def told(self) -> dict[str, str]:
        """Return what the session is told of its slice."""
        return limits.environment(
            self.session,
            limits_path=self.limits_path_in_session(),
            simulated=self.runtime.is_simulated(self.session),
        )

    def limits_path_in_session(self) -> str:
        """Return where the session finds its limits file."""
        return limits.PATH_IN_CONTAINER

    # -- start ----------------------------------------------------------------------------------------

    async def run_auth_state_hook(self, auth_state: Any) -> None:
        """Run the first of the hooks before `start`; from here on a cancelled spawn has to reach `stop`."""
        self._phase = self.STARTING
        await super().run_auth_state_hook(auth_state)

    async def start(self) -> str:
        """Queue, wait, launch, and return the server's URL when it answers.

        Raises:
            NotStarted: it can never run, was cancelled, waited too long, or its launch failed.
        """
        self._phase = self.STARTING
        self._session = None
        self._failure = None
        await self.runtime.ready()
        # Of a start that was cancelled an instant ago; there is one launch of a server at a time.
        await self._launch_at_rest()
        try:
            wanted = parse(dict(self.user_options or {}), self.offer())
            session = await self.runtime.scheduler.patiently(lambda: self._enqueue(wanted))
        except Refused as e:
            why = str(e)
            await self.runtime.scheduler.patiently(lambda: self._drop_ticket(why))
            refused_here(e.refusals)
            raise refusal(e) from None
        except (TooManyPending, SessionExists) as e:
            if isinstance(e, TooManyPending):
                refused_here([Refusal("count", e.code, str(e))])
            html = failed_html(str(e), REFUSED_NEXT)
            raise NotStarted(str(e), reason=e.code, html=html, status_code=409) from None
        # From here on `stop` finds the session by its id; before, by the server's name.
        self._session = session
        try:
            url = await self._placed_and_launched(session)
        except SessionEnded as e:
            cause = e.session.end_cause or EndCause.USER
            html = failed_html(str(e), next_step(cause))
            raise NotStarted(str(e), reason=cause.value.lower(), html=html, status_code=409) from None
        except FGPUError as e:
            cause = e.cause if isinstance(e, LaunchFailed) else EndCause.LAUNCH_FAILED
            self._failure = cause, str(e)
            html = failed_html(str(e), next_step(cause))
            raise NotStarted(str(e), reason=e.code, html=html, status_code=500) from None
        self._is_up(self.session)
        return url

    async def _placed_and_launched(self, session: Session) -> str:
        while True:
            self._session = await self.runtime.scheduler.placed(session.id)
            launch = self._launches[self._server_key] = asyncio.ensure_future(self._launch())
            try:
                # Shielded: a cancelled spawn leaves the launch to `stop`, which waits for what is in flight.
                return await asyncio.shield(launch)
            except Requeued as e:
                self.log.info("%s waits again: %s", self._log_name, e)

    def _is_up(self, session: Session) -> None:
        self._session, self._phase = session, self.UP
        self._by_session[session.id] = self

    _by_session: ClassVar[MutableMapping[int, QueuedSpawner]] = weakref.WeakValueDictionary()
    """The spawners of servers that are up, by their sessions."""

    _launches: ClassVar[dict[tuple[str, str], asyncio.Task[str]]] = {}
    """The launches in flight, by server: the Hub may make a new spawner for one while another comes to rest."""

    @property
    def _server_key(self) -> tuple[str, str]:
        return self.user.name, self.name

    async def _launch_at_rest(self) -> None:
        """Cancel the launch of this server that is in flight, if any, and wait until it has no more effects."""
        launch = self._launches.get(self._server_key)
        if launch is None:
            return
        if not launch.done():
            launch.cancel()
            # Whoever waits here can be cancelled, too: then the next one waits for the same launch.
            await asyncio.wait([launch])
        if self._launches.get(self._server_key) is launch:
            del self._launches[self._server_key]

    async def _enqueue(self, wanted: Wanted) -> Session:
        """Take up this server's waiting request if it asks for the same, else queue a new one at the end."""
        scheduler = self.runtime.scheduler
        groups = self.hub_groups
        request = wanted.request(self.user.name, self.name, groups)
        current = await scheduler.serving(self.user.name, self.name)
        if (
            current is not None
            and asks_the_same(current.own_request, request)
            and current.state is not SessionState.RUNNING
        ):
            self.log.info("%s takes up session %d again", self._log_name, current.id)
            return current
        # First what can refuse: a request that is refused costs nobody their place.
        further = await self._further_names(wanted.count - 1)
        if current is not None:
            await self._end(current, EndCause.USER, "replaced by a new request of the same server", now=True)
        names = [self.name, *further]
        requests = [wanted.request(self.user.name, name, groups) for name in names]
        submitting = asyncio.ensure_future(scheduler.submit(requests))
        try:
            sessions = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # What is being committed is committed. `stop` finds this server's request; the others are nobody's yet.
            _in_background(self._hold_further(submitting))
            raise
        if further:
            self._spawn_further(wanted, sessions[1:])
        return sessions[0]

    async def _hold_further(self, submitting: asyncio.Future[tuple[Session, ...]]) -> None:
        """Hold the further sessions of a submission: they keep their places, and the service asks for their servers."""
        with contextlib.suppress(FGPUError):
            for session in (await submitting)[1:]:
                await self._hold(session)

    async def _hold(self, session: Session) -> None:
        scheduler = self.runtime.scheduler
        await scheduler.patiently(lambda: scheduler.hold(session.id))

    async def _further_names(self, count: int) -> list[str]:
        """Return names for the further sessions of one submission: the lowest numbers that are free."""
        if count < 1:
            return []
        if not self.user.settings.get("allow_named_servers"):
            message = "count: only 1 session at a time, because named servers are not enabled"
            raise Refused([Refusal("count", "no_named_servers", message, "1", "1")])
        free = self.further_names()
        names: list[str] = []
        while len(names) < count:
            name = next(free)
            if not await self.runtime.scheduler.serving(self.user.name, name):
                names.append(name)
        limit = self.named_server_limit()
        named = {n for n in self.user.orm_spawners if n} | set(names)
        if limit and len(named) > limit:
            message = (
                f"count: {count + 1} sessions need {len(named)} named servers; the limit is {limit} per user"
            )
            raise Refused([Refusal("count", "too_many_servers", message, str(limit))])
        return names

    def _spawn_further(self, wanted: Wanted, sessions: Sequence[Session]) -> None:
        """Start the further servers of this submission, as the request that started this one would.

        Their places in the queue are committed already; should this process die first, they are resumed
        like any other request.
        """
        options = {**wanted.as_options(), "count": 1}
        # A later start of this server that reuses its options must not ask for all of them again.
        self.orm_spawner.user_options = options
        self.user.db.commit()
        handler = self.handler

        async def spawn(session: Session) -> None:
            name = session.request.server_name
            try:
                self.user.get_or_create_spawner(name, name, replace_failed=True)
                await handler.spawn_single_user(self.user, name, name, options=options)
            except Exception as e:
                # Held, it keeps its place, and the service asks the Hub for it again.
                self.log.warning("Could not start %s:%s yet: %s", self.user.name, name, e)
                await self._hold(session)

        for session in sessions:
            _in_background(spawn(session))

    async def _launch(self) -> str:
        """Launch the placed session: one durable step before the first effect, one after the last."""
        with self.runtime.scheduler.launching(self.session.id):
            return await self._launch_in_steps()

    async def _launch_in_steps(self) -> str:
        scheduler = self.runtime.scheduler
        placed = self.session
        try:
            session = self._session = await scheduler.prepare(placed.id)
            async with asyncio.timeout(self.runtime.settings.launch_timeout_s):
                if session.attempt > 1 and not await self.take_down(session, now=True):
                    raise LaunchFailed("what an earlier launch of this session left could not be removed")
                self._prepared = await self.runtime.prepare(session)
                ip, port = await self.launch(session)
                await self._answers_and_holds(session, ip, port)
        except TimeoutError:
            raise self.too_late(self.runtime.settings.launch_timeout_s) from None
        except (FGPUError, asyncio.CancelledError):
            raise
        except Exception as e:
            self.log.exception("Launching session %d failed", placed.id)
            raise LaunchFailed(f"the launch failed: {e}") from e
        note = json.dumps({"ip": ip, "port": port, "isolation": self.prepared.backend})
        self._session = await scheduler.running(session.id, session.attempt, note)
        return f"http://{ip}:{port}"

    async def _answers_and_holds(self, session: Session, ip: str, port: int) -> None:
        """Wait until the server answers and its limits are proved, in containers side by side.

        The first failure is the launch's.
        """
        if not self.containers:
            # What holds a process is in its environment: what starts the server can still take it away.
            await self._answers(session, ip, port)
            await self._verified(session)
            return
        answering = asyncio.ensure_future(self._answers(session, ip, port))
        verifying = asyncio.ensure_future(self._verified(session))
        try:
            await asyncio.wait((answering, verifying), return_when=asyncio.FIRST_EXCEPTION)
            if not answering.done() and await self.exit_status(session) is not None:
                # Nothing can be proved in what has ended. How it ended says more.
                await answering
            for task in (answering, verifying):
                if task.done():
                    task.result()
        finally:
            answering.cancel()
            verifying.cancel()
            await asyncio.gather(answering, verifying, return_exceptions=True)

    async def _verified(self, session: Session) -> None:
        """Have it proved from inside the session that its limits are in force, or fail the launch."""
        backend, prepared = self.runtime.isolation.backend_of(session), self.prepared
        if not backend.verified:
            self.log.warning("Session %d is not verified: its isolation is %s", session.id, backend.name)
            return
        if not await self.has_driver(session):
            self.log.warning("Session %d is not verified: it was given no GPU driver", session.id)
            return
        timeout_s = self.runtime.settings.verify_timeout_s
        try:
            async with asyncio.timeout(timeout_s):
                reports = await self._reports(session, timeout_s * 4 // 5 or 1)
                driver_says: list[str] = []
                if isinstance(backend, DriverCgroup):
                    driver_says = await backend.driver_problems(prepared.limits, await self.cgroup(session))
            problems = [*backend.verify(prepared.limits, *reports), *driver_says]
        except BadReport as e:
            problems = [str(e)]
        except TimeoutError:
            problems = [f"the check did not end within {timeout_s} seconds"]
        note_verdict(self.runtime.settings.data_path(), session, backend.name, problems)
        if not problems:
            self.log.info("Session %d is verified: %s", session.id, backend.name)
            return
        self.log.error("Session %d is not held by %s: %s", session.id, backend.name, "; ".join(problems))
        raise LaunchFailed(
            not_in_force(prepared.limits, problems, image=session.request.image), EndCause.ISOLATION_FAILED
        )

    async def _reports(self, session: Session, timeout_s: int) -> tuple[Report, Report | None]:
        """Return what the probe says, and in a container what the static one does."""
        nonces = secrets.token_hex(16), secrets.token_hex(16)
        commands = [probe_command(nonces[0], self.prepared.limits, timeout_s=timeout_s)]
        if self.containers:
            commands.append(static_command(nonces[1], timeout_s=timeout_s))
        answers = await asyncio.gather(*(self.probe(session, command) for command in commands))
        reports = [read_report(answer, nonce) for answer, nonce in zip(answers, nonces, strict=False)]
        return reports[0], reports[1] if self.containers else None

    async def _answers(self, session: Session, ip: str, port: int) -> None:
        """Wait until the server answers HTTP; raise `LaunchFailed` as soon as it is known that it will not."""
        # Side by side: a connection to a container that has died hangs for seconds.
        answering = asyncio.ensure_future(it_answers(ip, port, f"{self.server.base_url}api"))
        ending = asyncio.ensure_future(self._ended(session))
        try:
            await asyncio.wait((answering, ending), return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                _, cause, message = ending.result()
                raise LaunchFailed(message, EndCause.OOM if cause is EndCause.OOM else EndCause.LAUNCH_FAILED)
            answering.result()
        finally:
            answering.cancel()
            ending.cancel()
            await asyncio.gather(answering, ending, return_exceptions=True)

    async def _ended(self, session: Session) -> tuple[int, EndCause, str]:
        """Return how the session's server ended, once it has."""
        while True:
            await asyncio.sleep(LOOK_EVERY_S)
            ended = await self.exit_status(session)
            if ended is not None:
                return ended

    # -- poll, stop -----------------------------------------------------------------------------------

    async def poll(self) -> int | None:
        """Return None while the server runs, waits or starts, else its status. See the module's rules."""
        try:
            return await self._looked_at()
        except Exception:
            # The Hub, when it starts, takes a look that failed for the end of the server.
            self.log.exception("%s could not be looked at, and counts as running", self._log_name)
            return None

    async def poll_and_notify(self) -> int | None:
        """Poll, and have the Hub stop what has ended; one after the other, as the Hub's own code does not see to.

        A start would else begin while the Hub still takes the ended server out of its proxy, and be stopped in its place.
        """
        async with self._notifying:
            status: int | None = await super().poll_and_notify()
            return status

    async def _looked_at(self) -> int | None:
        await self.runtime.ready()
        if self._phase == self.STARTING:
            return None
        if self._phase == self.IDLE:
            scheduler = self.runtime.scheduler
            # A database that is away must not look like a server that is gone.
            current = await scheduler.patiently(lambda: scheduler.serving(self.user.name, self.name))
            if current is None or current.state is not SessionState.RUNNING:
                return 0
            self._is_up(current)
            await self._reached_or_judged(current)
            if self._phase != self.UP:
                return 0  # Ended by its owner meanwhile.
        ended = await self._known_end() or await self.exit_status(self.session)
        if ended is None:
            return None
        status, cause, message = ended
        self.log.warning("Session %d of %s has ended: %s", self.session.id, self._log_name, message)
        try:
            await self._end(self.session, cause, message, now=True)
        except StoreUnavailable as e:
            self.log.warning("The end of session %d cannot be noted yet: %s", self.session.id, e)
            return None
        self._phase = self.IDLE
        return status

    async def _reached_or_judged(self, session: Session) -> None:
        """Wait, when the Hub has just started and checks this server, until its machine or itself answers.

        The Hub ends a server that does not answer then. Of one on a machine that is away nobody knows anything.
        """
        if not self._check_pending:
            return
        checked = self.orm_spawner.server
        # Ended meanwhile and asked for again: in place of the one that it checks the Hub would end the new one.
        while await self._is_out_of_reach(session) or self.orm_spawner.server not in (checked, None):
            # Nobody could end a server that the Hub checks.
            self._check_pending = False
            same = self.orm_spawner.server is checked
            if same and self._phase == self.UP and await self._known_end() is not None:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    async def _is_out_of_reach(self, session: Session) -> bool:
        # While its owner has it ended the check must not go on, or it would end the server once more.
        if self._stop_pending or self._phase != self.UP:
            return self._stop_pending
        return self.is_away(session) and not await self._answers_now(session)

    async def _answers_now(self, session: Session) -> bool:
        note = json.loads(session.launched or "{}")
        try:
            async with asyncio.timeout(LONGEST_LOOK_S):
                await it_answers(note["ip"], note["port"], f"{self.server.base_url}api")
        except (TimeoutError, KeyError):
            return False
        return True

    async def _known_end(self) -> tuple[int, EndCause, str] | None:
        """Return how the session ended if the scheduler was first to see that it has."""
        try:
            session = await self.runtime.scheduler.session(self.session.id)
        except StoreUnavailable:
            return None
        if session.state is SessionState.RUNNING:
            return None
        return 1, session.end_cause or EndCause.EXITED, session.message or "the session has ended"

    @classmethod
    def ended(cls, session: Session) -> None:
        """Have the Hub learn at once that a session has ended, where it has a server for it. In its event loop."""
        spawner = cls._by_session.get(session.id)
        if spawner is not None and spawner._phase == cls.UP and not spawner._stop_pending:
            _in_background(spawner.poll_and_notify())

    @classmethod
    def last_activity_s(cls, session: Session) -> int | None:
        """Return when the Hub last heard of activity at the session's server; None where it has none for it."""
        spawner = cls._by_session.get(session.id)
        heard = spawner.orm_spawner.last_activity if spawner is not None else None
        return None if heard is None else int(heard.replace(tzinfo=UTC).timestamp())

    @classmethod
    async def kernels_idle_since_s(cls, session: Session) -> int | None:
        """Ask the session's server since when its kernels are idle; None where they are not, or that is not known."""
        spawner = cls._by_session.get(session.id)
        if spawner is None or spawner._phase != cls.UP or spawner._stop_pending:
            return None
        return await idle.ask_kernels(await spawner.get_url(), spawner._token_for_itself())

    def _token_for_itself(self) -> str:
        """Return a token that opens this server and nothing else, of this process and for a while."""
        token, until = self._own_token
        now = time.monotonic()
        if now >= until:
            scopes = [f"access:servers!server={self.user.name}/{self.name}"]
            note = "Asks this server whether its kernels are idle"
            token = self.user.new_api_token(note=note, expires_in=OWN_TOKEN_S, scopes=scopes)
            self._own_token = token, now + OWN_TOKEN_S / 2
        return token

    async def get_url(self) -> str:
        """Return where the server listens, as it was noted when it first answered."""
        await self.runtime.ready()
        if self._session is not None and self._session.launched:
            note = json.loads(self._session.launched)
            return f"http://{note['ip']}:{note['port']}{self.server.base_url}"
        return str(await super().get_url())

    async def stop(self, now: bool = False) -> None:
        """End the session, or cancel its request.

        Returns when the server is gone, or when ending it has been left to somebody who tries again: the
        scheduler where the engine does not answer, a task of ours where the database does not.
        """
        await asyncio.shield(asyncio.ensure_future(self._stop(now=now)))

    async def _stop(self, *, now: bool) -> None:
        session, failure = self._session, self._failure
        try:
            await self._stop_once(session, failure, now=now)
        except StoreUnavailable as e:
            # The Hub forgets the server whatever we say. Its session must end all the same.
            self.log.error("%s cannot be ended yet, trying on: %s", self._log_name, e)
            _in_background(self._stop_at_last(session, failure))
        self._phase = self.IDLE

    async def _stop_once(
        self, session: Session | None, failure: tuple[EndCause, str] | None, *, now: bool
    ) -> None:
        session = session or await self.runtime.scheduler.serving(self.user.name, self.name)
        if session is not None:
            cause, message = failure or (EndCause.USER, None)
            await self._end(session, cause, message, now=now)

    async def _stop_at_last(self, session: Session | None, failure: tuple[EndCause, str] | None) -> None:
        while True:
            await asyncio.sleep(STOP_AGAIN_S)
            current = self.user.spawners.get(self.name)
            if current is not None and current.active:
                return  # Asked for again meanwhile: that start takes the session up, or ends it.
            with contextlib.suppress(StoreUnavailable):
                await self._stop_once(session, failure, now=False)
                return

    async def _end(self, session: Session, cause: EndCause, message: str | None, *, now: bool) -> None:
        """End ``session``: say so durably, let a launch in flight come to rest, remove, free the shares."""
        scheduler = self.runtime.scheduler
        with scheduler.ending(session.id):
            session = await scheduler.end(session.id, cause, message)
            await self._launch_at_rest()
            if session.state is SessionState.TERMINATING:
                if not await self.take_down(session, now=now):
                    # Its folder stays as well: the next launch removes those of sessions that are gone.
                    self.log.warning(
                        "Session %d could not be removed yet; it keeps its share until it is", session.id
                    )
                    return
                await scheduler.gone(session.id)
        await self.runtime.clear(session)

    async def _drop_ticket(self, why: str) -> None:
        """Cancel the request that this server left in the queue, which may not be made any more."""
        current = await self.runtime.scheduler.serving(self.user.name, self.name)
        if current is not None:
            await self._end(current, EndCause.USER, why, now=True)

    def clear_state(self) -> None:
        """Forget the session; the scheduler's database keeps it."""
        super().clear_state()
        if self._phase != self.STARTING:
            self._session = None

    # -- what is told while it waits ------------------------------------------------------------------

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what to show while the session waits and starts, whenever that changes."""
        last: dict[str, Any] | None = None
        async for _ in self.runtime.scheduler.changes(at_least_every_s=self._told_every_s):
            try:
                async with asyncio.timeout(TELL_WITHIN_S):
                    event = await self._progress_event()
            except (StoreUnavailable, TimeoutError):
                event = progress.away_event(last)
            if event is None:
                return
            if event != last:
                yield event
                last = event

    def _told_every_s(self) -> float:
        """Return how often a waiting page is told something: more often while an image is on its way."""
        going = self._session is not None and self.runtime.pull_of(self._session.id) is not None
        return PULL_TOLD_EVERY_S if going else 20

    async def _progress_event(self) -> dict[str, Any] | None:
        if self.runtime.scheduler.database_is_away:
            raise StoreUnavailable("the scheduler's database does not answer")
        if self._session is None:
            return {"progress": 0, "message": "Asking the scheduler"}
        session = await self.runtime.scheduler.session(self._session.id)
        if session.state is SessionState.PENDING:
            found = (await self.runtime.scheduler.forecasts()).get(session.id)
            return progress.waiting_event(
                session,
                found,
                simulated=self.runtime.simulated,
                pull=self.runtime.pull_of(session.id),
                withdrawn=self.runtime.catalogue.of(session.request) is None,
            )
        if session.state is SessionState.SCHEDULED or session.state in LAUNCHING:
            return progress.starting_event(
                session,
                simulated=self.runtime.simulated,
                pull=self.runtime.pull_of(session.id),
                fetched=self._fetching is None,
            )
        return None


_BACKGROUND: set[asyncio.Task[Any]] = set()
"""Keeps background tasks from being collected before they are done."""


def _in_background(coroutine: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.ensure_future(coroutine)
    _BACKGROUND.add(task)
    task.add_done_callback(_BACKGROUND.discard)
