"""What a session reaches: the Hub, the service and what is outside; no other session, and nothing else of the host."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from ipaddress import IPv4Network
from typing import Any, NamedTuple

import pytest
from dockerhub import BASE, MINI, ONE, PYTHON, DockerHub, Engine, Running, until

from fgpu_scheduler import BadSettings
from fgpuspawner.engines.docker import firewall
from fgpuspawner.engines.docker import networks as network

SCAN = """
import json, socket
found = {{}}
for address, port in {targets!r}:
    try:
        socket.create_connection((address, port), timeout=3).close()
        found[f"{{address}} {{port}}"] = "reached"
    except OSError as e:
        found[f"{{address}} {{port}}"] = type(e).__name__
print(json.dumps(found))
"""
LISTEN = "import http.server as h; h.test(h.SimpleHTTPRequestHandler, h.ThreadingHTTPServer, port=8888)"
OUTSIDE, ON_THE_WAY, METADATA = "198.51.100.2", "198.51.100.1", "169.254.169.254"

can_be_closed = pytest.mark.skipif(
    not firewall.can_apply(), reason="the firewall needs root and iptables on the engine's machine"
)


class Two(NamedTuple):
    alice: Running
    bob: Running


@pytest.fixture(scope="module")
def two(shared_hub: DockerHub) -> Iterator[Two]:
    yield Two(shared_hub.running("alice"), shared_hub.running("bob"))
    shared_hub.end("alice")
    shared_hub.end("bob")


@pytest.fixture(scope="module")
def address(engine: Engine) -> str:
    """The host's address that sessions reach the Hub at."""
    return network.ensure_network(engine.client)


def scan(engine: Engine, container: str, targets: list[tuple[str, int]]) -> dict[tuple[str, int], bool]:
    """Return which of these addresses and ports are reached from inside a container."""
    found = json.loads(engine.python_in(container, SCAN.format(targets=targets)))
    return {(a, p): found[f"{a} {p}"] == "reached" for a, p in targets}


