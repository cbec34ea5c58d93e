"""The banner: one announcement of the administrators on every page, until it expires or is taken down.

The service returns it as ``banner`` of ``GET me`` and shows it in its pages. The Hub's pages get it from
`fgpuspawner.hub.banner.banner_of_hub`, which never fails and never delays a page.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fgpu_scheduler.errors import BadSettings
from fgpu_scheduler.store.audit import record
from fgpu_scheduler.store.connection import StoreConnection
from fgpu_scheduler.store.edits import EditKind, delete_edit, read_edits, write_edits

MOST_BANNER_TEXT = 500
NAME = "banner"
"""The name of its only row."""


class BannerLevel(StrEnum):
    INFO = "info"
    WARNING = "warning"


@dataclass(frozen=True, slots=True)
class Notice:
    """The banner's plain text, and when it expires; None: when it is taken down."""

    text: str
    level: BannerLevel = BannerLevel.INFO
    until_at_s: int | None = None
    set_by: str = ""
    set_at_s: int = 0


class Banner:
    """The banner of an installation. Thread-safe."""

    def __init__(self, store: StoreConnection) -> None:
        self._store = store

    def at(self, now_s: int) -> Notice | None:
        """Return the banner shown at this time, or None."""
        with self._store.reading() as connection:
            found = read_edits(connection, EditKind.BANNER)
        for edit in found:
            text, level, until_at_s = (edit.fields[name] for name in ("text", "level", "until_at_s"))
            if until_at_s is None or until_at_s > now_s:
                return Notice(text, BannerLevel(level), until_at_s, edit.changed_by, edit.changed_at_s)
        return None

    def put(self, notice: Notice, *, by: str, now_s: int) -> None:
        """Show this banner instead of any other, and write it to the audit log.

        Raises:
            BadSettings: the text is empty or too long, or the banner has expired.
        """
        text = " ".join(notice.text.replace("\0", " ").split())
        if not text:
            raise BadSettings("text: the banner says nothing; write a sentence, or take it down")
        if len(text) > MOST_BANNER_TEXT:
            raise BadSettings(f"text: {len(text)} characters; a banner has at most {MOST_BANNER_TEXT}")
        if notice.until_at_s is not None and notice.until_at_s <= now_s:
            raise BadSettings("until: this instant has passed; choose a later one, or none")
        with self._store.writing_unversioned() as connection:
            fields = {"text": text, "level": notice.level.value, "until_at_s": notice.until_at_s}
            write_edits(connection, EditKind.BANNER, {NAME: fields}, by=by, now_s=now_s)
            record(
                connection,
                actor=by,
                action="banner.set",
                target=NAME,
                details=f"{notice.level}: {text}",
                now_s=now_s,
            )

    def take_down(self, *, by: str, now_s: int) -> None:
        """Delete the banner."""
        with self._store.writing_unversioned() as connection:
            if delete_edit(connection, EditKind.BANNER, NAME):
                record(connection, actor=by, action="banner.clear", target=NAME, now_s=now_s)
