"""The Hub's contract for a spawn that waits.

`start` waits in the queue and returns when the server answers. It refuses at once only a request that can never
run. The rules that the Hub imposes, each with a test in tests/hub/test_contract.py:

- `poll` says "running" from the first hook before `start` until `stop` has been called. So a cancelled spawn reaches
  `stop`, which frees the shares. A cancelled task frees nothing, because the Hub also cancels its tasks when it shuts
  down.
- After a restart, `poll` says "stopped" for a request that still waits. The store keeps its place in the queue, and
  the next `start` of the same server takes it up again.
- `ready` is false while a start is pending: otherwise the Hub would route to a server that is not there.
- Every start validates its options again: they may be old or forged.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
import weakref
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping, MutableMapping, Sequence
from datetime import UTC
from typing import Any, ClassVar

from jupyterhub import orm
from jupyterhub.spawner import Spawner
from jupyterhub.utils import maybe_future, random_port, url_escape_path, url_path_join
from sqlalchemy.exc import DBAPIError, PendingRollbackError
from tornado.web import HTTPError
from traitlets.config import Config

from fgpu_scheduler import (
    UP,
    EndCause,
    FGPUError,
    Refusal,
    Request,
    Requeued,
    Session,
    SessionEnded,
    SessionExists,
    SessionState,
    StoreUnavailable,
    TooManyPending,
)
from fgpuspawner.engines.base import (
    Capabilities,
    Ended,
    Engine,
    Firewall,
    Held,
    Installation,
    Launched,
    LaunchFailed,
    LaunchSpec,
    Safeguard,
    place_of,
)
from fgpuspawner.form.offer import CANNOT_START, LaunchRequest, RequestRefused, asks_the_same
from fgpuspawner.form.options import ACCEPT_IMAGE, parse_to_start
from fgpuspawner.hub import idle
from fgpuspawner.hub.adoption import ENDED_KEY, SESSION_KEY, session_in, token_of
from fgpuspawner.hub.hub_handlers import ended_by
from fgpuspawner.hub.inherited import LOG_SAYS_WHY, suspects
from fgpuspawner.hub.session_server import first_answer, wait_up
from fgpuspawner.images.model import Image
from fgpuspawner.isolation import limits
from fgpuspawner.isolation.base import IN_CONTAINER, Prepared
from fgpuspawner.isolation.sealing import without_knobs
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.folders import SharedFolder
from fgpuspawner.spawner import progress
from fgpuspawner.spawner.failures import NEXT_STEP, REFUSED_NEXT, SHOW_IT, failed_html
from fgpuspawner.spawner.further_sessions import FurtherSessions
from fgpuspawner.spawner.launch import LOOK_EVERY_S, Launch
from fgpuspawner.spawner.launch_form import LaunchFormSpawner, NotStarted, refusal, show_refusals

STOP_AGAIN_S = 2.0
"""How long to wait before an end that could not be committed is tried again."""
LONGEST_CHECK_S = 2.0
"""How long the Hub's check at its start waits for a server's answer."""
OWN_TOKEN_S = 3600
LOOPBACK = "127.0.0.1"
MOST_WAITING_PAGES = 20
"""Waiting pages of one server that get events: each asks the scheduler's one thread at every change of the queue."""
FOLDERS_VARIABLE = "FGPU_FOLDERS"
"""Tells the server its shared folders: a JSON object from places in the home to paths (jupyterlab_fgpu.folders)."""
KERNELS_VARIABLE = "FGPU_KERNELS"
"""Tells the server the kernels of its image: notebooks open on the first (jupyterlab_fgpu.kernelspecs)."""
NO_EXTENSIONS = ("--LabApp.extra_labextensions_path=[]",)
"""JupyterLab takes no extension from the image: its script would act in the browsers of users who open the session."""


