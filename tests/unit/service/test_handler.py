"""Who asks, from the Hub's model of them."""

from __future__ import annotations

import pytest

from fgpuspawner.service import handler
from fgpuspawner.service.handler import MAX_ADDRESS_LENGTH, LogIns, server_of


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
def test_server_of_a_token_is_the_one_it_opens(scopes: list[str], server: str | None) -> None:
    assert server_of("alice", scopes) == server


def test_abandoned_log_ins_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever asks for a page without a cookie begins one: nobody has to be known for that."""
    monkeypatch.setattr(handler, "MAX_LOG_INS", 100)
    auth = LogIns(api_token="-", oauth_client_id="service-fgpu")
    ids = [auth.generate_state(f"/services/fgpu/?{number}") for number in range(1000)]
    assert len(auth._oauth_states) == 100
    assert [auth.get_next_url(one) for one in ids[-2:]] == ["/services/fgpu/?998", "/services/fgpu/?999"]
    long = auth.generate_state("/services/fgpu/?" + "x" * MAX_ADDRESS_LENGTH)
    assert auth.get_next_url(long) == auth.base_url
