"""Adoption of running sessions that JupyterHub's database does not know, because it is new or was restored.

1. Each launch stores what JupyterHub's database has of the server (`ServerToken`) with its session.
2. At its start the Hub writes it back: the server keeps its token, and its owner finds it after the next log-in.
3. The engine's answers are compared with the scheduler's database. A node that contradicts it takes no sessions, and
   nothing there is ended.

No start of a Hub ends a session that answers, unless the administrator has set that.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from http import HTTPStatus
from typing import Any
from urllib.parse import urlparse

from jupyterhub import orm
from jupyterhub.roles import assign_default_roles
from jupyterhub.utils import url_escape_path, url_path_join

from fgpu_scheduler import (
    UP,
    BadSettings,
    Launcher,
    Seen,
    Session,
    Store,
)
from fgpuspawner.concurrency.background import Failures
from fgpuspawner.engines.base import Launched, ServerToken
from fgpuspawner.form.offer import LaunchRequest
from fgpuspawner.hub.session_server import NoAnswer, ask

log = logging.getLogger("fgpu")

SESSION_KEY = "fgpu_session"
"""Key in a server's state in the Hub's database: the id of its session."""
ENDED_KEY = "fgpu_ended"
"""Key in a server's state: the id of a session that was ended by a user before its end could be committed."""
MOST_NAMED = 5
"""Number of sessions that a warning names."""


def token_of(db: Any, server: orm.Spawner, token: str) -> ServerToken | None:
    """Return what the Hub's database has of a server's token; None unless it has both token and OAuth client."""
    found, client = orm.APIToken.find(db, token), server.oauth_client
    if found is None or client is None:
        return None
    return ServerToken(
        prefix=found.prefix,
        hashed=found.hashed,
        scopes=tuple(found.scopes),
        secret=client.secret,
        redirect_uri=client.redirect_uri,
        allowed_scopes=tuple(client.allowed_scopes),
    )


def adopt(app: Any, sessions: Iterable[Session]) -> list[Session]:
    """Write running sessions that the Hub's database lacks into it, before the Hub looks at its servers; return them.

    With the authenticator's ``delete_invalid_users``, users with invalid names are left out.
    """
    authenticator = app.authenticator
    adopted = [
        session
        for session in sessions
        if session.state in UP
        and not _is_known_or_ended(app.db, session)
        and (not authenticator.delete_invalid_users or authenticator.validate_username(session.request.user))
    ]
    for session in adopted:
        _write(app, session)
    app.db.commit()
    if adopted:
        log.warning(
            "The Hub's own database is new, or older than what runs: %d sessions that it did not know are adopted (%s)",
            len(adopted),
            _first_few([f"{s.request.user}/{s.request.server_name}" for s in adopted]),
        )
    return adopted


class CheckedEngine:
    """The engine as the scheduler sees it: a node counts as silent until its first answer agrees with the database."""

    def __init__(self, engine: Launcher, store: Store) -> None:
        self.watch, self.remove = engine.watch, engine.remove
        #: Nodes that agree with the database.
        self.fitting: set[str] = set()
        #: Why a node's answer contradicts the database, in one line; empty if none does. Such a node takes no
        #: sessions, nothing there is ended, and every observation checks it again.
        self.wrong = ""
        self._engine, self._store = engine, store
        self._newest_id = store.newest_session_id() or 0
        self._failures = Failures(log, "Nothing is started or ended there", level=logging.ERROR)

    async def observe(self) -> Seen:
        """Observe the engine, and leave out nodes that contradict the database."""
        seen, wrong = await self._engine.observe(), ""
        new = {*seen.nodes, *(thing.node_id for thing in seen.things)} - self.fitting
        sessions = (await asyncio.to_thread(self._store.snapshot, 0)).sessions if new else ()
        for node_id in sorted(new):
            try:
                await self._check(node_id, seen, sessions)
                self.fitting.add(node_id)
            except BadSettings as e:
                wrong = wrong or f"node {node_id}: {e}"
                self._failures.failed(e)
        self.wrong = wrong
        return seen._replace(
            things=[thing for thing in seen.things if thing.node_id in self.fitting],
            nodes=[node_id for node_id in seen.nodes if node_id in self.fitting],
        )

    async def _check(self, node_id: str, seen: Seen, sessions: Iterable[Session]) -> None:
        """Check that what a node runs and what the database has can be of one installation.

        Raises:
            BadSettings: it runs sessions that the database never had, or sessions answer that it does not run.
        """
        there = {thing.session_id for thing in seen.things if thing.alive and thing.node_id == node_id}
        if newer := [n for n in sorted(there) if not await asyncio.to_thread(self._knows, n, node_id)]:
            raise BadSettings(
                f"c.FGPU.db_url: {len(newer)} sessions run that this database has never had ({_first_few(newer)}): it is "
                "older; use the newer one again, or have this start end them: c.FGPU.end_unknown_sessions = True"
            )
        unseen = [
            session
            for session in sessions
            if session.state in UP and session.id not in there
            if session.placement is not None and session.placement.node_id == node_id in seen.nodes
        ]
        answers = await asyncio.gather(*map(_answers, unseen))
        if lost := [session.id for session, answer in zip(unseen, answers, strict=True) if answer]:
            raise BadSettings(
                f"runtime, or the engine's address: {len(lost)} sessions answer that the engine does not know "
                f"({_first_few(lost)}); set it back, or have this start end them: c.FGPU.end_unknown_sessions = True"
            )

    def _knows(self, session_id: int, node_id: str) -> bool:
        """Return whether the database had this session before this Hub started, or placed it on this node since."""
        session = self._store.session(session_id)
        if session is None or session_id <= self._newest_id:
            return session is not None
        return session.placement is not None and session.placement.node_id == node_id


