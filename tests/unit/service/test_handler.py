"""Who asks, from the Hub's model of them."""

from __future__ import annotations

import pytest

from fgpuspawner.service.handler import server_of


@pytest.mark.parametrize(
    ("scopes", "server"),
    [
        (["access:servers!server=alice/", "read:servers!server=alice/"], ""),
        (["access:servers!server=alice/gpu-1"], "gpu-1"),
        (["access:servers!server=alice/with%20space"], "with space"),
        (["access:servers!user=alice"], None),
        (["access:servers!user=alice", "access:servers!server=bob/x"], None),
        (["access:servers!server=bob/x"], None),
        (["access:servers"], None),
        ([], None),
    ],
)
def test_the_calling_server_is_told_by_the_one_server_that_its_token_opens(
    scopes: list[str], server: str | None
) -> None:
    assert server_of("alice", scopes) == server
