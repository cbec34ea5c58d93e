"""A ticket for forecasts, which the Hub's launch form sends to the service instead of a log-in.

The form cannot log in to the service. A page of the service that did it for the form could be framed by any page of
the same origin, also by one of a user's server. So the Hub signs a ticket with the user's name, valid for forecasts only.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from tornado.web import create_signed_value, decode_signed_value

from fgpu_scheduler import FGPUError

NAME = "forecast"
VALID_FOR_S = 3600
LOGIN_COOKIE = "jupyterhub-session-id"
"""JupyterHub sets a new value at each log-in, and clears it at the log-out."""
KEY = secrets.token_hex(32)
"""The key of this process and the service that it starts; never stored."""


class BadTicket(FGPUError):
    """A ticket that was not made here, or is too old."""

    code = "bad_ticket"


@dataclass(frozen=True, slots=True)
class Ticket:
    """The user that a forecast is for, with their Hub groups."""

    user: str
    hub_groups: tuple[str, ...]


def make(key: str, user: str, hub_groups: Sequence[str], *, login: str, now_s: int) -> str:
    """Return a ticket for ``user``, valid for `VALID_FOR_S` after ``now_s`` and no longer than their log-in.

    ``login`` is the browser's value of `LOGIN_COOKIE`; "" without one, as with a token.
    """
    said = json.dumps([user, sorted(hub_groups), _digest(login)])
    return create_signed_value(key, NAME, said, clock=lambda: now_s).decode()


def read(key: str, text: str, *, login: str, now_s: int) -> Ticket:
    """Return a ticket's contents; ``login`` is the sending browser's value of `LOGIN_COOKIE`.

    Raises:
        BadTicket: it was not made with this key, is too old, or is of another log-in.
    """

    def said(valid_for_days: float) -> bytes | None:
        return decode_signed_value(
            key, NAME, text, max_age_days=valid_for_days, clock=lambda: now_s, min_version=2
        )

    # With an empty key anyone could sign, so it accepts no ticket.
    if not key or said(math.inf) is None:
        raise BadTicket("this is no ticket for forecasts")
    found = said(VALID_FOR_S / 86400)
    if found is None:
        raise BadTicket("the page is too old for a forecast; reload it")
    user, hub_groups, of_login = json.loads(found)
    if of_login not in ("", _digest(login)):
        raise BadTicket("the log-in that the page is of has ended; reload it")
    return Ticket(user, tuple(hub_groups))


def _digest(login: str) -> str:
    return hashlib.sha256(login.encode()).hexdigest() if login else ""
