"""The firewall's rules: on a kernel of their own network, with both kinds of iptables where they are there."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import pytest

from fgpuspawner.engines.docker import firewall
from fgpuspawner.engines.docker import networks as network
from fgpuspawner.engines.docker.firewall import (
    FirewallFailed,
    FirewallKeeper,
    FirewallRules,
    complete,
    read_state,
    removal,
    run,
    script,
    state,
)

T = TypeVar("T")

RULES = FirewallRules(
    installation="abc123",
    services=(("172.18.0.1", 8001), ("172.18.0.1", 10880), ("fd00:1::1", 8001)),
    allowed_ports=(443,),
    name_servers=("192.0.2.53",),
    blocked=("169.254.0.0/16", "fd00:ec2::254/128"),
)
OWN = network.interfaces("abc123")
CLONE_NEWNS, CLONE_NEWNET = 0x20000, 0x40000000
POLICIES = "iptables -S; ip6tables -S; iptables -t security -S; ip6tables -t security -S"


def in_network_of_its_own(function: Callable[[], T]) -> T:
    """Run this in a thread that has a network namespace of its own: the machine's rules are never touched.

    Its interfaces are what ``/sys/class/net`` lists.
    """
    found: list[T] = []
    raised: list[BaseException] = []

    def target() -> None:
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET) != 0:
            raised.append(OSError(ctypes.get_errno(), "unshare"))
            return
        try:
            sh("mount --make-rprivate / && mount -t sysfs sysfs /sys")
            found.append(function())
        except BaseException as e:
            raised.append(e)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if raised:
        raise raised[0]
    return found[0]


@pytest.fixture(params=["nft", "legacy"])
def iptables(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kind of iptables, under its plain names: what a machine calls iptables is one of the two."""
    if os.geteuid() != 0 or shutil.which("iptables") is None or shutil.which("ip") is None:
        pytest.skip("needs root, iptables and iproute2")
    for family in ("iptables", "ip6tables"):
        for tool in ("", "-restore"):
            program = shutil.which(f"{family}-{request.param}{tool}")
            if program is None:
                pytest.skip(f"there is no {family}-{request.param}{tool}")
            (tmp_path / f"{family}{tool}").symlink_to(program)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


def listed(*programs: str) -> list[str]:
    """Return the rules of the tables, without the policies."""
    return [
        line
        for program in programs or ("iptables", "ip6tables")
        for line in sh(f"{program} -w -S; {program} -w -t security -S").splitlines()
        if not line.startswith("-P")
    ]


def sh(command: str) -> str:
    return subprocess.run(command, shell=True, check=True, capture_output=True, text=True).stdout


def written(rules: list[str]) -> list[str]:
    """Return the rules without what is asked of the machine as they are applied: it has no bridges here."""
    return [rule for rule in rules if not rule.startswith("$(")]


@pytest.mark.usefixtures("iptables")
def test_rules_are_applied_as_they_are_written_and_again_without_a_change() -> None:
    def world() -> None:
        run(script(RULES))
        first = state("abc123")
        assert complete(first, "abc123")
        for version, rules in first.items():
            filled = [sorted(r.split()) for r in written(RULES.filled(version))]
            filled += [sorted(["security:", *r.split()]) for r in written(RULES.filled_after(version))]
            assert [r for r in filled if r not in [sorted(line.split()) for line in rules]] == []
            # The jumps in INPUT and DOCKER-USER, that those in FORWARD count, and those of the table after.
            assert len(rules) == len(filled) + 6
        run(script(RULES))
        assert state("abc123") == first
        run(script(replace(RULES, egress_open=False, allowed_ports=())))
        assert state("abc123") != first
        assert complete(state("abc123"), "abc123")

    in_network_of_its_own(world)


