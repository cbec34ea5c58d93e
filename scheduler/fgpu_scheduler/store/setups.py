"""Users' own variables, start scripts and named presets.

Values of variables may be secrets: they are in no message, and only the session that they are for gets them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, delete, insert, or_, select, update

from fgpu_scheduler.store.schema import is_live, own_presets, sessions, setups
from fgpu_scheduler.store.statements import put
from fgpu_scheduler.store.transaction import StorePart

KEPT_SETUPS = 20
"""A user's last setups that are kept, beside those of live sessions, of readable logs and of presets."""
LOGS_KEPT_S = 14 * 24 * 3600
"""For this long after a session's end its log, masked with the values of its setup, can be read."""
MOST_PRESETS = 20


@dataclass(frozen=True, slots=True)
class SavedSetup:
    """What a user gave to sessions: variables for kernels and terminals, and a script that runs at the start."""

    id: int
    variables: Mapping[str, str] = field(repr=False)
    script: str = field(repr=False)


class Setups(StorePart):
    """The setups of users."""

    def get(self, setup_id: int, user: str) -> SavedSetup | None:
        """Return a user's setup, or None; those of others do not exist."""
        with self._store.reading() as connection:
            return next((s for s in _of(connection, user) if s.id == setup_id), None)

    def of(self, user: str) -> Mapping[int, SavedSetup]:
        """Return the setups of a user by id."""
        with self._store.reading() as connection:
            return {setup.id: setup for setup in _of(connection, user)}

    def put(self, user: str, variables: Mapping[str, str], script: str, *, now_s: int) -> int:
        """Store a setup and return its id: that of an equal one, if there is one. Old unused ones are deleted."""
        with self._store.writing_unversioned() as connection:
            there = _of(connection, user)
            same = next((s.id for s in there if (s.variables, s.script) == (variables, script)), None)
            if same is not None:
                connection.execute(update(setups).where(setups.c.id == same).values(used_at_s=now_s))
                return same
            row = {"user_name": user, "variables": json.dumps(dict(variables)), "script": script}
            made = connection.execute(insert(setups).values(**row, used_at_s=now_s)).inserted_primary_key
            assert made is not None
            own = sessions.c.user_name == user
            needed = or_(is_live, sessions.c.ended_at_s > now_s - LOGS_KEPT_S)
            used = set(connection.execute(select(sessions.c.setup).where(own, needed)).scalars())
            used |= {int(preset.get("setup") or 0) for preset in _presets(connection, user).values()}
            old = [s.id for s in there[KEPT_SETUPS - 1 :] if s.id not in used]
            connection.execute(delete(setups).where(setups.c.id.in_(old)))
            return int(made[0])


class OwnPresets(StorePart):
    """The launch options that users have named, by user and name."""

    def of(self, user: str) -> Mapping[str, Mapping[str, Any]]:
        """Return a user's presets in order of their names."""
        with self._store.reading() as connection:
            return _presets(connection, user)

    def save(self, user: str, name: str, options: Mapping[str, Any], *, now_s: int) -> bool:
        """Store a preset, in place of the user's one of this name; return whether there was room for it."""
        with self._store.writing_unversioned() as connection:
            there = _presets(connection, user)
            if name not in there and len(there) >= MOST_PRESETS:
                return False
            row = {"user_name": user, "name": name, "options": json.dumps(dict(options)), "made_at_s": now_s}
            put(connection, own_presets, [row])
            return True

    def remove(self, user: str, name: str) -> None:
        """Delete a preset, if it is there."""
        with self._store.writing_unversioned() as connection:
            own = own_presets.c.user_name == user, own_presets.c.name == name
            connection.execute(delete(own_presets).where(*own))


def _of(connection: Connection, user: str) -> list[SavedSetup]:
    """Return a user's setups, the last used one first."""
    own = (
        select(setups)
        .where(setups.c.user_name == user)
        .order_by(setups.c.used_at_s.desc(), setups.c.id.desc())
    )
    return [SavedSetup(row.id, json.loads(row.variables), row.script) for row in connection.execute(own)]


def _presets(connection: Connection, user: str) -> dict[str, dict[str, Any]]:
    own = select(own_presets).where(own_presets.c.user_name == user)
    found = {row.name: json.loads(row.options) for row in connection.execute(own)}
    return dict(sorted(found.items()))
