"""Log files of bounded size, and log lines without browsers' session cookies."""

from __future__ import annotations

import logging
import os
from pathlib import Path


def cut_back(path: Path, *, most_bytes: int) -> None:
    """Truncate a large log file to its newest lines, half of ``most_bytes``. Writers must have opened it to append.

    A line written at this moment may be lost.
    """
    with path.open("r+b") as file:
        if file.seek(0, os.SEEK_END) <= most_bytes:
            return
        file.seek(-(most_bytes // 2), os.SEEK_END)
        newest = file.read(most_bytes // 2)
        file.truncate(0)
    with path.open("ab") as file:
        file.write(newest[newest.find(b"\n") + 1 :])


def without_session_ids(record: logging.LogRecord) -> bool:
    """Remove the session cookie, which identifies a browser, from lines about xsrf. A filter for any logger."""
    if "xsrf" in str(record.msg) and isinstance(record.args, tuple):
        record.args = tuple("(not shown)" if isinstance(arg, bytes) else arg for arg in record.args)
    return True
