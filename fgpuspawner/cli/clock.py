"""What the kernel says of this machine's clock, for ``fgpu check``."""

from __future__ import annotations

import ctypes
import os

UNSYNCHRONISED = 0x40
"""STA_UNSYNC of the field ``status`` of struct timex; see adjtimex(2)."""
STATUS = slice(40, 44)
"""Where that field is on 64-bit machines."""


def is_synchronised() -> bool:
    """Return whether something keeps this machine's clock right.

    Raises:
        OSError: it cannot be told, as in a container without the right to ask.
    """
    asked = ctypes.create_string_buffer(512)
    try:
        adjtimex = ctypes.CDLL(None, use_errno=True).adjtimex
    except AttributeError:
        raise OSError(0, "there is no adjtimex") from None
    if adjtimex(asked) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return not int.from_bytes(asked.raw[STATUS], "little") & UNSYNCHRONISED


def words() -> str:
    """Return a line of ``fgpu check``."""
    try:
        synchronised = is_synchronised()
    except OSError as e:
        return f"clock: not known whether it is synchronised ({e.strerror}); ask on the machine: timedatectl"
    if synchronised:
        return "clock: synchronised"
    return (
        "WARNING: the clock of this machine is not synchronised: start times, limits and logs go wrong with it, and so "
        "does signing in elsewhere; install chrony, and look again: timedatectl"
    )
