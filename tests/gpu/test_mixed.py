"""What sessions get of a GPU's time beside others: kernels of the same and of other lengths, several processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shares import PAIRS, Tenant
from sharetests import check_shares

QUARTERS = ("0-25", "25-50", "50-75", "75-100")
ROWS = [
    (Tenant("0-25", 50), Tenant("25-100", 5000)),
    (Tenant("0-25", 5000), Tenant("25-100", 50)),
    (Tenant("0-25", 200), Tenant("25-100", 20_000)),
    tuple(Tenant(slots, us) for slots, us in zip(QUARTERS, (50, 500, 5000, 20_000), strict=True)),
    (Tenant("0-50", 1000, processes=3),),
    (Tenant("0-25", 50, processes=2), Tenant("25-75", 1000, processes=3)),
    *[tuple(Tenant(slots, us) for slots in pair) for us in (50, 5000) for pair in PAIRS],
    *[tuple(Tenant(slots, us) for slots in QUARTERS) for us in (50, 5000)],
]


@pytest.mark.parametrize("tenants", ROWS, ids=lambda row: "+".join(map(str, row)))
def test_sessions_beside_each_other_get_their_shares(
    bench: Any, record_property: Callable[..., None], tenants: tuple[Tenant, ...]
) -> None:
    check_shares(bench, record_property, tenants)
