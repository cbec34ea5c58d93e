"""Subnets and names of users' networks; the engine's part is in tests/docker/test_docker_network.py."""

from __future__ import annotations

from ipaddress import IPv4Network
from typing import Any

import pytest
from docker.errors import APIError, NotFound
from requests import Response

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker import networks as network
from fgpuspawner.engines.docker import networks as shared_network
from fgpuspawner.engines.docker.networks import Route, UserNetworks, host_routes
from fgpuspawner.settings import FGPU

TABLE = """\
Iface\tDestination\tGateway \tFlags\tRefCnt\tUse\tMetric\tMask\t\tMTU\tWindow\tIRTT
eth0\t00000000\t010200C0\t0003\t0\t0\t0\t00000000\t0\t0\t0
docker0\t000011AC\t00000000\t0001\t0\t0\t0\t0000FFFF\t0\t0\t0
eth0\t000200C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0
"""


def networks(pool: str = "10.213.0.0/24", *, routes: tuple[Route, ...] = ()) -> UserNetworks:
    def none() -> Any:
        raise AssertionError("no engine is asked here")

    return UserNetworks(none, installation="abc123", pool=IPv4Network(pool), routes=lambda: routes)


def test_routes_are_read_without_the_default_route() -> None:
    assert host_routes(TABLE) == [
        Route(IPv4Network("172.17.0.0/16"), "docker0"),
        Route(IPv4Network("192.0.2.0/24"), "eth0"),
    ]


def test_interfaces_of_an_installation_share_a_prefix_that_leaves_room_for_every_subnet() -> None:
    assert network.interfaces("abc123") == f"fgpu{network.tag('abc123')}"
    assert network.interfaces("abc123") != network.interfaces("abc124")
    longest = f"{network.interfaces('abc123')}{2**20 - 1:x}"
    assert len(longest) <= 15, "the kernel has no longer names for interfaces"


def test_network_name_is_unique_for_each_user() -> None:
    names = [networks().name(user) for user in ("alice", "Alice", "a/../b", "ü" * 300, "")]
    assert len(set(names)) == len(names)
    assert all(n.startswith("fgpu-abc123-u-") and len(n) < 60 and n.isascii() for n in names)


class Bridges:
    """An engine's networks; another Hub makes the wanted one at the last moment."""

    def __init__(self, *, icc: str) -> None:
        self.found: dict[str, Any] | None = None
        self._others = {
            "Driver": "bridge",
            "Options": {shared_network.ENABLE_ICC: icc},
            "IPAM": {"Config": [{"Gateway": "172.18.0.1"}]},
        }

    def inspect_network(self, _: str) -> dict[str, Any]:
        if self.found is None:
            raise NotFound("there is none")
        return self.found

    def create_network(self, name: str, **_: Any) -> None:
        self.found = self._others
        response = Response()
        response.status_code = 409
        raise APIError("409", response=response, explanation=f"network with name {name} already exists")


def test_network_made_by_another_hub_is_checked_too() -> None:
    closed: Any = Bridges(icc="false")
    assert shared_network.ensure_network(closed) == "172.18.0.1"
    open_: Any = Bridges(icc="true")
    with pytest.raises(BadSettings, match="lets containers reach each other"):
        shared_network.ensure_network(open_)


@pytest.mark.parametrize(
    ("used", "numbers"),
    [
        ("10.213.0.16/28", [1]),
        ("10.213.0.20/30", [1]),
        ("10.213.0.32/27", [2, 3]),
        ("10.213.0.0/24", list(range(16))),
        ("10.212.0.0/16", []),
        ("10.0.0.0/8", []),
    ],
)
def test_subnet_is_busy_if_another_network_overlaps_it(used: str, numbers: list[int]) -> None:
    assert list(networks()._numbers(IPv4Network(used))) == numbers


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"network_pool": "10.213.0.1/16"}, "has host bits set; use a network such as '10.213.0.0/16'"),
        ({"network_pool": "fd00::/64"}, "c.FGPU.network_pool is 'fd00::/64'"),
        ({"network_pool": "8.8.0.0/16"}, "use a private network"),
        ({"network_pool": "10.213.0.0/29"}, "not below that of c.FGPU.network_pool, 29"),
        ({"network_prefix_length": 30}, "c.FGPU.network_prefix_length is 30; it must be between 16 and 29"),
        ({"network_pool": "10.0.0.0/8", "network_prefix_length": 29}, "at most a million subnets"),
        ({"firewall": "off"}, "c.FGPU.firewall is 'off'; use 'auto' or 'managed-elsewhere'"),
        ({"egress": "none"}, "c.FGPU.egress is 'none'; use 'open' or 'closed'"),
        ({"blocked_networks": ["10.1.0.1/16"]}, "c.FGPU.blocked_networks: 10.1.0.1/16 has host bits set"),
        ({"blocked_networks": ["metadata"]}, "c.FGPU.blocked_networks: 'metadata' does not appear to be"),
        ({"allowed_ports": [443, 70000]}, "c.FGPU.allowed_ports has 70000"),
    ],
)
def test_a_wrong_setting_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(BadSettings) as e:
        FGPU(**given).checked()
    assert said in str(e.value)
