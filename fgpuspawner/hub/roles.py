"""Keeps the role `fgpu-admin` in step with the Hub's own role ``admin``.

The Hub gives and takes ``admin`` in several places (log-in, admin page, API) without a hook, and an authenticator that
manages roles removes every role that it does not name. So each change of a user's roles is intercepted before it is
written, and the other role is written in the same transaction.
"""

from __future__ import annotations

from typing import Any

from jupyterhub import orm, roles
from sqlalchemy import event, inspect
from sqlalchemy.orm import Session

ROLE = "fgpu-admin"
OF_THE_HUB = "admin"


def mirror_admin_role(app: Any) -> None:
    """Give the role to all administrators of this Hub, and keep it in step from now on."""
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