def reached(engine: Engine, container: str, targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
    return [target for target, found in scan(engine, container, targets).items() if found]


def reaches_only(
    engine: Engine, container: str, targets: list[tuple[str, int]], own: list[tuple[str, int]]
) -> None:
    """See that a session reaches ``own`` of the targets and no other, also while Docker makes networks."""
    until(lambda: reached(engine, container, own) == own, what="what is open is reached")
    assert reached(engine, container, [target for target in targets if target not in own]) == []


def host_addresses() -> list[str]:
    """The host's own addresses (IPv4), but for its loopback."""
    listed = json.loads(subprocess.run(["ip", "-j", "addr"], capture_output=True, check=True).stdout)
    return [
        str(a["local"])
        for entry in listed
        for a in entry.get("addr_info", ())
        if a["family"] == "inet" and entry["ifname"] != "lo"
    ]


def reached_here(engine: Engine, container: str, port: int) -> list[str]:
    """Return at which of the host's own addresses this port is reached from inside a container."""
    found = reached(engine, container, [(a, port) for a in host_addresses()])
    # An address of a removed network is no longer the host's: an answer there comes from outside.
    still = host_addresses()
    return [a for a, _ in found if a in still]


# --- other sessions ---


def test_each_user_has_a_separate_network(engine: Engine, two: Two, shared_hub: DockerHub) -> None:
    assert two.alice.network != two.bob.network
    found = engine.client.inspect_network(two.alice.network)
    assert found["Labels"] == {"fgpu.installation": shared_hub.installation, "fgpu.user": "alice"}
    assert found["Options"]["com.docker.network.bridge.enable_icc"] == "false"
    interface = found["Options"]["com.docker.network.bridge.name"]
    assert interface.startswith(network.interfaces(shared_hub.installation))
    assert len(interface) <= 15
    assert found["EnableIPv6"] is False
    assert found["IPAM"]["Config"][0]["Subnet"].startswith("10.213.")


def test_sessions_of_two_users_do_not_reach_each_other(engine: Engine, two: Two) -> None:
    until(lambda: reached(engine, two.alice.id, [(two.alice.ip, 8888)]), what="its own server answers")
    assert reached(engine, two.alice.id, [(two.bob.ip, 8888), (two.bob.gateway, 8888)]) == []
    assert reached(engine, two.bob.id, [(two.alice.ip, 8888), (two.alice.gateway, 8888)]) == []


def test_a_session_does_not_learn_the_others_addresses(engine: Engine, two: Two) -> None:
    for name in (two.bob.name, two.bob.id[:12]):
        code = f"import socket; print(socket.gethostbyname({name!r}))"
        status, output = engine.run_in(two.alice.id, PYTHON, "-c", code)
        assert status != 0, output
        assert two.bob.ip not in output
    code = f"import socket; print(socket.gethostbyname({two.alice.name!r}))"
    assert engine.python_in(two.alice.id, code) == two.alice.ip, "Docker's resolver answers, of one's own"


def test_a_users_sessions_share_a_network_and_do_not_reach_each_other(
    engine: Engine, hub: DockerHub, two: Two
) -> None:
    second = hub.running("alice", "second")
    assert second.network == two.alice.network
    assert reached(engine, second.id, [(two.alice.ip, 8888)]) == []


def test_a_session_can_forge_no_packets(engine: Engine, two: Two) -> None:
    """Neither its user nor root in it: another's address, or a gateway of one's own, needs these."""
    code = """
import fcntl, socket, struct
def attempt(what):
    try:
        what()
        return "done"
    except PermissionError:
        return "refused"
def new_address():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    request = struct.pack("16sH2s4s8s", b"eth0", socket.AF_INET, b"", socket.inet_aton("10.213.0.2"), b"")
    fcntl.ioctl(s, 0x8916, request)
def new_hardware_address():
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    fcntl.ioctl(s, 0x8924, struct.pack("16sH6s8s", b"eth0", 1, b"\\x02\\x42\\x0a\\x00\\x00\\x01", b""))
print([attempt(what) for what in (
    lambda: socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3)),
    lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW),
    new_address,
    new_hardware_address,
)])
"""
    for user in ("", "0:0"):
        assert engine.python_in(two.alice.id, code, user=user) == str(["refused"] * 4), user


def test_a_session_does_not_reach_containers_of_other_networks(engine: Engine, two: Two) -> None:
    other = engine.start(f"{engine.prefix}-bridge", network="bridge", code=LISTEN)
    neighbour = engine.start(f"{engine.prefix}-neighbour", network="bridge")
    found = engine.inspect(other)
    assert found is not None
    target = (str(found["NetworkSettings"]["IPAddress"]), 8888)
    until(lambda: reached(engine, neighbour, [target]), what="the container answers its neighbour")
    assert reached(engine, two.alice.id, [target]) == []


def test_a_session_does_not_reach_ports_that_other_containers_publish(
    engine: Engine, two: Two, address: str
) -> None:
    made = engine.client.create_container(
        BASE,
        [PYTHON, "-c", LISTEN],
        name=f"{engine.prefix}-published",
        ports=[8888],
        host_config=engine.client.create_host_config(network_mode="bridge", port_bindings={8888: None}),
    )
    try:
        engine.client.start(made["Id"])
        port = int(engine.client.port(made["Id"], 8888)[0]["HostPort"])
        until(lambda: answers(address, port), what="the published port answers the host")
        assert reached_here(engine, two.alice.id, port) == []
    finally:
        engine.remove(made["Id"])


def answers(ip: str, port: int) -> bool:
    with contextlib.suppress(OSError), socket.create_connection((ip, port), timeout=2):
        return True
    return False


# --- the host ---


def test_a_session_reaches_the_hubs_api(
    engine: Engine, two: Two, shared_hub: DockerHub, address: str
) -> None:
    url = f"http://{address}:{shared_hub.port + 1}/hub/api/"
    code = f"from urllib.request import urlopen; print(urlopen({url!r}, timeout=60).read().decode())"
    assert '"version"' in engine.python_in(two.alice.id, code)


def test_a_session_does_not_reach_the_proxys_api(
    engine: Engine, two: Two, shared_hub: DockerHub, address: str
) -> None:
    assert reached(engine, two.alice.id, [(address, shared_hub.port + 2), (address, shared_hub.port)]) == []


@can_be_closed
def test_session_does_not_reach_other_ports_of_the_host(
    engine: Engine, two: Two, shared_hub: DockerHub
) -> None:
    """A database, the engine's own port: whatever listens on all addresses, or on one of the bridges'."""
    neighbour = engine.start(f"{engine.prefix}-unguarded", network="bridge")
    # Connections are not accepted, so the backlog must have room for one for each address of the machine.
    with socket.create_server(("0.0.0.0", 0), backlog=4096) as listener:
        port = listener.getsockname()[1]
        assert two.alice.gateway in host_addresses()
        # Not all of them, where other Hubs' networks are on this machine.
        until(lambda: reached_here(engine, neighbour, port), what="the listener answers whoever may ask")
        assert reached_here(engine, two.alice.id, port) == []
    # The Hub's port is open at the Hub's address only.
    hubs = shared_hub.port + 1
    until(
        lambda: len(reached_here(engine, two.alice.id, hubs)) == 1, what="it is open there, and nowhere else"
    )


@can_be_closed
def test_a_session_does_not_reach_the_host_by_udp(engine: Engine, two: Two, address: str) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listener:
        listener.bind(("0.0.0.0", 0))
        listener.settimeout(2)
        port = listener.getsockname()[1]

        def heard(container: str, said: bytes) -> bool:
            code = f"import socket; socket.socket(2, 2).sendto({said!r}, ({address!r}, {port}))"
            engine.python_in(container, code)
            with contextlib.suppress(TimeoutError):
                while listener.recv(10) != said:
                    pass
                return True
            return False

        neighbour = engine.start(f"{engine.prefix}-udp", network="bridge")
        # A packet that is lost while Docker moves its rules for another network is not sent again.
        until(lambda: heard(neighbour, b"neighbour"), what="who may send is heard")
        assert not heard(two.alice.id, b"alice")


def test_a_session_has_no_ipv6(engine: Engine, two: Two) -> None:
    """So that nothing of the host is reached over it, whatever listens there."""
    with socket.create_server(("::", 0), family=socket.AF_INET6) as listener:
        port = listener.getsockname()[1]
        listed = json.loads(
            subprocess.run(["ip", "-6", "-j", "addr"], capture_output=True, check=True).stdout
        )
        own = [str(a["local"]) for entry in listed for a in entry.get("addr_info", ()) if "local" in a]
        assert own, "the host has IPv6 addresses to be scanned"
        targets = [*own, *(f"{a}%eth0" for a in own if a.startswith("fe80"))]
        assert reached(engine, two.alice.id, [(a, port) for a in targets if a != "::1"]) == []


def test_the_engines_socket_is_not_in_a_session(engine: Engine, two: Two) -> None:
    code = "import os; print([p for p in ('/var/run/docker.sock', '/run/docker.sock') if os.path.exists(p)])"
    assert engine.python_in(two.alice.id, code) == "[]"


@can_be_closed
def test_the_command_prints_applies_and_removes_the_rules(
    make_hub: Callable[..., DockerHub], two: Two, engine: Engine
) -> None:
    with_service = MINI.splitlines()[0] + "\n"
    hub = make_hub(firewall="managed-elsewhere", egress="closed", after=with_service).start()
    assert "The firewall is managed elsewhere" in hub.log_text()
    alice = hub.running("alice")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        target = (alice.gateway, listener.getsockname()[1])
        until(lambda: reached(engine, alice.id, [target]), what="the Hub does nothing about it")
        assert command(hub, "--apply") == f"OK: the rules of installation {hub.installation} are in force"
        assert reached(engine, alice.id, [target]) == []
        assert command(hub, "--remove") == f"removed the rules of installation {hub.installation}"
        until(lambda: reached(engine, alice.id, [target]), what="it is open again")
        printed = command(hub)
        subprocess.run(["sh", "-s"], input=printed, text=True, check=True)
        assert reached(engine, alice.id, [target]) == [], "the printed script does the same"
    assert f"--dport {hub.port + 1} " in printed
    assert f"--dport {hub.port + 3} " in printed
    # Not while Docker makes a network for another test.
    until(
        lambda: firewall.complete(firewall.state(hub.installation), hub.installation), what="the rules stand"
    )


def command(hub: DockerHub, *flags: str) -> str:
    words = [sys.executable, "-m", "fgpuspawner.cli.main", "firewall", "--config", hub.write_config(), *flags]
    done = subprocess.run(words, capture_output=True, text=True, check=False, cwd=hub.folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@can_be_closed
def test_rules_stay_while_sessions_outlive_the_hub_and_go_with_the_last(
    make_hub: Callable[..., DockerHub],
) -> None:
    hub = make_hub().start()
    alice = hub.running("alice")
    hub.terminate()
    # Not while Docker makes a network for another test.
    until(
        lambda: firewall.complete(firewall.state(hub.installation), hub.installation), what="the rules stand"
    )
    hub.start()
    hub.wait_ready("alice")
    hub.end("alice")
    # It holds its network until it is removed.
    hub.engine.wait_gone(alice.name)
    hub.terminate()
    assert all(rules == [] for rules in firewall.state(hub.installation).values())
    assert hub.engine.networks_of(hub.installation) == {}


# --- outside ---


class Outside(NamedTuple):
    """Another machine's server, and the name of the network namespace that it is."""

    address: str
    port: int
    netns: str

    @property
    def server(self) -> tuple[str, int]:
        return self.address, self.port


@pytest.fixture(scope="module")
def outside() -> Iterator[Outside]:
    """Another machine beside this one, which has a cloud's address for metadata, too."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        pytest.skip("a machine outside needs root and iproute2")
    name = f"fgpt{secrets.token_hex(3)}"

    def ip(*words: str) -> None:
        subprocess.run(["ip", *words], check=True, capture_output=True)

    ip("netns", "add", name)
    try:
        ip("link", "add", name, "type", "veth", "peer", "name", "eth0", "netns", name)
        ip("addr", "add", f"{ON_THE_WAY}/30", "dev", name)
        ip("link", "set", name, "up")
        for own in (f"{OUTSIDE}/30", f"{METADATA}/32"):
            ip("-n", name, "addr", "add", own, "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "route", "add", "default", "via", ON_THE_WAY)
        ip("route", "replace", f"{METADATA}/32", "via", OUTSIDE)
        server = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-m", "http.server", "8080"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            until(lambda: answers(OUTSIDE, 8080), what="the machine outside answers")
            until(lambda: answers(METADATA, 8080), what="so do its metadata")
            yield Outside(OUTSIDE, 8080, name)
        finally:
            server.kill()
            server.wait()
    finally:
        ip("netns", "del", name)


@can_be_closed
def test_open_egress_reaches_outside_except_blocked_networks(
    engine: Engine, two: Two, outside: Outside
) -> None:
    reaches_only(engine, two.alice.id, [outside.server, (METADATA, 8080)], [outside.server])


def as_it_is(netns: str) -> str:
    """Return what decides of packets, here and in a network namespace, for who reads why a test failed."""
    commands = (
        "iptables-save -c; ip -br addr; ip route; ip neigh",
        f"ip -n {netns} -s addr; ip -n {netns} neigh",
    )
    return subprocess.run(";".join(commands), shell=True, capture_output=True, text=True, check=False).stdout


@can_be_closed
def test_session_is_unreachable_from_outside(two: Two, outside: Outside, shared_hub: DockerHub) -> None:
    """Not even with a way there, whatever the host does with packets that it passes on."""
    until(lambda: answers(two.alice.ip, 8888), what="the host does")
    # A first packet may meet Docker's own silence, while it moves its rules about for another network.
    code = f"import socket; socket.create_connection(({two.alice.ip!r}, 8888), timeout=20)"
    words = ["ip", "netns", "exec", outside.netns, sys.executable, "-c", code]
    tried = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "ConnectionRefusedError" in tried.stderr, f"{tried.stderr}\n{as_it_is(outside.netns)}"


@can_be_closed
def test_closed_egress_reaches_only_hub_and_service(
    engine: Engine, make_hub: Callable[..., DockerHub], outside: Outside, address: str
) -> None:
    server = MINI.splitlines()[0] + "\n"
    hub = make_hub(after=server, egress="closed", network_pool="10.214.0.0/24").start()
    carol = hub.running("carol")
    assert carol.ip.startswith("10.214.0.")
    own = [(address, hub.port + 1), (address, hub.port + 3)]
    reaches_only(engine, carol.id, [*own, outside.server, (METADATA, 8080)], own)
    health = f"http://{address}:{hub.port + 3}/services/fgpu/health"
    code = f"from urllib.request import urlopen; print(urlopen({health!r}, timeout=60).status)"
    assert engine.python_in(carol.id, code) == "200"
    # Names would carry data out, so Docker's resolver has no server to ask.
    assert carol.host["Dns"] == ["127.0.0.1"]
    assert "sessions reach" in hub.log_text()


# --- networks come and go ---


def test_a_network_goes_with_its_users_last_session(engine: Engine, hub: DockerHub) -> None:
    first, second = hub.running("dora"), hub.running("dora", "second")
    assert first.network == second.network
    hub.end("dora", "second")
    hub.running("erin")
    hub.end("erin")
    until(
        lambda: all(u != "erin" for u in users_with_networks(engine, hub)),
        within_s=180,
        what="the network of erin is gone",
    )
    assert "dora" in users_with_networks(engine, hub), "one that is in use stays"
    before = engine.networks_of(hub.installation)[first.network]
    hub.end("dora")
    assert hub.running("dora").network == first.network
    assert engine.networks_of(hub.installation)[first.network] == before, "it was not made anew at once"


def users_with_networks(engine: Engine, hub: DockerHub) -> list[str]:
    filters = {"label": f"fgpu.installation={hub.installation}"}
    return [str(found["Labels"].get("fgpu.user")) for found in engine.client.networks(filters=filters)]


def test_subnet_is_not_reused_at_once_for_another_user(engine: Engine) -> None:
    installation = secrets.token_hex(6)

    def subnet_of(user: str) -> str:
        networks = network.UserNetworks(
            lambda: engine.client, installation=installation, pool=IPv4Network("10.216.0.0/16")
        )
        try:
            with networks.held(user):
                return str(
                    engine.client.inspect_network(networks.ensure(user))["IPAM"]["Config"][0]["Subnet"]
                )
        finally:
            networks.remove_unused()

    # Each time by another Hub, which does not know what the one before gave out.
    assert len({subnet_of(user) for user in ("alice", "bob", "carol")}) > 1


def test_started_hub_adopts_running_sessions_ends_missing_ones_and_removes_their_networks(
    engine: Engine, make_hub: Callable[..., DockerHub]
) -> None:
    hub = make_hub().start()
    alice, bob = hub.running("alice"), hub.running("bob")
    labels = {"fgpu.installation": hub.installation, "fgpu.user": "mallory"}
    forged = f"{engine.prefix}-forged"
    engine.client.create_network(forged, driver="bridge", labels=labels)
    hub.kill()
    engine.remove(bob.id)
    hub.start()
    until(lambda: bob.network not in engine.networks_of(hub.installation), what="the unused one is gone")
    assert engine.networks_of(hub.installation).keys() == {alice.network, forged}
    hub.wait_ready("alice")
    hub.reach({"alice/": "RUNNING"})
    assert hub.sessions()["alice/"].id == alice.session.id
    assert engine.client.inspect_container(alice.name)["Id"] == alice.id
    assert (hub.last("bob").id, hub.last("bob").end_cause) == (bob.session.id, "EXITED")
    engine.client.remove_network(forged)


def test_concurrent_launches_of_a_user_make_one_network(engine: Engine, hub: DockerHub) -> None:
    hub.add_user("frank")
    names = ["", "a", "b", "c"]
    for name in names:
        assert hub.spawn("frank", name, options={**ONE, "fgpu": "0.5"}).status_code in (201, 202)
    for name in names:
        hub.wait_ready("frank", name)
    assert users_with_networks(engine, hub).count("frank") == 1


def test_full_pool_is_reported_to_the_owner_and_in_the_log(make_hub: Callable[..., DockerHub]) -> None:
    hub = make_hub(network_pool="10.215.0.0/28").start()
    hub.running("alice")
    hub.add_user("bob")
    assert hub.spawn("bob", options=ONE).status_code in (201, 202, 500)
    ended = hub.last("bob")
    assert ended.end_cause == "LAUNCH_FAILED"
    assert ended.message is not None
    assert "no network is free for your session: all 1 are in use" in ended.message
    assert (
        "c.FGPU.network_pool 10.215.0.0/28 has room for 1 networks of /28, and all are in use"
        in hub.log_text()
    )


def test_pool_that_overlaps_used_addresses_is_refused(engine: Engine, address: str) -> None:
    pool = IPv4Network(f"{address.rsplit('.', 2)[0]}.0.0/16")
    networks = network.UserNetworks(lambda: engine.client, installation=secrets.token_hex(6), pool=pool)
    with pytest.raises(BadSettings, match=r"overlaps .*; name a pool of unused addresses"):
        networks.check_pool()


def test_shared_network_is_made_once_without_traffic_between_containers(engine: Engine) -> None:
    name = f"{engine.prefix}-closed"
    try:
        address = network.ensure_network(engine.client, name)
        assert network.ensure_network(engine.client, name) == address
        options: dict[str, Any] = engine.client.inspect_network(name)["Options"]
        assert options == {"com.docker.network.bridge.enable_icc": "false"}
    finally:
        engine.client.remove_network(name)
