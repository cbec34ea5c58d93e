"""Kubernetes' quantities ("10k", "5Gi", "500m"), as numbers. Pure.

The API server writes a quantity in its own way: what was sent as 10000 may come back as "10k".
Source: Kubernetes, "Quantity" in the reference of common definitions.
"""

from __future__ import annotations

import re
from decimal import Decimal

MIB = 2**20
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?:[eE](?P<power>[+-]?\d{1,2})|(?P<suffix>[A-Za-z]{0,2}))",
    re.ASCII,
)
_SUFFIXES = {
    **{name: Decimal(10) ** power for name, power in zip(("n", "u", "m", ""), (-9, -6, -3, 0), strict=True)},
    **{name: Decimal(1000) ** power for power, name in enumerate("kMGTPE", 1)},
    **{f"{name}i": Decimal(1024) ** power for power, name in enumerate("KMGTPE", 1)},
}


def quantity(text: object) -> Decimal:
    """Return what a quantity is worth, exactly, in its base unit (bytes, cores, pieces).

    Raises:
        ValueError: it is no quantity.
    """
    match = _QUANTITY.fullmatch(str(text))
    factor = _SUFFIXES.get(match["suffix"] or "") if match else None
    if match is None or factor is None:
        raise ValueError(f"{str(text)[:40]!r} is no quantity such as 500m, 10k or 5Gi")
    return Decimal(match["number"]) * factor * Decimal(10) ** int(match["power"] or 0)


def count(text: object) -> int:
    """Return a quantity of pieces.

    Raises:
        ValueError: it is no quantity, negative, or not whole.
    """
    value = quantity(text)
    if value < 0 or value != int(value):
        raise ValueError(f"{str(text)[:40]!r} is no whole number of pieces")
    return int(value)


def mebibytes(text: object) -> int:
    """Return a quantity of bytes in MiB, rounded down.

    Raises:
        ValueError: it is no quantity, or negative.
    """
    value = quantity(text)
    if value < 0:
        raise ValueError(f"{str(text)[:40]!r} is negative; memory is not")
    return int(value) // MIB
