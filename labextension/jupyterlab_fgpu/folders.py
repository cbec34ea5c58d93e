"""The session's shared folders: a link to each at its place in the home.

A link, made as the user: what is at its place already stays, and `rm -r` of what it lies in
removes the link, and nothing of the folder.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

VARIABLE = "FGPU_FOLDERS"
"""A JSON object from places in the home to the folders' paths."""


def link_folders(home: Path, log: Any) -> None:
    """Make the links; say in the log where a folder is that cannot have its place."""
    try:
        folders = json.loads(os.environ.get(VARIABLE) or "{}")
    except ValueError:
        return
    for place, path in folders.items():
        at = home / place
        try:
            at.parent.mkdir(parents=True, exist_ok=True)
            if at.is_symlink() and not at.exists():
                # It leads nowhere: of a folder that was elsewhere, or of an earlier session.
                at.unlink()
            # Another session of the home may make it at the same time.
            with contextlib.suppress(FileExistsError):
                at.symlink_to(path)
            why = "" if at.samefile(path) else "something else is there"
        except OSError as error:
            why = str(error.strerror)
        if why:
            log.warning("fgpu: the shared folder %s is not at %s: %s", path, at, why)
