"""Lines of the log as JSON where wanted, each with the ids by which all lines of one launch are found.

A request's id is its sender's, or is made here. It goes along with what a request begins, with calls between service and
Hub, and with the form that a request opens. The session that comes of it keeps it for all that is said of it later.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

HEADER = "X-Request-ID"
FIELD = "request_id"
"""Of the launch form."""
ACCEPTED = re.compile(r"[A-Za-z0-9_-]{8,64}")
MOST_KEPT = 10_000
"""Sessions whose ids are known here at a time."""
OF_A_SESSION = "session %d"
"""How each line begins that is about one session, whoever logs it; small letters or not."""

_request: ContextVar[str | None] = ContextVar("fgpu_request", default=None)
_session: ContextVar[int | None] = ContextVar("fgpu_session", default=None)
_kept: dict[int, str] = {}


def cut_back(path: Path, *, most_bytes: int) -> None:
    """Leave of a log file that is larger the newest lines, half as many bytes. Whoever writes on opened it to append.

    A line that is written in this very instant may be lost.
    """
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) <= most_bytes:
            return
        file.seek(-(most_bytes // 2), os.SEEK_END)
        newest = file.read(most_bytes // 2)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(newest[newest.find(b"\n") + 1 :])


def begin(given: object) -> str:
    """Have all that this task begins from now on be of one request, and return its id: what was given, if that is one."""
    found = given if isinstance(given, str) and ACCEPTED.fullmatch(given) else secrets.token_hex(8)
    _request.set(found)
    return found


def request_id() -> str:
    """Return the id of the request that is worked on, another where there is none."""
    return _request.get() or secrets.token_hex(8)


def keep(session_id: int, request: str | None = None) -> str:
    """Note of which request a session came, the one that is worked on unless another is named; the first counts."""
    if session_id not in _kept:
        if len(_kept) >= MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[session_id] = request or request_id()
    return _kept[session_id]


@contextmanager
def of_session(session_id: int | None) -> Iterator[None]:
    """Have what is logged meanwhile, and by what is begun meanwhile, be about this session."""
    token = _session.set(session_id)
    try:
        yield
    finally:
        _session.reset(token)


def without_session_ids(record: logging.LogRecord) -> bool:
    """Take out of a line about xsrf what it names browsers by: the cookie of their session. A filter, for any logger."""
    if "xsrf" in str(record.msg) and isinstance(record.args, tuple):
        record.args = tuple("(not shown)" if isinstance(arg, bytes) else arg for arg in record.args)
    return True


class JsonLines(JsonFormatter):
    """One object a line, however many lines a message has. The format that a configuration gives is not used."""

    def __init__(self, *_: Any, process: str = "hub") -> None:
        super().__init__(
            "%(levelname)s %(name)s %(message)s",
            # First: who reads the lines of several processes from one file tells them by it.
            defaults={"process": process},
            rename_fields={"levelname": "level", "name": "logger"},
            reserved_attrs=[*RESERVED_ATTRS, "color", "end_color", "highlevel", "taskName"],
            timestamp="at",
        )

    def add_fields(
        self, log_data: dict[str, Any], record: logging.LogRecord, message_dict: dict[str, Any]
    ) -> None:
        """Add the ids to what a line has."""
        super().add_fields(log_data, record, message_dict)
        session_id = _session.get()
        if str(record.msg)[: len(OF_A_SESSION)].lower() == OF_A_SESSION and isinstance(record.args, tuple):
            # It may be another's than that for which this is done.
            session_id = record.args[0]  # type: ignore[assignment]
        request = _request.get() if session_id is None else _kept.get(session_id, _request.get())
        ids = {"session_id": session_id, "request_id": request}
        log_data.update({name: value for name, value in ids.items() if value is not None})


OF_THE_HUB = {
    "formatters": {"console": {"class": f"{__name__}.{JsonLines.__name__}"}},
    # Of libraries, whose lines the Hub's own logger does not have.
    "root": {"level": "WARNING", "handlers": ["console"]},
}
"""JupyterHub's ``logging_config``, for JSON."""


def of_the_service(log_format: str) -> logging.Handler:
    """Return what writes the service's lines."""
    handler = logging.StreamHandler()
    text = logging.Formatter(
        "[%(levelname)1.1s %(asctime)s %(name)s] %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
    )
    handler.setFormatter(JsonLines(process="service") if log_format == "json" else text)
    return handler
