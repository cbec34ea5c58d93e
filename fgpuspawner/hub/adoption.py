"""Running sessions that the Hub's own database does not know: it is new, or older than they are.

What JupyterHub's database has of a server is noted with its session (`ServerToken`), so it can be written anew: the
server goes on with the token that it has, and its owner finds it after the next log-in.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from jupyterhub import orm
from jupyterhub.roles import assign_default_roles
from jupyterhub.utils import url_escape_path, url_path_join

from fgpu_scheduler import Session, SessionState
from fgpuspawner.engines.base import Launched, ServerToken
from fgpuspawner.form.offer import Wanted

log = logging.getLogger("fgpu")

KEPT = "fgpu_request"
"""In what the Hub keeps of a server: the id of its session, and of the request that it came of."""
MOST_NAMED = 5
"""So many sessions a warning names."""


def token_of(db: Any, server: orm.Spawner, token: str) -> ServerToken | None:
    """Return what the Hub's database has of a server's token; None where it has not both of its parts."""
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
    """Write into the Hub's database what it lacks of running sessions, and return these. Before it looks at its servers.

    Nobody is adopted whose name the authenticator does not take any more.
    """
    adopted = [
        session
        for session in sessions
        if session.state is SessionState.RUNNING
        and not _is_known(app.db, session)
        and app.authenticator.validate_username(session.request.user)
    ]
    for session in adopted:
        _write(app, session)
    app.db.commit()
    if adopted:
        named = ", ".join(f"{s.request.user}/{s.request.server_name}" for s in adopted[:MOST_NAMED])
        log.warning(
            "The Hub's own database is new, or older than what runs: %d sessions that it did not know are adopted (%s)",
            len(adopted),
            named + (", ..." if len(adopted) > MOST_NAMED else ""),
        )
    return adopted


def _is_known(db: Any, session: Session) -> bool:
    """Return whether the Hub's database has heard of a session: of its server, or of that server's end."""
    owner = orm.User.find(db, session.request.user)
    server = owner and owner.orm_spawners.get(session.request.server_name)
    if server is None:
        return False
    if _session_in(server.state) == session.id:
        return True
    heard = server.last_activity
    if heard is not None and heard.replace(tzinfo=UTC).timestamp() >= (session.started_at_s or 0):
        # Its end is activity, too: who has ended it has done so for good.
        return True
    token = _token_noted(session)
    if token is None:
        # What an earlier version launched has no more than its server's record to be known by.
        return server.server is not None
    return db.query(orm.APIToken).filter_by(hashed=token.hashed).first() is not None


def _session_in(state: Mapping[str, Any] | None) -> int | None:
    kept = (state or {}).get(KEPT)
    return kept[0] if kept else None


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
        db.delete(server.server)  # Of the server that was there before.
    listens = {} if launched is None else {"ip": launched.ip, "port": launched.port}
    server.server = orm.Server(proto="http", base_url=base_url, **listens)
    started = datetime.fromtimestamp(session.started_at_s or 0, UTC).replace(tzinfo=None)
    server.started = server.last_activity = started
    server.user_options = Wanted.of(session.own_request).as_options()
    server.state = {KEPT: [session.id, ""]}
    token = _token_noted(session)
    if token is None:
        log.warning(
            "Session %d of %s is adopted without its token, as an earlier version launched it: it runs and can be "
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
