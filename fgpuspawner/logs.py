"""What is done to logs: files of bounded size, and no line with the cookie that a browser is known by."""

from __future__ import annotations

import logging
import os
from pathlib import Path


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


def without_session_ids(record: logging.LogRecord) -> bool:
    """Take out of a line about xsrf what it names browsers by: the cookie of their session. A filter, for any logger."""
    if "xsrf" in str(record.msg) and isinstance(record.args, tuple):
        record.args = tuple("(not shown)" if isinstance(arg, bytes) else arg for arg in record.args)
    return True
