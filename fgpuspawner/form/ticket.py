"""A ticket for forecasts: what the Hub's launch form shows to the service in place of a login.

The form cannot sign in at the service by itself, and a page of the service that did it for the form could be
framed by any page of the same origin, a user's own server among them. So the Hub writes into the form who it
is for, signed, and good for forecasts only.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from fgpu_scheduler import FGPUError

VALID_FOR_S = 3600
KEY = secrets.token_hex(32)
"""Of this process and the service that it starts; never stored."""


class BadTicket(FGPUError):
    """A ticket that was not made here, or is too old."""

    code = "bad_ticket"


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whom a forecast is for."""

    user: str
    hub_groups: tuple[str, ...]


def make(key: str, user: str, hub_groups: Sequence[str], *, now_s: int) -> str:
    """Return a ticket for ``user`` that is good until `VALID_FOR_S` after ``now_s``."""
    said = json.dumps([user, sorted(hub_groups), now_s + VALID_FOR_S]).encode()
    return f"{base64.urlsafe_b64encode(said).decode()}.{_signature(key, said)}"


def read(key: str, text: str, *, now_s: int) -> Ticket:
    """Return what a ticket says.

    Raises:
        BadTicket: it was not made with this key, or is too old.
    """
    body, _, signature = text.partition(".")
    try:
        said = base64.urlsafe_b64decode(body.encode("ascii", "strict"))
    except (binascii.Error, UnicodeEncodeError):
        raise BadTicket("this is no ticket for forecasts") from None
    if not hmac.compare_digest(_signature(key, said).encode(), signature.encode()):
        raise BadTicket("this is no ticket for forecasts")
    user, hub_groups, until_s = json.loads(said)
    if now_s > until_s:
        raise BadTicket("the page is too old for a forecast; reload it")
    return Ticket(user, tuple(hub_groups))


def _signature(key: str, said: bytes) -> str:
    return hmac.new(bytes.fromhex(key), said, hashlib.sha256).hexdigest()