async def _answers(session: Session) -> bool:
    launched = Launched.from_json(session.launched)
    if launched is None or launched.token is None:
        return False
    base_url = urlparse(launched.token.redirect_uri).path.removesuffix("oauth_callback")
    try:
        return (await ask(f"http://{launched.ip}:{launched.port}{base_url}api")).code == HTTPStatus.OK
    except NoAnswer:
        return False


def _first_few(named: Sequence[object]) -> str:
    return ", ".join(map(str, named[:MOST_NAMED])) + (", ..." if len(named) > MOST_NAMED else "")


def _is_known_or_ended(db: Any, session: Session) -> bool:
    """Return whether the Hub's database has the session's server as running, or knows that a user ended it."""
    owner = orm.User.find(db, session.request.user)
    server = owner and owner.orm_spawners.get(session.request.server_name)
    if server is None:
        return False
    state = server.state or {}
    if server.server is None or state.get(ENDED_KEY) == session.id:
        return state.get(ENDED_KEY) == session.id
    # Without a stored token only the server's state identifies the session.
    token = _token_noted(session)
    return (
        token is None
        or session_in(state) == session.id
        or db.query(orm.APIToken).filter_by(hashed=token.hashed).first() is not None
    )


def session_in(state: Mapping[str, Any] | None) -> int | None:
    return (state or {}).get(SESSION_KEY)


def _token_noted(session: Session) -> ServerToken | None:
    launched = Launched.from_json(session.launched)
    return None if launched is None else launched.token


def _write(app: Any, session: Session) -> None:
    """Write owner, server, token and OAuth client, as JupyterHub does when it starts a server."""
    db, asked, launched = app.db, session.request, Launched.from_json(session.launched)
    owner = orm.User.find(db, asked.user)
    if owner is None:
        owner = orm.User(name=asked.user)
        db.add(owner)
        db.commit()
        assign_default_roles(db, entity=owner)
    user = app.users[owner]
    spawner = user.get_or_create_spawner(asked.server_name, asked.server_name)
    base_url = url_path_join(user.base_url, url_escape_path(asked.server_name), "/")
    server = spawner.orm_spawner
    if server.server is not None:
        db.delete(server.server)
    listens = {} if launched is None else {"ip": launched.ip, "port": launched.port}
    server.server = orm.Server(proto="http", base_url=base_url, **listens)
    started = datetime.fromtimestamp(session.started_at_s or 0, UTC).replace(tzinfo=None)
    server.started = server.last_activity = started
    server.user_options = LaunchRequest.of(session.own_request).as_options()
    server.state = {SESSION_KEY: session.id}
    token = _token_noted(session)
    if token is None:
        log.warning(
            "Session %d of %s is adopted without its token, as none was noted: it runs and can be "
            "ended, and cannot be opened",
            session.id,
            asked.user,
        )
        return
    client = db.query(orm.OAuthClient).filter_by(identifier=spawner.oauth_client_id).one_or_none()
    if client is None:
        client = orm.OAuthClient(identifier=spawner.oauth_client_id)
        db.add(client)
    client.description = f"Server at {url_path_join(user.base_url, asked.server_name, '/')}"
    client.secret, client.redirect_uri = token.secret, token.redirect_uri
    client.allowed_scopes = list(token.allowed_scopes)
    server.oauth_client = client
    db.add(
        orm.APIToken(
            user=owner,
            prefix=token.prefix,
            hashed=token.hashed,
            scopes=list(token.scopes),
            client_id="jupyterhub",
            note=f"Server at {base_url}",
        )
    )
