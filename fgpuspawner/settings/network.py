"""The networks of sessions in containers, and what of this machine they reach."""

from __future__ import annotations

from ipaddress import IPv4Network, ip_network

from traitlets import Enum, Integer, List, Unicode

from fgpu_scheduler import BadSettings
from fgpuspawner.settings.traits import Settings

METADATA = (
    "169.254.0.0/16",  # AWS, Google, Azure, OpenStack, and AWS's for containers
    "100.100.100.200/32",  # Alibaba
    "168.63.129.16/32",  # Azure's host, which is its name server too
    "192.0.0.192/32",  # Oracle
    "fd00:ec2::254/128",  # AWS
    "fd20:ce::254/128",  # Google
)
"""Where clouds keep machines' secrets."""


class NetworkSettings(Settings):
    """Addresses, the firewall and its exceptions."""

    hub_address = Unicode().tag(example='"10.0.0.1"')
    """Address at which sessions on other machines reach the Hub and the service.

    Needed where a node in ``nodes`` is at tcp:// or ssh://. Empty: the host's address on the sessions' own network.
    """
    network_pool = Unicode("10.213.0.0/16").tag(example='"172.28.0.0/16"')
    """IPv4 addresses for the users' container networks; nothing else may use them.

    Each user with sessions has a Docker network of their own, with a subnet of this.
    """
    network_prefix_length = Integer(28).tag(example="27")
    """Prefix length of each user's subnet, 16 to 29: 28 holds 13 sessions, 27 holds 29."""
    firewall = Enum(["auto", "managed-elsewhere"], "auto").tag(
        example='"managed-elsewhere"', remedy="use 'auto' or 'managed-elsewhere'"
    )
    """Firewall between containers and this machine: "auto" or "managed-elsewhere".

    With "auto" the Hub sets iptables rules if it runs as root; if it cannot, its log says so. With
    "managed-elsewhere" you do, with the output of ``fgpu firewall`` or rules of your own.
    """
    egress = Enum(["open", "closed"], "open").tag(example='"closed"', remedy="use 'open' or 'closed'")
    """Network that containers reach beyond this machine: all ("open"), or nothing ("closed").

    "closed" needs the firewall. The Hub and the service are always reached.
    """
    blocked_networks = List(Unicode(), list(METADATA)).tag(example='["169.254.0.0/16", "10.1.0.0/16"]')
    """Networks that containers never reach. The default is where clouds keep machines' secrets.

    This machine's name servers stay reachable, for names only. The list replaces the default.
    """
    allowed_ports = List(Integer()).tag(example="[443]")
    """TCP ports of this machine that containers may reach, besides the Hub's and the service's."""

    def _check_network(self) -> None:
        try:
            pool = IPv4Network(self.network_pool)
        except ValueError as e:
            raise BadSettings(
                f"c.FGPU.network_pool is {self.network_pool!r}: {e}; use a network such as '10.213.0.0/16'"
            ) from None
        if not 16 <= self.network_prefix_length <= 29 or pool.prefixlen > self.network_prefix_length:
            raise BadSettings(
                f"c.FGPU.network_prefix_length is {self.network_prefix_length}; it must be between 16 and 29, and "
                f"not below that of c.FGPU.network_pool, {pool.prefixlen}"
            )
        if not pool.is_private or self.network_prefix_length - pool.prefixlen > 20:
            raise BadSettings(
                f"c.FGPU.network_pool is {self.network_pool!r}; use a private network of at most a million subnets, "
                "such as '10.213.0.0/16'"
            )
        for network in self.blocked_networks:
            try:
                ip_network(network)
            except ValueError as e:
                raise BadSettings(
                    f"c.FGPU.blocked_networks: {e}; use networks such as '10.1.0.0/16'"
                ) from None
        for port in self.allowed_ports:
            if not 1 <= port <= 65535:
                raise BadSettings(f"c.FGPU.allowed_ports has {port}; ports are between 1 and 65535")