@pytest.mark.usefixtures("iptables")
def test_nothing_but_the_installations_interfaces_is_ever_matched() -> None:
    """Every way from a chain of the system into ours asks for such an interface; nothing else changes."""

    def world() -> None:
        sh("iptables -A INPUT -p tcp --dport 22 -j ACCEPT; iptables -A FORWARD -i tun0 -j ACCEPT")
        before, policies = listed(), sh(POLICIES)
        run(script(RULES))
        run(script(replace(RULES, installation="other", egress_open=False)))
        own = {*firewall.chains("abc123"), *firewall.chains("other")}
        added = [line for line in listed() if line not in before]
        outside_ours = [r for r in added if r.startswith("-A") and r.split()[1] not in own]
        assert len(outside_ours) == 28
        interface = f"({OWN}|{network.interfaces('other')})"
        assert all(re.fullmatch(rf"-A \S+ -[io] {interface}\+ -j FGPU-\S+", r) for r in outside_ours)
        assert {line.split()[1] for line in added if line.startswith("-N")} == {*own, "DOCKER-USER"}
        assert not [line for line in added if "-j ACCEPT" in line and line.split()[1] not in own]
        run(removal("abc123"))
        run(removal("other"))
        run(removal("other"))
        assert [line for line in sh(POLICIES).splitlines() if "DOCKER-USER" not in line] == [
            *policies.splitlines()
        ]

    in_network_of_its_own(world)


