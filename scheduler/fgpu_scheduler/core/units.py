"""Amounts: the unit fGPU and what a share of a device is worth.

An amount of fGPU is a ``Decimal`` only at the edge. Inside it is ``fgpu_milli``, an integer count of thousandths, so that
sums and differences are exact ("0.9" is never 0.8999).
"""

from __future__ import annotations

from decimal import Decimal, InvalidOperation

from fgpu_scheduler.errors import BadAmount

MILLI = 1000
#: Shares of GPU memory are multiples of this (product H3; Huawei CCE's ``gpu-mem.128Mi``).
MEMORY_GRAIN_MIB = 128
#: Explicit amounts of compute are multiples of this (product H4).
COMPUTE_GRAIN_PERCENT = 5
#: A million units: more than any cluster has, and every sum stays inside 64 bits.
LARGEST_MILLI = 10**9


def parse_milli(text: str, *, field: str) -> int:
    """Read an exact decimal such as ``"0.5"`` as thousandths.

    Raises:
        BadAmount: not a plain decimal, negative, too large, or with a fourth decimal.
    """
    shown = text if len(text) <= 40 else text[:40] + "..."
    try:
        value = Decimal(text.strip())
    except InvalidOperation:
        raise BadAmount(f"{field}: {shown!r} is not a number such as 0.5") from None
    # Decimal accepts the digits of all scripts, and "1_0". A page shows such text differently from its value.
    if not value.is_finite() or not text.isascii() or "_" in text:
        raise BadAmount(f"{field}: {shown!r} is not a number such as 0.5")
    if value < 0:
        raise BadAmount(f"{field}: {shown} is negative; it must be above 0")
    # Comparing is exact; arithmetic rounds to 28 digits, and overflows.
    if value > LARGEST_MILLI // MILLI:
        raise BadAmount(f"{field}: {shown} is too large; at most {LARGEST_MILLI // MILLI} is possible")
    milli = int(value * MILLI)
    if Decimal(milli).scaleb(-3) != value:
        raise BadAmount(f"{field}: {shown} has more than three decimals")
    return milli


def format_milli(milli: int) -> str:
    """Return the exact decimal of ``milli`` thousandths, without trailing zeros ("0.5", "2")."""
    whole, rest = divmod(milli, MILLI)
    return f"{whole}.{rest:03d}".rstrip("0") if rest else str(whole)


def memory_words(amount_mib: int) -> str:
    """Return memory for people: exact GiB where these are short, else to a tenth; below half a GiB in MiB."""
    if amount_mib < 512:
        return f"{amount_mib} MiB"
    # 1/8 GiB is 128 MiB: the finest that three decimals hold.
    exact = format_milli(amount_mib * MILLI // 1024)
    return f"{exact if amount_mib % 128 == 0 else f'{amount_mib / 1024:.1f}'} GiB"


def share_memory_mib(fgpu_milli: int, *, capacity_milli: int, device_memory_mib: int) -> int:
    """Return the GPU memory in MiB that goes with ``fgpu_milli`` of a device.

    Rounded down to 128 MiB, so that shares never sum above the device; the whole device has all of
    its memory, whatever its size is a multiple of.
    """
    if fgpu_milli >= capacity_milli:
        return device_memory_mib
    exact = device_memory_mib * fgpu_milli // capacity_milli
    return exact - exact % MEMORY_GRAIN_MIB


def share_compute_percent(fgpu_milli: int, *, capacity_milli: int) -> int:
    """Return the share of compute in whole percent that goes with ``fgpu_milli``.

    Rounded down, so that shares never sum above 100, and at least 1. The floor of 1 can make more
    than 100 shares of under one percent sum above 100; the device's number of shares rules that out.
    """
    return max(1, min(100, 100 * fgpu_milli // capacity_milli))


def duration(seconds: float) -> str:
    """Return how long something takes: "45 s", "5 min 3 s", "12 min", "2 h", "3 h 05 min", "2 d 4 h"."""
    minutes, rest_s = divmod(max(0, int(seconds)), 60)
    hours = minutes // 60
    if hours >= 48:
        return _both(f"{hours // 24} d", hours % 24, f"{hours % 24} h")
    if hours:
        return _both(f"{hours} h", minutes % 60, f"{minutes % 60:02} min")
    if not minutes:
        return f"{rest_s} s"
    return _both(f"{minutes} min", rest_s if minutes < 10 else 0, f"{rest_s} s")


def _both(first: str, rest: int, second: str) -> str:
    return f"{first} {second}" if rest else first
