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

from jupyterhub import orm, roles
from jupyterhub.scopes import scope_definitions
from sqlalchemy import String, delete, event, inspect, literal_column, update
from sqlalchemy import orm as sql

from fgpu_scheduler import FGPUError, Session, SessionState
from fgpuspawner.bodies import bound_bodies
from fgpuspawner.hub.adoption import adopt
from fgpuspawner.hub.background_work import begin_background_work
from fgpuspawner.hub.checks import check_hub, use_start_timeout, use_subdomains
from fgpuspawner.hub.disks import HubDisk
from fgpuspawner.hub.hub_handlers import record_requesters, serve_health, serve_logs
from fgpuspawner.hub.hub_lock import CHECK_EVERY_S, HubLock, check_not_moved
from fgpuspawner.hub.runtime import Runtime
from fgpuspawner.scopes import OF_GROUPS, SERVICE
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu")

MOST_FILES = 65_536
MOST_AT_ONCE = 500
"""Rows that one statement names: databases take a few thousand values at most."""
SUPERVISE_EVERY_S = 2.0
SERVICE_AGAIN_S = 20.0
"""A service that ends again sooner is left to the Hub's own, slower check."""
ROLE, HUBS_ROLE = "fgpu-admin", "admin"


def start_with_the_hub(app: Any, only: HubLock) -> None:
    """Open and start the runtime of a Hub that is about to look at its servers; exit on a wrong setting."""
    log.handlers = app.log.handlers
    log.setLevel(app.log.level)
    log.propagate = False
    open_more_files()
    try:
        settings = FGPU.from_config(app.config)
        check_hub(app, settings)
        use_start_timeout(app, settings)
        use_subdomains(app, settings)
        disk = HubDisk(app, settings.data_path())
        runtime = Runtime(settings, config=app.config, spawner_class=app.spawner_class)
        runtime.open(only.serve)
        sessions, urls = runtime.store.snapshot(0).sessions, [app.hub.api_url, settings.service_url()]
        check_not_moved(settings.data_path(), urls, sessions)
        runtime.open_engine(urls)
    except (FGPUError, OSError) as e:
        sys.exit(f"fgpuspawner: {e}")
    background = runtime.background
    disk.begin(background)
    disk.exit_on_full_disk()
    serve_health(app, disk, runtime)
    serve_logs(app, runtime)
    mirror_admin_role(app)
    record_requesters(app, runtime.opened)
    _note_the_end(app, runtime)
    remove_waiting_servers(app.db, sessions)
    adopted = [] if settings.end_unknown_sessions else adopt(app, sessions)
    if (service := app._service_map.get(SERVICE)) is not None:
        revoke_older_tokens(app.db, service.api_token)
    remove_unknown_scopes(app.db)
    servers = app.db.query(orm.Spawner).filter(orm.Spawner.server != None).all()  # noqa: E711
    served = [(s.user.name, s.name) for s in servers if s.user is not None]
    runtime.start(served, lambda: begin_background_work(runtime))
    for session in adopted:
        audit = runtime.audit(
            session, "session.adopt", "the Hub's own database did not know it", actor="the Hub"
        )
        background.run(audit, failed=f"Not in the audit log: session {session.id} is adopted")
    background.every(
        SUPERVISE_EVERY_S,
        Supervisor(app).look,
        failed="The processes beside the Hub could not be looked after",
        first_after_s=SUPERVISE_EVERY_S,
        # The Hub's own checks go on. Without a proxy there is nothing to route.
        foreseen=(Exception,),
    )
    background.every(
        CHECK_EVERY_S,
        only.look,
        failed="The scheduler's database is not known to be this Hub's alone",
        level=logging.ERROR,
    )
    address = os.environ.pop("NOTIFY_SOCKET", "")
    background.run(
        _as_it_serves(app, address), failed="The Hub takes bodies of any size, or systemd is not notified"
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
    server = orm.Spawner
    there = (
        db.query(server.id, server.server_id, server.oauth_client_id, orm.User.name, server.name)
        .join(orm.User)
        .filter(server.server_id.is_not(None))
    )
    found = [(own, url, client) for own, url, client, user, name in there if (user, name) in waiting]
    for first in range(0, len(found), MOST_AT_ONCE):
        own, urls, clients = zip(*found[first : first + MOST_AT_ONCE], strict=True)
        for statement in (
            update(server)
            .where(server.id.in_(own))
            .values(server_id=None, oauth_client_id=None, started=None),
            delete(orm.Server).where(orm.Server.id.in_(urls)),
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


def mirror_admin_role(app: Any) -> None:
    """Give the role `fgpu-admin` to all administrators of this Hub, and keep both in step from now on.

    The Hub gives and takes ``admin`` in several places (log-in, admin page, API) without a hook, and an authenticator
    that manages roles removes every role that it does not name. So each change of a user's roles is intercepted before
    it is written, and the other role is written in the same transaction.
    """
    if orm.Role.find(app.db, ROLE) is None:
        return
    for user in list(orm.Role.find(app.db, HUBS_ROLE).users):
        roles.grant_role(app.db, user, ROLE)
    if not event.contains(sql.Session, "before_flush", _mirror):
        event.listen(sql.Session, "before_flush", _mirror)


def _mirror(db: sql.Session, *_: object) -> None:
    changed = [user for user in (*db.new, *db.dirty) if isinstance(user, orm.User)]
    with db.no_autoflush:
        changed = [user for user in changed if inspect(user).attrs.roles.history.has_changes()]
        own = orm.Role.find(db, ROLE) if changed else None
        if own is None:
            return
        for user in changed:
            names = {role.name for role in user.roles}
            removed = {role.name for role in inspect(user).attrs.roles.history.deleted or ()}
            if HUBS_ROLE in names and ROLE not in names:
                user.roles.append(own)
            elif HUBS_ROLE in removed and ROLE in names:
                user.roles.remove(own)


class Supervisor:
    """Restarts the service and restores the proxy's routes sooner than JupyterHub would.

    JupyterHub checks a managed service every 30 s, and the routes of an external proxy every 5 minutes. Until then a
    killed service would be away, and sessions behind a restarted proxy unreachable.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._restarted_at_s = -SERVICE_AGAIN_S

    async def look(self) -> None:
        """Check both, once the Hub has set its routes and started the service."""
        app = self._app
        await asyncio.shield(app._start_future)
        now_s = asyncio.get_running_loop().time()
        service = app._service_map.get(SERVICE)
        process = service.proc if service is not None else None
        ended = process is not None and process.poll() is not None
        # An ending Hub has stopped its service and removed its address.
        if ended and service.server is not None and now_s - self._restarted_at_s >= SERVICE_AGAIN_S:
            await service.spawner.poll_and_notify()
            self._restarted_at_s = now_s
        if not app.proxy.should_start:
            routes = await app.proxy.get_all_routes()
            if app.hub.routespec not in routes:
                log.warning("The proxy has no route to the Hub: it is a new one, and gets its routes again")
                await app.proxy.check_routes(app.users, app._service_map, routes)


def open_more_files() -> None:
    """Raise the limit on open files and connections above the usual 1024, for the Hub and its children.

    Every session can reach the Hub's port. Without this, a few sessions with idle connections would lock out everyone
    else and stop the Hub from opening its own databases.
    """
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_FILES if most == resource.RLIM_INFINITY else min(MOST_FILES, most)
    if now < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


async def _as_it_serves(app: Any, address: str) -> None:
    # The application exists only once the Hub is about to serve.
    await asyncio.shield(app._start_future)
    bound_bodies(app.tornado_application)
    if address:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
            to.sendto(b"READY=1", address.replace("@", "\0", 1))