@pytest.mark.usefixtures("iptables")
@pytest.mark.parametrize(
    "spoiled",
    [
        "iptables -F",
        "ip6tables -F INPUT",
        f"iptables -D INPUT -i {OWN}+ -j {firewall.chains('abc123')[0]}",
        f"iptables -D {firewall.chains('abc123')[0]} 1",
        f"iptables -A {firewall.chains('abc123')[1]} -j ACCEPT",
        "iptables -I INPUT -j ACCEPT",
        # As Docker does when it starts.
        "iptables -I FORWARD -j ACCEPT",
        "iptables -F DOCKER-USER",
        "iptables -t security -F",
        f"ip6tables -t security -D FORWARD -i {OWN}+ -j {firewall.chains('abc123')[1]}",
    ],
)
def test_spoiled_rules_are_repaired(spoiled: str, monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[FirewallRules] = []
    apply = FirewallKeeper.apply
    monkeypatch.setattr(FirewallKeeper, "apply", lambda wall: (applied.append(wall.rules), apply(wall)))

    def world() -> None:
        wall = FirewallKeeper(RULES)
        wall.apply()
        wall.keep()
        assert len(applied) == 1
        before = state("abc123")
        sh(spoiled)
        wall.keep()
        assert len(applied) == 2
        assert state("abc123") == before
        # Rules of others that are not before ours are left alone.
        sh("iptables -A INPUT -j ACCEPT; iptables -A DOCKER-USER -j RETURN")
        wall.keep()
        assert len(applied) == 2

    in_network_of_its_own(world)


@pytest.mark.usefixtures("iptables")
def test_other_rules_in_dockers_chain_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing fails now and then while another program changes the tables."""
    real = shutil.which("iptables")
    (tmp_path / "busy").mkdir()
    program = tmp_path / "busy" / "iptables"
    program.write_text(f'#!/bin/sh\ncase "$*" in *" -L "*) exit 4;; esac\nexec {real} "$@"\n')
    program.chmod(0o755)

    def world() -> None:
        other = "-A DOCKER-USER -s 203.0.113.0/24 -j DROP"
        sh(f"iptables -N DOCKER-USER; iptables {other}")
        monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
        run(script(RULES))
        assert other in sh("iptables -S DOCKER-USER").splitlines()

    in_network_of_its_own(world)


def test_forwarded_packets_meet_our_rules_first() -> None:
    to_sessions, from_sessions = (rule for _, rule in firewall.jumps("abc123")[1:3])
    in_forward = [f"-A FORWARD {from_sessions}", f"-A FORWARD {to_sessions}"]
    in_dockers = [f"-A DOCKER-USER {from_sessions}", f"-A DOCKER-USER {to_sessions}"]
    first, dockers = "-A FORWARD -j DOCKER-USER", "-A FORWARD -o docker0 -j DOCKER"

    def counts(*lines: str) -> bool:
        return firewall.FORWARDED in read_state("\n".join(lines), "abc123")

    assert counts(*in_forward, dockers)
    assert counts(first, *in_forward, dockers)
    # As Docker leaves it when it has made a network.
    assert counts(first, dockers, *in_forward, *in_dockers)
    assert not counts(first, dockers, *in_forward, "-A DOCKER-USER -j ACCEPT", *in_dockers)
    assert not counts(dockers, first, *in_forward, *in_dockers)
    assert not counts(first, dockers, *in_dockers[:1])
    assert not counts(dockers, *in_forward)


def test_jump_behind_other_rules_does_not_count() -> None:
    chain = firewall.chains("abc123")[0]
    jump, other = f"-A INPUT -i {OWN}+ -j {chain}", "-A INPUT -j FGPU-INPUT-0f0f0"
    assert read_state(f"{jump}\n-A INPUT -j ACCEPT\n", "abc123") == [jump]
    assert read_state(f"{other}\n{jump}\n", "abc123") == [jump]
    assert read_state(f"-A INPUT -j ACCEPT\n{jump}\n", "abc123") == []


REACH = """
import socket, sys
family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
s = socket.socket(family)
s.settimeout(float(sys.argv[3]))
try:
    s.connect((sys.argv[1], int(sys.argv[2])))
    print("reached")
except OSError as e:
    print(type(e).__name__)
"""
LISTEN = """
import socket, sys, time
own = []
for port in sys.argv[2:]:
    family = socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET
    s = socket.socket(family)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    s.bind(("", int(port)))
    s.listen()
    own.append(s)
print("listening", flush=True)
time.sleep(300)
"""


@contextmanager
def a_host(interface: str, address: str, peer: str, *, via: str = "") -> Iterator[list[str]]:
    """Yield what runs a program on a host of its own, which has the address ``peer``, behind this interface."""
    own = os.readlink("/proc/thread-self/ns/net")
    with subprocess.Popen(["unshare", "-n", "sleep", "3600"]) as host:
        try:
            while os.readlink(f"/proc/{host.pid}/ns/net") == own:
                time.sleep(0.01)
            inside = f"nsenter -n -t {host.pid}"
            sh(f"ip link add {interface} type veth peer name eth0 netns {host.pid}")
            sh(f"ip addr add {address} dev {interface}; ip link set {interface} up")
            sh(
                f"{inside} ip addr add {peer} dev eth0; {inside} ip link set eth0 up; {inside} ip link set lo up"
            )
            if via:
                sh(f"{inside} ip route add default via {via}")
            yield inside.split()
        finally:
            host.kill()


@contextmanager
def listening(inside: list[str], address: str, *ports: int) -> Iterator[None]:
    """Have a program listen on ports of every address of a host, of this address's family."""
    words = [*inside, sys.executable, "-c", LISTEN, address, *map(str, ports)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "listening\n"
        try:
            yield
        finally:
            started.kill()


def met(inside: list[str], address: str, port: int, *, timeout_s: float = 3, tries: int = 1) -> str:
    """Return what a connection from a host meets: "reached", or the name of the error."""
    words = [*inside, sys.executable, "-c", REACH, address, str(port), str(timeout_s)]
    for _ in range(tries):
        found = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if found == "reached":
            break
    return found


@pytest.mark.usefixtures("iptables")
@pytest.mark.parametrize(
    ("host", "peer"), [("10.99.0.1", "10.99.0.2"), ("fd00:99::1", "fd00:99::2")], ids=["IPv4", "IPv6"]
)
def test_machine_behind_a_guarded_interface_reaches_only_the_services(host: str, peer: str) -> None:
    """With IPv6 as with IPv4, though sessions have none so far. Others, and the host itself, reach what they did."""
    length, nodad, loopback = (64, "nodad", "::1") if ":" in host else (24, "", "127.0.0.1")
    rules = replace(RULES, services=((host, 8001),), allowed_ports=(8443,), name_servers=())

    def world() -> None:
        sh("ip link set lo up")
        with ExitStack() as there:
            there.enter_context(listening([], host, 8001, 8443, 5432))
            for interface in (f"{OWN}0", "eth7"):
                inside = there.enter_context(
                    a_host(interface, f"{host}/{length} {nodad}", f"{peer}/{length} {nodad}")
                )
                there.enter_context(listening(inside, peer, 8888))
                assert met(inside, host, 5432) == "reached", "nothing is closed yet"
                run(script(rules))
                expected = "ConnectionRefusedError" if interface.startswith(OWN) else "reached"
                assert [met(inside, host, p) for p in (8001, 8443, 5432)] == ["reached", "reached", expected]
                assert met([], loopback, 5432, tries=50) == "reached"
                said = met([], peer, 8888, tries=50)
                assert said == "reached", "the host still opens connections to what is behind the interface"
                run(removal("abc123"))
                sh(f"ip link del {interface}")

    in_network_of_its_own(world)


MANY = """
import socket, sys
opened = []
for _ in range(8):
    s = socket.socket()
    s.settimeout(1)
    try:
        s.connect((sys.argv[1], int(sys.argv[2])))
        opened.append(s)
    except OSError:
        pass
print(len(opened))
"""


@pytest.mark.usefixtures("iptables")
def test_a_session_has_a_limit_of_open_connections_to_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(firewall, "MOST_CONNECTIONS", 3)

    def world() -> str:
        with (
            a_host(f"{OWN}0", "10.99.0.1/24", "10.99.0.2/24") as inside,
            closing(socket.create_server(("10.99.0.1", 8001), backlog=50)),
        ):
            run(script(replace(RULES, services=(("10.99.0.1", 8001),), name_servers=())))
            words = [*inside, sys.executable, "-c", MANY, "10.99.0.1", "8001"]
            return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()

    assert in_network_of_its_own(world) == "3"


@pytest.mark.usefixtures("iptables")
def test_missing_connlimit_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In a folder of their own: under the other names there are links to the machine's own programs.
    folder = tmp_path / "cannot count"
    folder.mkdir()
    for name, read in (("iptables", ""), ("iptables-restore", "rules=$(cat); ")):
        refuse = 'case "$*$rules" in *connlimit*) echo "line 9 failed" >&2; exit 1;; esac'
        lines = f'#!/bin/sh\n{read}{refuse}\necho "$rules" | exec {shutil.which(name)} "$@"\n'
        (folder / name).write_text(lines)
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")

    def world() -> tuple[str, str]:
        with pytest.raises(firewall.FirewallFailed) as raised:
            run(script(RULES))
        return str(raised.value), sh("iptables -S")

    said, rules = in_network_of_its_own(world)
    assert "line 9 failed the kernel lacks xt_connlimit (modprobe xt_connlimit)" in said
    assert "FGPU" not in rules


@pytest.mark.usefixtures("iptables")
@pytest.mark.parametrize("before", ["", "iptables -I FORWARD -j ACCEPT"], ids=["as applied", "Docker first"])
def test_closed_networks_stay_closed_while_dockers_rules_come_first(before: str) -> None:
    """As they do for a moment whenever it makes a network."""
    rules = replace(RULES, services=(), name_servers=(), egress_open=False, allowed_ports=())

    def world() -> None:
        sh("ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward")
        with ExitStack() as there:
            insides = []
            for interface, number in ((f"{OWN}0", 97), ("eth7", 98)):
                net = f"10.{number}.0"
                host = a_host(interface, f"{net}.1/24", f"{net}.2/24", via=f"{net}.1")
                insides.append(there.enter_context(host))
                there.enter_context(listening(insides[-1], "x", 8888))

            def reached(timeout_s: int) -> list[bool]:
                """Return whether the session reaches who is outside, and is reached from there."""
                pairs = zip(insides, ("10.98.0.2", "10.97.0.2"), strict=True)
                return [met(i, address, 8888, timeout_s=timeout_s) == "reached" for i, address in pairs]

            assert reached(10) == [True, True], "nothing is closed yet"
            run(script(rules))
            sh(before or "true")
            assert reached(1) == [False, False]
            if before:
                sh("iptables -t security -F")
                assert reached(10) == [True, True], "so it is the second table that closes it"
            run(script(replace(rules, services=(("10.98.0.2", 8888),), callers=("10.98.0.2",))))
            sh(before or "true")
            assert reached(10) == [True, True], "what is allowed is"

    in_network_of_its_own(world)


@pytest.mark.usefixtures("iptables")
def test_own_bridge_with_dockers_prefix_leads_outside() -> None:
    """Docker's own are br- and 12 digits; Open vSwitch's uplink, say, is br-ex."""
    bridges = {"br-ex": "10.98.0", "br-0123456789ab": "10.96.0"}

    def world() -> None:
        sh("ip link set lo up; echo 1 > /proc/sys/net/ipv4/ip_forward")
        with ExitStack() as there:
            inside = there.enter_context(a_host(f"{OWN}0", "10.97.0.1/24", "10.97.0.2/24", via="10.97.0.1"))
            for bridge, net in bridges.items():
                host = there.enter_context(a_host(bridge, f"{net}.1/24", f"{net}.2/24", via=f"{net}.1"))
                there.enter_context(listening(host, "x", 8888))

            def reached() -> list[bool]:
                return [met(inside, f"{net}.2", 8888) == "reached" for net in bridges.values()]

            assert reached() == [True, True], "nothing is closed yet"
            run(script(RULES))
            assert reached() == [True, False]
            first = state("abc123")
            run(script(RULES))
            assert state("abc123") == first
            run(script(replace(RULES, egress_open=False)))
            assert reached() == [False, False]

    in_network_of_its_own(world)


STRAY = """
import socket, struct, sys
TCP_REPAIR, TCP_REPAIR_QUEUE, TCP_QUEUE_SEQ, ON, OFF, RECEIVED, SENT = 19, 20, 21, 1, -1, 1, 2
def say(words): print(words, flush=True)
def number(queue):
    client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR_QUEUE, queue)
    return client.getsockopt(socket.IPPROTO_TCP, TCP_QUEUE_SEQ) & 0xFFFFFFFF
def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF
listener = socket.create_server((sys.argv[1], 8888))
say("listening")
client, (peer, port) = listener.accept()
client.sendall(client.recv(100))
sys.stdin.readline()
client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, ON)
seen, sent = number(RECEIVED), number(SENT)
client.setsockopt(socket.IPPROTO_TCP, TCP_REPAIR, OFF)
# Far beyond what the other side has room for: no connection tracker knows what to do with it.
beyond = (sent + 100_000_000) & 0xFFFFFFFF
def segment(check):
    return struct.pack("!HHIIBBHHH2s", 8888, port, beyond, seen, 5 << 4, 0x18, 512, check, 0, b"??")
between = socket.inet_aton(sys.argv[1]) + socket.inet_aton(peer) + struct.pack("!BBH", 0, socket.IPPROTO_TCP, 22)
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_TCP)
raw.sendto(segment(checksum(between + segment(0))), (peer, 0))
say("sent")
client.sendall(client.recv(100))
sys.stdin.readline()
"""


@pytest.mark.usefixtures("iptables")
def test_a_stray_packet_of_a_session_does_not_cut_its_open_connections() -> None:
    """One that came late, or was sent again, is of no connection for the tracker. A reset would end a healthy one."""

    def world() -> None:
        with a_host(f"{OWN}0", "10.99.0.1/24", "10.99.0.2/24") as inside:
            run(script(RULES))
            words = [*inside, sys.executable, "-c", STRAY, "10.99.0.2"]
            with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
                assert server.stdin is not None
                assert server.stdout is not None
                try:
                    assert server.stdout.readline() == "listening\n"
                    with socket.create_connection(("10.99.0.2", 8888), timeout=30) as notebook:
                        notebook.sendall(b"before")
                        assert notebook.recv(100) == b"before"
                        print("now", file=server.stdin, flush=True)
                        assert server.stdout.readline() == "sent\n"
                        notebook.sendall(b"after")
                        assert notebook.recv(100) == b"after"
                finally:
                    server.kill()
            lines = [line.split() for line in sh("iptables -w -nvx -L").splitlines() if " INVALID" in line]
            assert [int(packets) for packets, *_ in lines if int(packets)] == [1], "it was a stray one"

    in_network_of_its_own(world)


def test_missing_shell_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(FirewallFailed, match=r"^the firewall's rules could not be applied: .*'sh'"):
        run("exit 0")


def test_name_servers_are_the_machines_without_its_loopback(tmp_path: Path) -> None:
    conf, other = tmp_path / "resolv.conf", tmp_path / "resolved.conf"
    conf.write_text("# nameserver 1.1.1.1\nnameserver 127.0.0.53\nsearch example\nnameserver fe80::1%eth0\n")
    other.write_text("nameserver 192.0.2.53\nnameserver fd00::53\nnameserver 192.0.2.53\n")
    assert firewall.name_servers([conf, other, tmp_path / "none"]) == ("192.0.2.53", "fd00::53")


def test_dns_is_allowed_before_blocked_networks_and_not_with_closed_egress() -> None:
    """In some clouds the name server has the address of the metadata."""
    rules = replace(RULES, name_servers=("169.254.169.254",))
    passing = rules.filled(4)
    asked = [n for n, r in enumerate(passing) if "FROM" in r and "--dport 53" in r]
    blocked = [n for n, r in enumerate(passing) if "FROM" in r and "-d 169.254.0.0/16" in r]
    assert asked
    assert max(asked) < min(blocked)
    closed = replace(rules, egress_open=False)
    assert not any("--dport 53" in r for r in closed.filled(4))
    assert [r for r in closed.filled(4) if "FROM" in r][-1].endswith(
        "-j REJECT --reject-with icmp-port-unreachable"
    )
