"""What sessions may take of the disk."""

from __future__ import annotations

from traitlets import Enum, Integer

from fgpuspawner.settings.traits import LARGEST_MIB, Settings, Whole

LARGEST_FILES = 2**40


class DiskSettings(Settings):
    """Limits of a session and of a home. Local processes have none: they are the Hub's own user."""

    session_disk_mib = Whole(20 * 1024, min=0, max=LARGEST_MIB).tag(
        example="51200", remedy="use MiB such as 20480, or 0 for no limit"
    )
    """Most that a session may write outside its home (system, /tmp, its image's volumes), in MiB; 0: no limit.

    Where the engine can enforce it (see ``fgpu check``), writing more fails. Elsewhere it is watched: see ``disk_over``.
    If removed files take as much and no session explains it, no session starts on that machine.
    """
    session_files = Whole(1_000_000, min=0, max=LARGEST_FILES).tag(
        example="500_000", remedy="use a number of files, or 0 for no limit"
    )
    """Most files and folders that a session may make outside its home; 0: no limit."""
    home_disk_mib = Whole(50 * 1024, min=0, max=LARGEST_MIB).tag(
        example="102400", remedy="use MiB such as 51200, or 0 for no limit"
    )
    """Most that a user's home may take, in MiB; 0: no limit."""
    home_files = Whole(2_000_000, min=0, max=LARGEST_FILES).tag(
        example="500_000", remedy="use a number of files, or 0 for no limit"
    )
    """Most files and folders that a user's home may have; 0: no limit."""
    disk_over = Enum(("end", "warn"), "end").tag(example='"warn"')
    """Action above one of these limits: "warn" the owner, or warn and then "end" the session."""
    disk_grace_s = Integer(600, min=1).tag(example="1800")
    """Seconds from the warning to the end; at the next check if the session takes a quarter more than the limit.

    A session that starts with its home above the limit has this time, too.
    """
    disk_every_s = Integer(60, min=5, max=3600).tag(example="300")
    """Seconds between checks of sessions' disk use, 5 to 3600. Checks of large homes keep the disk busy for a while."""
