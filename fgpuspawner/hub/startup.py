"""Opens and starts the runtime within JupyterHub's own start; a wrong setting ends the Hub with one line."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import sys
from collections.abc import Iterable
from typing import Any

from jupyterhub import orm
from jupyterhub.scopes import scope_definitions
from sqlalchemy import String, delete, literal_column, update

from fgpu_scheduler import FGPUError, Session, SessionState
from fgpuspawner.bodies import bound_bodies
from fgpuspawner.hub.adoption import adopt
from fgpuspawner.hub.checks import check_hub, use_start_timeout, use_subdomains
from fgpuspawner.hub.full_disk import HubDisk, exit_on_full_disk, serve_health
from fgpuspawner.hub.hub_lock import CHECK_EVERY_S, HubLock
from fgpuspawner.hub.moved import check_not_moved
from fgpuspawner.hub.requesters import record_requesters
from fgpuspawner.hub.roles import mirror_admin_role
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.hub.supervisor import Supervisor
from fgpuspawner.scopes import OF_GROUPS, SERVICE
from fgpuspawner.settings import FGPU

MOST_FILES = 65_536
MOST_AT_ONCE = 500
"""Rows that one statement names: databases take a few thousand values at most."""


def start_with_the_hub(app: Any, only: HubLock) -> None:
    """Open and start the runtime of a Hub that is about to look at its servers; exit on a wrong setting."""
    ours = logging.getLogger("fgpu")
    ours.handlers = app.log.handlers
    ours.setLevel(app.log.level)
    ours.propagate = False
    _open_more_files()
    try:
        settings = FGPU.from_config(app.config)
        check_hub(app, settings)
        use_start_timeout(app, settings)
        use_subdomains(app, settings)
        watch = HubDisk(app, settings.data_path())
        runtime = Runtime(settings, config=app.config, spawner_class=app.spawner_class)
        runtime.open(only.serve)
        sessions, urls = runtime.store.snapshot(0).sessions, [app.hub.api_url, settings.service_url()]
        check_not_moved(settings.data_path(), urls, sessions)
        runtime.open_engine(urls)
    except (FGPUError, OSError) as e:
        sys.exit(f"fgpuspawner: {e}")
    watch.begin(runtime.background)
    exit_on_full_disk(app, watch)
    serve_health(app, watch, runtime)
    mirror_admin_role(app)
    record_requesters(app, runtime.opened)
    _note_the_end(app, runtime)
    remove_waiting_servers(app.db, sessions)
    adopted = [] if settings.end_unknown_sessions else adopt(app, sessions)
    if (service := app._service_map.get(SERVICE)) is not None:
        revoke_older_tokens(app.db, service.api_token)
    remove_unknown_scopes(app.db)
    servers = app.db.query(orm.Spawner).filter(orm.Spawner.server != None).all()  # noqa: E711
    runtime.start([(s.user.name, s.name) for s in servers if s.user is not None])
    for session in adopted:
        audit = runtime.audit(
            session, "session.adopt", "the Hub's own database did not know it", actor="the Hub"
        )
        runtime.background.run(audit, failed=f"Not in the audit log: session {session.id} is adopted")
    Supervisor(app, SERVICE).begin(runtime.background)
    runtime.background.every(
        CHECK_EVERY_S,
        only.look,
        failed="The scheduler's database is not known to be this Hub's alone",
        level=logging.ERROR,
    )
    runtime.background.run(_bound_bodies(app), failed="The Hub takes bodies of any size")
    runtime.background.run(
        _tell_systemd(app, os.environ.pop("NOTIFY_SOCKET", "")), failed="systemd is not told"
    )


def _note_the_end(app: Any, runtime: Runtime) -> None:
    """Tell the runtime when the Hub stops: with ``cleanup_servers`` the Hub then ends all sessions itself."""
    clean_up = app.cleanup

    async def cleanup() -> None:
        runtime.hub_stops = True
        await clean_up()

    app.cleanup = cleanup


def remove_waiting_servers(db: Any, sessions: Iterable[Session]) -> None:
    """Remove the Hub's records of servers with sessions that only waited when it ended; users' requests are queued again.

    Otherwise the Hub would poll and undo each in its event loop, which takes minutes for ten thousand.
    """
    waiting = {(s.request.user, s.request.server_name) for s in sessions if s.state is SessionState.PENDING}
    columns = (
        orm.Spawner.id,
        orm.Spawner.server_id,
        orm.Spawner.oauth_client_id,
        orm.User.name,
        orm.Spawner.name,
    )
    there = db.query(*columns).join(orm.User).filter(orm.Spawner.server_id.is_not(None))
    found = [(own, server, client) for own, server, client, user, name in there if (user, name) in waiting]
    for first in range(0, len(found), MOST_AT_ONCE):
        own, servers, clients = zip(*found[first : first + MOST_AT_ONCE], strict=True)
        none_of = {"server_id": None, "oauth_client_id": None, "started": None}
        for statement in (
            update(orm.Spawner).where(orm.Spawner.id.in_(own)).values(none_of),
            delete(orm.Server).where(orm.Server.id.in_(servers)),
            delete(orm.OAuthClient).where(orm.OAuthClient.identifier.in_(clients)),
        ):
            db.execute(statement.execution_options(synchronize_session=False))
    db.commit()
    db.expire_all()


def revoke_older_tokens(db: Any, token: str) -> None:
    """Revoke the tokens that earlier starts of the Hub made for the service; each start makes a new one."""
    own = orm.APIToken.find(db, token)
    for other in db.query(orm.APIToken).filter_by(service_id=own.service_id, note="generated at startup"):
        if other is not own:
            db.delete(other)
    db.commit()


def remove_unknown_scopes(db: Any) -> None:
    """Remove scopes of deleted resource groups from tokens: the Hub fails on a token with an unknown scope."""
    stored = literal_column("api_tokens.scopes", String)
    for token in db.query(orm.APIToken).filter(stored.contains(OF_GROUPS)):
        token.scopes = [
            scope
            for scope in token.scopes
            if not scope.startswith(OF_GROUPS) or scope.partition("!")[0] in scope_definitions
        ]
    db.commit()


def _open_more_files() -> None:
    """Raise the limit on open files and connections above the usual 1024, for the Hub and its children.

    Every session can reach the Hub's port. Without this, a few sessions with idle connections would lock out everyone
    else and stop the Hub from opening its own databases.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _bound_bodies(app: Any) -> None:
    # The application exists only once the Hub is about to serve.
    await asyncio.shield(app._start_future)
    bound_bodies(app.tornado_application)


async def _tell_systemd(app: Any, address: str) -> None:
    await asyncio.shield(app._start_future)
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(b"READY=1", address.replace("@", "\0", 1))
