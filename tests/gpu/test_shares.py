"""What a session alone gets of a GPU's time, with kernels of one length."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from shares import SHARES, Tenant
from sharetests import check_shares

ROWS = [(Tenant(slots, us),) for us in (50, 1000, 20_000) for slots in SHARES]


@pytest.mark.parametrize("tenants", ROWS, ids=lambda row: "+".join(map(str, row)))
def test_a_session_gets_its_share(
    bench: Any, record_property: Callable[..., None], tenants: tuple[Tenant, ...]
) -> None:
    check_shares(bench, record_property, tenants)
