"""Whoever administers the Hub administers its sessions: the role that says so follows the Hub's own.

The Hub gives and takes its role ``admin`` in several places (at a log-in, in its admin page, through its API), and has no
hook for that; an authenticator that manages roles takes away every role that it does not name. So each change of a
user's roles is looked at before it is written, and the other role is written with it, in the same transaction.
"""

from __future__ import annotations

from typing import Any

from jupyterhub import orm, roles
from sqlalchemy import event, inspect
from sqlalchemy.orm import Session

ROLE = "fgpu-admin"
OF_THE_HUB = "admin"


def follow_the_hub(app: Any) -> None:
    """Give the role to all who administer this Hub, and from now on to whoever begins to, until they no longer do."""
    if orm.Role.find(app.db, ROLE) is None:
        return
    for user in list(orm.Role.find(app.db, OF_THE_HUB).users):
        roles.grant_role(app.db, user, ROLE)
    if not event.contains(Session, "before_flush", _follow):
        event.listen(Session, "before_flush", _follow)


def _follow(session: Session, *_: object) -> None:
    changed = [user for user in (*session.new, *session.dirty) if isinstance(user, orm.User)]
    with session.no_autoflush:
        changed = [user for user in changed if inspect(user).attrs.roles.history.has_changes()]
        own = orm.Role.find(session, ROLE) if changed else None
        if own is None:
            return
        for user in changed:
            names = {role.name for role in user.roles}
            gone = {role.name for role in inspect(user).attrs.roles.history.deleted or ()}
            if OF_THE_HUB in names and ROLE not in names:
                user.roles.append(own)
            elif OF_THE_HUB in gone and ROLE in names:
                user.roles.remove(own)