class QueuedSpawner(LaunchFormSpawner, Spawner):
    """Waits in the queue, then launches with the allocated shares. A subclass has an engine's settings."""

    capabilities: ClassVar[Capabilities]

    # State that the Hub keeps in its spawners.
    _check_pending: bool
    _stop_pending: bool

    # Phases of this object, not of the session: a fresh object after a restart is IDLE.
    IDLE: ClassVar[str] = "idle"
    STARTING: ClassVar[str] = "starting"
    UP: ClassVar[str] = "up"

    will_resume = False
    """Nothing of an ended session is used again, its token least of all."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._phase = self.IDLE
        self._session: Session | None = None
        #: Why the last start failed: the cause and message with which `stop` ends its session.
        self._failure: tuple[EndCause, str] | None = None
        #: The session whose end could not be committed yet.
        self._ended: int | None = None
        #: A token of this process for this server only, and until when (monotonic) it is used.
        self._access_token = "", 0.0
        self._notifying = asyncio.Lock()
        #: The number of open waiting pages.
        self._waiting_pages = 0

    # -- for the classes of engines -------------------------------------------------------------------

    @classmethod
    def make_engine(cls, installation: Installation) -> Engine:
        """Return the connected engine. Blocks.

        Raises:
            BadSettings: it cannot be used.
        """
        raise NotImplementedError

    @classmethod
    def set_up(cls, c: Any) -> None:
        """Set in the Hub's configuration what the engine needs there. Blocks.

        Raises:
            BadSettings: it cannot be used.
        """

    @classmethod
    def check_settings(cls, config: Config, settings: FGPU) -> None:
        """Refuse what the engine cannot work with in the Hub's final configuration.

        Raises:
            BadSettings: one line that names the setting and what would work.
        """
        settings.check_folders_here(one_user=not cls.capabilities.own_root)

    @classmethod
    def firewall(cls, installation: str, settings: FGPU, urls: Sequence[str]) -> Firewall:
        """Return the firewall between an installation's sessions and their machine: only ``urls`` stay reachable.

        Only for engines with session networks.
        """
        raise NotImplementedError

    @classmethod
    def safeguards(cls, settings: FGPU, config: Config) -> Mapping[Safeguard, Held]:
        """Return which safeguards the engine provides as configured; missing ones are unknown. Blocks."""
        return {}

    @classmethod
    def holds(cls, config: Any, settings: FGPU) -> Sequence[str]:
        """Return which limits the engine enforces here and which not, one line each for ``fgpu check``. Blocks."""
        return [
            "disk: sessions are the Hub's own user, and can fill its disk: limits of the disk are not held"
        ]

    @classmethod
    def wrong_elsewhere(cls, config: Any, settings: FGPU, installation: str) -> Sequence[str]:
        """Return trouble on the nodes, one line each for ``fgpu check``: other sessions, wrong clocks. Blocks.

        ``installation`` is empty where there is no database yet.
        """
        return []

    async def engine_options(self, image: Image) -> object:
        """Return the engine's own settings for this launch: `LaunchSpec.options`."""
        if not self.capabilities.own_root:
            # Several servers share this machine: the port goes into the environment, which is made next.
            self.ip, self.port = LOOPBACK, random_port()
        return None

    # -- what the session is launched with ------------------------------------------------------------

    @property
    def session(self) -> Session:
        """The session that this spawner launches, or launched."""
        assert self._session is not None, "no session was placed yet"
        return self._session

    @property
    def session_id(self) -> int | None:
        """The id of this server's session; None if there is none, or it is being queued."""
        return None if self._session is None else self._session.id

    @property
    def ready(self) -> bool:
        """Whether the server can be used. Not while a start is pending, cancelled or not."""
        return bool(super().ready) and not self._start_pending

    def get_env(self) -> dict[str, str]:
        """Return the server's environment, with the variables that describe its slice."""
        env: dict[str, str] = without_knobs(super().get_env())
        if self._session is not None and self._session.placement is not None:
            env.update(self._slice_environment())
            env["FGPU_SERVICE_URL"] = self.runtime.settings.service_url()
            if self._session.request.setup:
                env["FGPU_SETUP"] = str(self._session.request.setup)
        return env

    def _slice_environment(self) -> dict[str, str]:
        """Return the variables that describe the session's slice to its programs."""
        folder = IN_CONTAINER
        if not self.capabilities.own_root:
            folder = str(self.runtime.isolation.folder(self.session.id))
        simulated = self.runtime.is_simulated(self.session)
        return limits.environment(self.session, limits_path=f"{folder}/{limits.NAME}", simulated=simulated)

    async def _launch_spec(self, session: Session, image: Image, prepared: Prepared) -> LaunchSpec:
        runtime, self._session = self.runtime, session
        simulated, request = runtime.is_simulated(session), session.request
        # First: the environment names these, and where the server listens.
        self.cpu_limit = self.cpu_guarantee = request.cpu_milli / 1000
        self.mem_limit = self.mem_guarantee = request.memory_mib * 2**20
        shared = self._shared_folders(request)
        paths = {f.at: place_of(f) if self.capabilities.own_root else f.path for f in shared}
        options = await self.engine_options(image)
        return LaunchSpec(
            session,
            image,
            command=tuple(self.cmd or ()),
            arguments=(
                *self.get_args(),
                *(NO_EXTENSIONS if image.may_have_others_programs(self.user.name) else ()),
            ),
            environment={
                **self.get_env(),
                KERNELS_VARIABLE: ",".join(image.kernels),
                **({FOLDERS_VARIABLE: json.dumps(paths)} if paths else {}),
            },
            slice_environment=self._slice_environment(),
            prepared=prepared,
            devices=() if simulated else runtime.isolation.devices_of(session),
            folder=runtime.isolation.folder(session.id),
            port=self.port,
            shared=shared,
            shared_memory_mib=request.memory_mib * runtime.settings.shared_memory_percent // 100,
            simulated=simulated,
            sudo=image.sudo or any(g in runtime.settings.sudo_groups for g in request.groups),
            options=options,
        )

    def _shared_folders(self, request: Request) -> tuple[SharedFolder, ...]:
        """Return the session's shared folders; raises LaunchFailed if one is no longer offered to the user."""
        found = self.runtime.settings.folders_of(request.user, self.hub_groups, request.folders)
        names = [folder.name for folder in found]
        if (gone := next((name for name in request.folders if name not in names), None)) is not None:
            raise LaunchFailed(f"folder {gone} is no longer offered to you; start again without it")
        return found

    # -- start ----------------------------------------------------------------------------------------

    async def run_auth_state_hook(self, auth_state: Any) -> None:
        """Run the first of the hooks before `start`; from here on a cancelled spawn has to reach `stop`."""
        self._phase = self.STARTING
        with _naming("c.Spawner.auth_state_hook"):
            await super().run_auth_state_hook(auth_state)

    async def apply_group_overrides(self) -> None:
        """Apply the overrides of the user's groups, except to `start_timeout`, which covers the queue."""
        start_timeout_s = self.start_timeout
        with _naming("c.Spawner.group_overrides"):
            await super().apply_group_overrides()
        self.set_trait("start_timeout", start_timeout_s)

    async def run_pre_spawn_hook(self) -> None:
        """Run the last of the hooks before `start`."""
        with _naming("c.Spawner.pre_spawn_hook"):
            await maybe_future(super().run_pre_spawn_hook())

    async def start(self) -> str:
        """Queue, wait, launch, and return the server's URL when it answers.

        Raises:
            NotStarted: it can never run, was cancelled, waited too long, or its launch failed.
        """
        self._phase = self.STARTING
        self._session = None
        self._failure = None
        await self.runtime.ready()
        # A start that was cancelled just now may have left a launch: a server has one at a time.
        await self._cancel_launch()
        options = dict(self.user_options or {})
        self.forget_values()
        try:
            waiting = await self.runtime.queue.patiently(self._waiting_request)
            wanted, accepted = parse_to_start(options, self.offer(), waiting)
            wanted = await self.with_saved_setup(wanted)
            if wanted.setup and options.get("setup") != wanted.setup:
                # A start again has the same variables and script.
                self.user_options = {**self.user_options, "setup": wanted.setup}
                self.orm_spawner.user_options = self.user_options
                self.user.db.commit()
            if accepted:
                self.refuse_others_answer(wanted.image)
                await self._accept_image(accepted)
            session = await self.runtime.queue.patiently(lambda: self._enqueue(wanted))
        except (RequestRefused, TooManyPending, SessionExists) as e:
            why = str(e)
            await self.runtime.queue.patiently(lambda: self._keep_or_end_waiting_request(why))
            if isinstance(e, RequestRefused):
                show_refusals(e.refusals)
                raise refusal(e) from None
            if isinstance(e, TooManyPending):
                show_refusals([Refusal("count", e.code, why)])
            html = failed_html(why, REFUSED_NEXT)
            raise NotStarted(why, reason=e.code, html=html, status_code=409) from None
        # From here on `stop` finds the session by its id; before, by the server's name.
        self._session = session
        self.orm_spawner.state = self.get_state()
        # Commit at once: the Hub's next query would flush the change and lock its database until the next commit.
        self.user.db.commit()
        try:
            url = await self._placed_and_launched(session)
        except SessionEnded as e:
            cause = e.session.end_cause or EndCause.USER
            html = failed_html(str(e), NEXT_STEP[cause])
            raise NotStarted(str(e), reason=cause.value.lower(), html=html, status_code=409) from None
        except FGPUError as e:
            cause = e.cause if isinstance(e, LaunchFailed) else EndCause.LAUNCH_FAILED
            words, step = str(e), NEXT_STEP[cause]
            if cause is EndCause.LAUNCH_FAILED and (found := suspects(type(self), self.config, words)):
                words = f"{words} (this may come from {', '.join(found)}, which an administrator has set)"
                step = SHOW_IT
            self._failure = cause, words
            raise NotStarted(words, reason=e.code, html=failed_html(words, step), status_code=500) from None
        self._note_up(self.session)
        return url

    async def _placed_and_launched(self, session: Session) -> str:
        while True:
            placed = self._session = await self.runtime.queue.placed(session.id)
            steps = Launch(
                self.runtime,
                placed,
                self._launch_spec,
                path=f"{self.server.base_url}api",
                token=token_of(self.user.db, self.orm_spawner, self.api_token),
            )
            launch = asyncio.ensure_future(steps.run())
            self._launches[self._server_key] = steps, launch
            try:
                # Shielded: a cancelled spawn leaves the launch to `stop`, which waits for what is in flight.
                self._session = await asyncio.shield(launch)
            except Requeued as e:
                self.log.info("%s waits again: %s", self._log_name, e)
                continue
            launched = Launched.from_json(self.session.launched)
            assert launched is not None
            return f"http://{launched.ip}:{launched.port}"

    def _in_background(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Run a coroutine in the background; a failure is logged."""
        self.runtime.background.run(coroutine, failed=f"A task for {self._log_name} failed")

    def _note_up(self, session: Session) -> None:
        self._session, self._phase = session, self.UP
        self._by_session[session.id] = self

    _by_session: ClassVar[MutableMapping[int, QueuedSpawner]] = weakref.WeakValueDictionary()
    """The spawners of servers that are up, by their sessions."""

    _launches: ClassVar[dict[tuple[str, str], tuple[Launch, asyncio.Future[Session]]]] = {}
    """The launches in flight, by server and not by spawner: the Hub may replace a spawner before its launch ends."""

    @property
    def _server_key(self) -> tuple[str, str]:
        return self.user.name, self.name

    async def _cancel_launch(self) -> None:
        """Cancel the launch of this server that is in flight, if any, and wait until it has no further effects."""
        found = self._launches.get(self._server_key)
        if found is None:
            return
        _, launch = found
        if not launch.done():
            launch.cancel()
            # This wait can be cancelled, too: then the next caller waits for the same launch.
            await asyncio.wait([launch])
        if self._launches.get(self._server_key) is found:
            del self._launches[self._server_key]

    async def _accept_image(self, engines_id: str) -> None:
        """Store that the user accepts this image, so that they are not asked again."""
        await self.runtime.accept_image(engines_id, self.user.name)
        # Otherwise a later start with these options would accept the image again, even if the user declined it since.
        self.user_options = {k: v for k, v in self.user_options.items() if k != ACCEPT_IMAGE}
        self.orm_spawner.user_options = self.user_options
        self.user.db.commit()

    async def _waiting_request(self) -> Request | None:
        current = await self.runtime.queue.serving(self.user.name, self.name)
        return None if current is None or current.state in UP else current.own_request

    async def _enqueue(self, wanted: LaunchRequest) -> Session:
        """Take up this server's waiting request if it asks for the same, else queue a new one at the end."""
        scheduler = self.runtime.queue
        current = await scheduler.serving(self.user.name, self.name)
        always = self.runtime.settings.folders_of(self.user.name, self.hub_groups, ())
        if (
            current is not None
            and asks_the_same(current.own_request, wanted.for_server(self.name), [f.name for f in always])
            and current.state not in UP
        ):
            self.log.info("%s takes up session %d again", self._log_name, current.id)
            return current
        further = FurtherSessions(self)
        names = [self.name, *await further.names(wanted.count - 1)]
        image = self.runtime.catalogue.entry(wanted.image)
        titles = wanted.names(names, "" if image is None else image.framework)
        requests = [wanted.for_server(*one) for one in zip(names, titles, strict=True)]
        # Submit and replace in one step: if a request is refused, the current one keeps its place.
        replacing = None if current is None else current.id
        submitting = asyncio.ensure_future(scheduler.submit(requests, replacing=replacing))
        try:
            sessions = await asyncio.shield(submitting)
        except asyncio.CancelledError:
            # The commit in progress completes. `stop` finds this server's request; the other sessions have no server.
            self._in_background(further.hold_all(submitting))
            raise
        if len(sessions) > 1:
            further.spawn_all(wanted, sessions[1:])
        if current is not None:
            # The commit ended it, but its processes or container may still exist.
            await self._end(current, EndCause.USER, None, now=True)
        return sessions[0]

    # -- poll, stop -----------------------------------------------------------------------------------

    async def poll(self) -> int | None:
        """Return None while the server runs, waits or starts, else its status. See the module's rules."""
        try:
            return await self._polled()
        except Exception:
            # A starting Hub takes a failed poll for the end of the server.
            self.log.exception("%s could not be polled, and counts as running", self._log_name)
            return None

    async def poll_and_notify(self) -> int | None:
        """Poll, and let the Hub stop an ended server; one call at a time, which the Hub's own code does not ensure.

        Otherwise a start could begin while the Hub still removes the ended server from its proxy, and be stopped in its
        place.
        """
        async with self._notifying:
            status: int | None = await super().poll_and_notify()
            return status

    async def _polled(self) -> int | None:
        await self.runtime.ready()
        if self._phase == self.STARTING:
            return None
        if self._phase == self.IDLE:
            scheduler = self.runtime.queue
            # Retry: a database that does not answer must not look like a server that is gone.
            current = await scheduler.patiently(lambda: scheduler.serving(self.user.name, self.name))
            if current is None or current.state not in UP:
                return 0
            self._note_up(current)
            await self._wait_until_reachable(current)
            if self._phase != self.UP:
                return 0  # Ended by its owner during the wait.
        ended = await self._known_end() or await self.runtime.engine.ended(self.session)
        if ended is None:
            return None
        ended = ended.without_values(self.session)
        self.log.warning("Session %d of %s has ended: %s", self.session.id, self._log_name, ended.message)
        try:
            await self._end(self.session, ended.cause, ended.message, now=True)
        except StoreUnavailable as e:
            self.log.warning("The end of session %d cannot be noted yet: %s", self.session.id, e)
            return None
        self._phase = self.IDLE
        self._in_background(self._until_hub_notes_end())
        return ended.status

    async def _wait_until_reachable(self, session: Session) -> None:
        """Wait, when the Hub has just started and checks this server, until the server or its machine answers.

        The Hub would end a server that does not answer, but on an unreachable machine it may still run.
        """
        if not self._check_pending:
            return
        checked = self.orm_spawner.server
        # If the checked server was ended and started again, the Hub would end the new one in its place.
        while await self._is_out_of_reach(session) or self.orm_spawner.server not in (checked, None):
            # Users cannot end a server while the Hub's check is pending.
            self._check_pending = False
            same = self.orm_spawner.server is checked
            if same and self._phase == self.UP and await self._known_end() is not None:
                return
            await asyncio.sleep(LOOK_EVERY_S)

    @property
    def server(self) -> Any:
        """JupyterHub's record of the server, with a `wait_up` that uses the client for servers that users control."""
        found = super().server
        if found is not None:
            found.wait_up = functools.partial(wait_up, found)
        return found

    @server.setter
    def server(self, server: Any) -> None:
        Spawner.server.fset(self, server)

    async def _is_out_of_reach(self, session: Session) -> bool:
        # While the owner ends the server the check must wait, or it would end the server once more.
        if self._stop_pending or self._phase != self.UP:
            return self._stop_pending
        return self.runtime.engine.is_away(session) and not await self._answers_now(session)

    async def _answers_now(self, session: Session) -> bool:
        launched = Launched.from_json(session.launched)
        if launched is None:
            return False
        try:
            async with asyncio.timeout(LONGEST_CHECK_S):
                await first_answer(launched.ip, launched.port, f"{self.server.base_url}api")
        except TimeoutError:
            return False
        return True

    async def _known_end(self) -> Ended | None:
        """Return how the session ended if the scheduler saw it first."""
        try:
            session = await self.runtime.queue.session(self.session.id)
        except StoreUnavailable:
            return None
        if session.state in UP:
            return None
        return Ended(1, session.end_cause or EndCause.EXITED, session.message or "the session has ended")

    @classmethod
    def notice_end(cls, session: Session) -> None:
        """Tell the Hub at once that a session has ended, if it has a server for it. Runs in its event loop."""
        spawner = cls._by_session.get(session.id)
        if spawner is not None and spawner._phase == cls.UP and not spawner._stop_pending:
            spawner._in_background(spawner.poll_and_notify())

    @classmethod
    def last_activity_s(cls, session: Session) -> int | None:
        """Return when the Hub last heard of activity at the session's server; None if it does not know the server."""
        spawner = cls._by_session.get(session.id)
        heard = spawner.orm_spawner.last_activity if spawner is not None else None
        return None if heard is None else int(heard.replace(tzinfo=UTC).timestamp())

    @classmethod
    async def server_idle(cls, session: Session) -> idle.ServerIdle | None:
        """Ask the session's server since when it is idle; None if it is busy or does not answer."""
        spawner = cls._by_session.get(session.id)
        if spawner is None or spawner._phase != cls.UP or spawner._stop_pending:
            return None
        return await idle.ask_server_idle(await spawner.get_url(), spawner._own_access_token())

    def _own_access_token(self) -> str:
        """Return a short-lived token of this process that opens this server only."""
        token, until = self._access_token
        now = time.monotonic()
        if now >= until:
            scopes = [f"access:servers!server={self.user.name}/{self.name}"]
            note = "Asks this server whether its kernels are idle"
            token = self.user.new_api_token(note=note, expires_in=OWN_TOKEN_S, scopes=scopes)
            self._access_token = token, now + OWN_TOKEN_S / 2
        return token

    async def get_url(self) -> str:
        """Return the server's URL, as stored when it first answered."""
        await self.runtime.ready()
        launched = Launched.from_json(self._session.launched) if self._session is not None else None
        if launched is not None:
            return f"http://{launched.ip}:{launched.port}{self.server.base_url}"
        return str(await super().get_url())

    async def stop(self, now: bool = False) -> None:
        """End the session, or cancel its request.

        Returns when the server is gone, or when a later retry will end it: the scheduler retries if the engine does
        not answer, and a task of this spawner if the database does not.
        """
        await asyncio.shield(asyncio.ensure_future(self._stop(now=now)))

    async def _stop(self, *, now: bool) -> None:
        session, failure = self._session, self._failure
        try:
            await self._stop_once(session, failure, now=now)
        except StoreUnavailable as e:
            # The Hub forgets the server even if this raises. Its session must still end, also after a restart.
            self._ended = session_in(self.orm_spawner.state) if session is None else session.id
            self.log.error("%s cannot be ended yet, trying on: %s", self._log_name, e)
            self._in_background(self._stop_later(session, failure))
        else:
            self._in_background(self._until_hub_notes_end())
        self._phase = self.IDLE

    async def _stop_once(
        self, session: Session | None, failure: tuple[EndCause, str] | None, *, now: bool
    ) -> None:
        session = session or await self.runtime.queue.serving(self.user.name, self.name)
        if session is not None:
            usual = EndCause.HUB_STOPPED if self.runtime.hub_stops else EndCause.USER
            cause, message = failure or (usual, None)
            by = None if failure else ended_by(self.user.name)
            await self._end(session, cause, message, now=now, by=by)

    async def _stop_later(self, session: Session | None, failure: tuple[EndCause, str] | None) -> None:
        while True:
            await asyncio.sleep(STOP_AGAIN_S)
            current = self.user.spawners.get(self.name)
            # If the Hub could not record the end either, it still counts this server as running.
            is_not_noted = current is self and self._phase == self.IDLE
            if current is not None and current.active and not is_not_noted:
                return  # The server was started again: that start takes the session up, or ends it.
            with contextlib.suppress(StoreUnavailable):
                await self._stop_once(session, failure, now=False)
                break
        await self._until_hub_notes_end()

    async def _until_hub_notes_end(self) -> None:
        """Make the Hub record the end of this server, even if its disk was full at that time.

        Otherwise the Hub would count the server as running, never poll it again, and redirect its owner in a circle.
        """
        while True:
            await asyncio.sleep(STOP_AGAIN_S)
            try:
                if self.user.spawners.get(self.name) is not self or self._phase != self.IDLE:
                    return  # The Hub has recorded the end, or the server was started again.
                # `_stop_future` is the Hub's; it does not exist before the first stop.
                if getattr(self, "_stop_future", None) is not None or self._notifying.locked():
                    continue  # The Hub is still stopping it.
                if self.pending not in (None, "stop") or not (self._stop_pending or self.orm_spawner.server):
                    return
                await self.user.stop(self.name)
            except (DBAPIError, PendingRollbackError) as e:
                # First of all: until the rollback nothing can be read either, not even the server's name.
                self.user.db.rollback()
                self.log.warning("The end of %s is not in the Hub's database yet: %s", self._log_name, e)

    async def _end(
        self, session: Session, cause: EndCause, message: str | None, *, now: bool, by: str | None = None
    ) -> None:
        """End ``session``: commit its end, wait for a launch in flight, remove what it started, free the shares.

        ``by`` names the user who ended it, if not its owner; the owner is told.
        """
        scheduler = self.runtime.queue
        words = message if by is None else f"ended by {by}"
        with scheduler.ending(session.id):
            session = await scheduler.end(session.id, cause, words)
            if by is not None and session.message == words:
                # Another message is an administrator's: the service has written that end to the audit log.
                self._in_background(self.runtime.audit(session, "session.end", actor=by))
            await self._cancel_launch()
            if session.state is SessionState.TERMINATING:
                await self.runtime.logs.keep(session, session.end_cause or cause)
                with self.runtime.metrics.engine.labels("stop").time():
                    is_gone = await self.runtime.engine.stop(session, now=now)
                if not is_gone:
                    # Its files stay too; the next launch removes the files of sessions that are gone.
                    self.log.warning(
                        "Session %d could not be removed yet; it keeps its share until it is", session.id
                    )
                    return
                await scheduler.gone(session.id)
        await self.runtime.clear(session)

    async def run_post_stop_hook(self) -> None:
        """Also delete tokens of earlier Hub processes for this server: JupyterHub deletes only those of this one."""
        await maybe_future(super().run_post_stop_hook())
        db = self.user.db
        note = f"Server at {url_path_join(self.user.base_url, url_escape_path(self.name), '/')}"
        for token in db.query(orm.APIToken).filter_by(user_id=self.user.id, note=note):
            db.delete(token)
        db.commit()

    async def _keep_or_end_waiting_request(self, why: str) -> None:
        """Keep this server's pending request after another one was refused; end it if it would be refused, too.

        A kept request keeps its position and is resumed; `stop` then has nothing to end.
        """
        current = await self.runtime.queue.serving(self.user.name, self.name)
        if current is None:
            return
        try:
            request = current.own_request
            parse_to_start(LaunchRequest.of(request).as_options(), self.offer(), request)
        except RequestRefused as e:
            if any(refusal.code != CANNOT_START for refusal in e.refusals):
                await self._end(current, EndCause.USER, why, now=True)
                return
        if current.held:
            self._phase = self.IDLE

    def get_state(self) -> dict[str, Any]:
        """Return the state that the Hub keeps of this server: its session, and an end that is not committed yet."""
        state: dict[str, Any] = super().get_state()
        if self._session is not None:
            state[SESSION_KEY] = self._session.id
        if self._ended is not None:
            state[ENDED_KEY] = self._ended
        return state

    def clear_state(self) -> None:
        """Forget the session; the scheduler's database keeps it."""
        super().clear_state()
        if self._phase != self.STARTING:
            self._session = None

    async def progress(self) -> AsyncIterator[dict[str, Any]]:
        """Yield what to show while the session waits and starts, whenever that changes."""
        if self._waiting_pages >= MOST_WAITING_PAGES:
            return  # The Hub still sends these the last event.
        self._waiting_pages += 1
        try:
            async for event in progress.events(self.runtime, lambda: self.session_id, self._is_fetched):
                yield event
        finally:
            self._waiting_pages -= 1

    def _is_fetched(self) -> bool:
        """Return whether this server's launch is not waiting for an image."""
        found = self._launches.get(self._server_key)
        return found is None or found[0].fetching is None


@contextlib.contextmanager
def _naming(hook: str) -> Iterator[None]:
    """Convert a failure of an administrator's hook into one that names the hook, with its message for users.

    Other texts of an exception may hold secrets: they go to the log only.

    Raises:
        NotStarted: it failed, or refused the start.
    """
    try:
        yield
    except Exception as e:
        log, said, status = logging.getLogger("fgpu"), getattr(e, "jupyterhub_message", ""), 500
        log.warning("%s ended a start: %s", hook, e, exc_info=not isinstance(e, HTTPError))
        if isinstance(e, HTTPError):
            said = said or getattr(e, "message", "") or e.get_message() or e.reason or str(e)
            status = e.status_code
        words = f"{said} (from {hook})" if said else f"{hook} failed ({type(e).__name__}); {LOG_SAYS_WHY}"
        html = getattr(e, "jupyterhub_html_message", getattr(e, "message_html", None))
        raise NotStarted(
            words,
            reason="hook_failed",
            html=html or failed_html(words, SHOW_IT),
            status_code=status,
        ) from None
