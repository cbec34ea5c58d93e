"""Firewall rules that close a machine to its sessions, and limit what sessions reach beyond it.

Docker separates containers and closes nothing of the host: a container reaches every port that listens on all
addresses.

1. All rules hang below jumps for ``-i`` or ``-o`` of one installation's bridge interfaces, so they cannot lock out
   anything else.
2. They are in separate chains, filled in one transaction with the jumps to them.
3. The jumps are at the top of INPUT and FORWARD, and in DOCKER-USER: Docker puts its own rules on top of FORWARD
   whenever it starts, and keeps DOCKER-USER above them.
4. Docker also does that when it makes a network, and DOCKER-USER is on top again only a moment later. Packets that pass
   Docker's rules in between meet ours once more in the later table ``security``, where they are dropped.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import os
import shutil
import subprocess
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import FGPUError
from fgpuspawner.engines.docker.networks import INTERFACES, interfaces, tag

log = logging.getLogger("fgpu.firewall")

FAMILIES = {4: "iptables", 6: "ip6tables"}
IPV6 = "/proc/net/if_inet6"
CHAINS = ("FGPU-INPUT", "FGPU-FROM", "FGPU-TO")
APPLY_TRIES, APPLY_AGAIN_S = 5, 0.4
AFTER = "security"
"""A table, otherwise unused, with a FORWARD chain that comes after that of ``filter``."""
PASSED_ON = slice(1, 3)
"""The part of the chains and of the jumps that concerns FORWARD."""
DOCKERS = "DOCKER-USER"
DOCKERS_FIRST = f"-A FORWARD -j {DOCKERS}"
FORWARDED = "in force for what is passed on"
NO_TABLE_AFTER = "the kernel has no table security"
MOST_CONNECTIONS = 256
"""Open connections of one session to each port of the Hub and the service."""
LOOK_EVERY_S = 15.0
"""For this long rules that another program flushed may be missing."""
COMMAND_TIMEOUT_S = 60
RESOLV_CONF = (Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf"))
"""Docker reads the second if the first names only systemd's resolver on this machine."""


class FirewallFailed(FGPUError):
    """The rules could not be read or applied."""

    code = "firewall_failed"


Refuse = Callable[[int, str], list[str]]
"""Returns the rules that refuse what matches, for a version of IP."""


@dataclass(frozen=True, slots=True)
class FirewallRules:
    """What the sessions of one installation reach.

    Attributes:
        installation: the id of the installation.
        services: addresses and ports of the Hub and the service, here or on another machine.
        allowed_ports: further TCP ports of the machine that the rules are on.
        name_servers: addresses of DNS servers that sessions may ask, unless egress is closed.
        blocked: networks that sessions never reach.
        egress_open: whether they reach anything beyond the machine.
        callers: addresses of other machines that may open connections to sessions: a Hub elsewhere.
    """

    installation: str
    services: tuple[tuple[str, int], ...]
    allowed_ports: tuple[int, ...] = ()
    name_servers: tuple[str, ...] = ()
    blocked: tuple[str, ...] = ()
    egress_open: bool = True
    callers: tuple[str, ...] = ()

    def filled(self, version: int) -> list[str]:
        """Return the chains' rules in iptables-restore's form, with shell substitutions."""
        return [*self._input(version), *self._from(version, _reject), *self._to(version, _reject)]

    def filled_after(self, version: int) -> list[str]:
        """Return the same rules for the table ``security``, which can only drop."""
        return [*self._from(version, _drop), *self._to(version, _drop)]

    def _input(self, version: int) -> list[str]:
        """Rules for packets from sessions to this machine."""
        rules = [*_tracked(version, "ACCEPT")]
        if version == 6:
            # IPv6 needs neighbour discovery to find any address of the bridge.
            rules += [f"-p ipv6-icmp -m icmp6 --icmpv6-type {kind} -j ACCEPT" for kind in (135, 136)]
        rules += self._services(version, "ACCEPT")
        rules += [f"-p tcp -m tcp --dport {port} -j ACCEPT" for port in self.allowed_ports]
        if self.egress_open:
            rules += self._dns(version, "ACCEPT")
        return _in_chain(chains(self.installation)[0], [*rules, *_reject(version)])

    def _from(self, version: int, refuse: Refuse) -> list[str]:
        """Rules for packets from sessions through this machine. Docker's own rules decide about what returns."""
        rules = [*_tracked(version, "RETURN")]
        rules += self._services(version, "RETURN")
        if self.egress_open:
            rules += self._dns(version, "RETURN")
        # Other sessions, other containers, and their ports published here.
        for match in (f"-o {INTERFACES}+", "-o docker0", "-m conntrack --ctstate DNAT"):
            rules += refuse(version, match)
        for blocked in self.blocked:
            if ipaddress.ip_network(blocked).version == version:
                rules += refuse(version, f"-d {ipaddress.ip_network(blocked)}")
        chain = chains(self.installation)[1]
        if not self.egress_open:
            return _in_chain(chain, [*rules, *refuse(version, "")])
        # Docker's other bridges have this prefix, and so may a bridge of the machine that leads outside.
        others = _in_chain(chain, [*refuse(version, "-o br-+"), "-j RETURN"])
        return [*_in_chain(chain, rules), f"$(own_bridges {chain})", *others]

    def _to(self, version: int, refuse: Refuse) -> list[str]:
        """Rules for packets from elsewhere to sessions. The Hub on this machine does not pass here."""
        callers = [f"-s {_host_network(a)} -j RETURN" for a in self.callers if _version(a) == version]
        return _in_chain(
            chains(self.installation)[2], [*_tracked(version, "RETURN"), *callers, *refuse(version, "")]
        )

    def _dns(self, version: int, verdict: str) -> list[str]:
        return [
            f"-d {_host_network(server)} -p {protocol} -m {protocol} --dport 53 -j {verdict}"
            for server in self.name_servers
            if _version(server) == version
            for protocol in ("udp", "tcp")
        ]

    def _services(self, version: int, verdict: str) -> list[str]:
        # Every session has its own address; the kernel counts its open connections.
        mask = 32 if version == 4 else 128
        many = f"-m connlimit --connlimit-above {MOST_CONNECTIONS} --connlimit-mask {mask} --connlimit-saddr"
        return [
            f"-d {_host_network(address)} -p tcp -m tcp --dport {port} {rule}"
            for address, port in self.services
            if _version(address) == version
            for rule in (f"{many} -j DROP", f"-j {verdict}")
        ]


def chains(installation: str) -> tuple[str, ...]:
    return tuple(f"{chain}-{tag(installation)}" for chain in CHAINS)


def jumps(installation: str) -> tuple[tuple[str, str], ...]:
    interface = f"{interfaces(installation)}+"
    to_host, from_sessions, to_sessions = chains(installation)
    through = f"-o {interface} -j {to_sessions}", f"-i {interface} -j {from_sessions}"
    return (
        ("INPUT", f"-i {interface} -j {to_host}"),
        *(("FORWARD", rule) for rule in through),
        *((DOCKERS, rule) for rule in through),
    )


def _in_chain(chain: str, rules: Iterable[str]) -> list[str]:
    return [f"-A {chain} {rule}" for rule in rules]


def _tracked(version: int, verdict: str) -> list[str]:
    # RELATED only for errors: connection tracking helpers would let a session open ports.
    icmp = "icmp" if version == 4 else "ipv6-icmp"
    return [
        f"-m conntrack --ctstate ESTABLISHED -j {verdict}",
        f"-p {icmp} -m conntrack --ctstate RELATED -j {verdict}",
        # It may belong to an open connection, late or sent again; a reset would end that.
        "-m conntrack --ctstate INVALID -j DROP",
    ]


def _reject(version: int, match: str = "") -> list[str]:
    """Return rules that refuse at once, so that clients do not wait for a timeout."""
    unreachable = "icmp-port-unreachable" if version == 4 else "icmp6-port-unreachable"
    return [
        f"{match} -p tcp -j REJECT --reject-with tcp-reset".strip(),
        f"{match} -j REJECT --reject-with {unreachable}".strip(),
    ]


def _drop(_version: int, match: str) -> list[str]:
    return [f"{match} -j DROP".strip()]


def _version(address: str) -> int:
    return ipaddress.ip_address(address).version


def _host_network(address: str) -> str:
    return f"{address}/{32 if _version(address) == 4 else 128}"


def name_servers(paths: Iterable[Path] = RESOLV_CONF) -> tuple[str, ...]:
    """Return the DNS servers that containers ask: this machine's, without loopback ones."""
    lines: list[str] = []
    for path in paths:
        with contextlib.suppress(OSError):
            lines += path.read_text().splitlines()
    found: dict[str, None] = {}
    for words in (line.split() for line in lines):
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                address = ipaddress.ip_address(words[1])
                # Link-local IPv6 addresses are unreachable from containers.
                if not address.is_loopback and not (address.version == 6 and address.is_link_local):
                    found[str(address)] = None
    return tuple(found)


# --- Applying them ---


HEAD = """\
#!/bin/sh
# The firewall of fgpuspawner's installation {installation}, written by "fgpu firewall".
# Run it as root at every boot, before or after Docker starts; it may be run again at any time.
# Each rule is for the interfaces {interface}+ only, which are those of this installation's sessions.
set -eu
"""

APPLY = """
# Prints iptables-restore's lines that put a jump on top of a chain, once.
jump() { # PROGRAM TABLE CHAIN RULE
    if $1 -w 30 -t $2 -C $3 $4 2>/dev/null; then echo "-D $3 $4"; fi
    echo "-I $3 1 $4"
}
# Prints rules that let a chain pass what goes out by a bridge that is not one of Docker's, which are br- and 12 digits.
own_bridges() { # CHAIN
    for path in /sys/class/net/br-*; do
        name=${path##*/}
        if [ -e "$path" ] && ! expr "$name" : 'br-[0-9a-f]\\{12\\}$' >/dev/null; then
            echo "-A $1 -o $name -j RETURN"
        fi
    done
}
# Ends with the reason, where it is known.
refused() { # PROGRAM
    $1 -w 30 -N FGPU-TRY 2>/dev/null || true
    $1 -w 30 -A FGPU-TRY -p tcp -m connlimit --connlimit-above 1 -j DROP 2>/dev/null ||
        echo "the kernel lacks xt_connlimit (modprobe xt_connlimit), which limits a session's connections" >&2
    $1 -w 30 -F FGPU-TRY && $1 -w 30 -X FGPU-TRY
    exit 1
}
# All of a table in one transaction: there is no instant with half of it.
apply() { # PROGRAM RULES AFTER
    # The rules make it if it is not there: named below, it would lose what others have in it. All this comes before
    # iptables-restore, which holds a lock.
    $1 -w 30 -N DOCKER-USER 2>/dev/null || true
    hooked=$(
JUMPS
    )
    after=""
    if $1 -w 30 -t security -n -L FORWARD >/dev/null 2>&1; then after="*security
AFTER
$3
$(
LATER
    )
COMMIT"; fi
    $1-restore -w 30 --noflush <<END || refused $1
$after
*filter
CHAINS
$2
$hooked
COMMIT
END
}
"""

REMOVE = """
unhook() { # PROGRAM TABLE CHAIN RULE
    while $1 -w 30 -t $2 -C $3 $4 2>/dev/null; do $1 -w 30 -t $2 -D $3 $4; done
}
remove() { # PROGRAM
JUMPS
LATER
    for table in filter security; do
        for chain in CHAINS; do
            if $1 -w 30 -t $table -n -L $chain >/dev/null 2>&1; then
                $1 -w 30 -t $table -F $chain
                $1 -w 30 -t $table -X $chain
            fi
        done
    done
}
"""


def script(rules: FirewallRules) -> str:
    """Return a shell script that applies the rules; it may be run repeatedly."""
    made = [f":{chain} - [0:0]" for chain in chains(rules.installation)]
    text = _head(rules.installation) + APPLY.replace("CHAINS", "\n".join(made))
    text = text.replace("AFTER\n$3", "\n".join(made[PASSED_ON]) + "\n$3")
    text = _with_jumps(text, "jump", rules.installation)
    for version, program in FAMILIES.items():
        lines, after = "\n".join(rules.filled(version)), "\n".join(rules.filled_after(version))
        call = f'apply {program} "{lines}" "{after}"'
        text += f"\n{_where_there_is_ipv6(call) if version == 6 else call}\n"
    return text


def removal(installation: str) -> str:
    """Return a shell script that removes an installation's rules, if any."""
    text = _head(installation) + REMOVE.replace("CHAINS", " ".join(chains(installation)))
    text = _with_jumps(text, "unhook", installation)
    return text + "\nremove iptables\n" + _where_there_is_ipv6("remove ip6tables") + "\n"


def _with_jumps(text: str, call: str, installation: str) -> str:
    hooked = [f'    {call} $1 filter {chain} "{rule}"' for chain, rule in jumps(installation)]
    later = [f'    {call} $1 {AFTER} {chain} "{rule}"' for chain, rule in jumps(installation)[PASSED_ON]]
    return text.replace("JUMPS", "\n".join(hooked)).replace("LATER", "\n".join(later))


def _head(installation: str) -> str:
    return HEAD.format(installation=installation, interface=interfaces(installation))


def _where_there_is_ipv6(command: str) -> str:
    return f"if [ -e {IPV6} ]; then\n{command}\nfi"


def can_apply() -> bool:
    """Return whether this process may change the rules.

    Raises:
        FirewallFailed: iptables does not answer.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, FAMILIES.values())):
        return False
    # Root in a container usually may not.
    return _listed("iptables", "INPUT").returncode == 0


def run(text: str) -> None:
    """Run one of the scripts; raises FirewallFailed with its error output."""
    try:
        done = subprocess.run(
            ["sh", "-s"], input=text, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as e:
        raise FirewallFailed(f"the firewall's rules could not be applied: {e}") from None
    if done.returncode != 0:
        words = " ".join(done.stderr.split()) or f"status {done.returncode}"
        raise FirewallFailed(f"the firewall's rules could not be applied: {words}")


def state(installation: str) -> dict[int, list[str]]:
    """Return an installation's rules in the machine's tables, as iptables prints them.

    A jump behind other rules does not count. Rules of the table ``security`` begin with its name; without it there is
    `NO_TABLE_AFTER`.

    Raises:
        FirewallFailed: the tables cannot be read.
    """
    found: dict[int, list[str]] = {}
    for version, program in FAMILIES.items():
        if version == 6 and not Path(IPV6).exists():
            continue
        listed, after = _listed(program), _listed(program, table=AFTER)
        if listed.returncode != 0:
            raise FirewallFailed(f"the firewall's rules cannot be read: {' '.join(listed.stderr.split())}")
        own = chains(installation)
        words = [line.split() for line in after.stdout.splitlines() if line.startswith("-A ")]
        later = [f"{AFTER}: {' '.join(rule)}" for rule in words if rule[1] in own or rule[-1] in own]
        found[version] = read_state(listed.stdout, installation)
        found[version] += later if after.returncode == 0 else [NO_TABLE_AFTER]
    return found


def _listed(program: str, *chain: str, table: str = "filter") -> subprocess.CompletedProcess[str]:
    command = [program, "-w", "30", "-t", table, "-S", *chain]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise FirewallFailed(f"the firewall's rules cannot be read: {e}") from None


def read_state(listed: str, installation: str) -> list[str]:
    """Return an installation's rules in the output of ``iptables -S``; see `state`.

    Jumps in FORWARD are reduced to whether they count: Docker moves them whenever it makes a network, and packets need
    only meet the ones in DOCKER-USER first.
    """
    own, through = chains(installation), [rule for _, rule in jumps(installation)[1:3]]
    rules: list[str] = []
    before: dict[str, list[str]] = {"FORWARD": [], DOCKERS: []}
    others: set[str] = set()
    for line in listed.splitlines():
        words = line.split()
        if len(words) < 2 or words[0] != "-A":
            continue
        chain, target = words[1], words[words.index("-j") + 1] if "-j" in words[:-1] else ""
        if chain in before and chain not in others:
            before[chain].append(line.removeprefix(f"-A {chain} "))
        if chain in own or (target in own and chain not in others and chain != "FORWARD"):
            rules.append(line)
        elif not target.startswith(CHAINS) and line != DOCKERS_FIRST:
            others.add(chain)
    in_dockers = f"-j {DOCKERS}" in before["FORWARD"] and all(rule in before[DOCKERS] for rule in through)
    if in_dockers or all(rule in before["FORWARD"] for rule in through):
        rules.append(FORWARDED)
    return rules


def complete(found: dict[int, list[str]], installation: str) -> bool:
    """Return whether the jumps and filled chains are there; the chains' content is not compared."""
    wanted = [f"-A {chain} {rule}" for chain, rule in jumps(installation) if chain != "FORWARD"]
    filled = [f"-A {chain} " for chain in chains(installation)]
    later = [f"{AFTER}: -A {chain} {rule}" for chain, rule in jumps(installation)[PASSED_ON]]
    later += [f"{AFTER}: {begin}" for begin in filled[PASSED_ON]]
    return all(
        any(rule.startswith(begin) for rule in rules)
        for rules in found.values()
        for begin in [*wanted, FORWARDED, *filled, *([] if NO_TABLE_AFTER in rules else later)]
    )


class FirewallKeeper:
    """Keeps the rules in force while the Hub runs. They outlive it, as sessions do."""

    def __init__(self, rules: FirewallRules) -> None:
        self.rules = rules
        self._applied: dict[int, list[str]] = {}

    def script(self) -> str:
        return script(self.rules)

    def remove(self) -> None:
        """Remove the rules; raises FirewallFailed with its error output."""
        run(removal(self.rules.installation))

    def apply(self) -> None:
        """Apply the rules, and check that they are in force; raises FirewallFailed if they are not."""
        for left in reversed(range(APPLY_TRIES)):
            try:
                run(script(self.rules))
                self._applied = state(self.rules.installation)
            except FirewallFailed:
                # Another program changed the rules between our reading and our change.
                if not left:
                    raise
                time.sleep(APPLY_AGAIN_S)
                continue
            if complete(self._applied, self.rules.installation):
                if any(NO_TABLE_AFTER in rules for rules in self._applied.values()):
                    words = "%s: while Docker makes a network, what is closed outside is open"
                    log.warning(words, NO_TABLE_AFTER)
                return
            # Docker may be making a network at this moment and putting its rules on top.
            time.sleep(APPLY_AGAIN_S)
        raise FirewallFailed(
            "the firewall's rules were applied, and are not in force: another program's are before"
        )

    def keep(self) -> None:
        """Apply the rules again if they have changed; raises FirewallFailed if they cannot be read or applied."""
        if state(self.rules.installation) != self._applied:
            self.apply()
            log.warning("The firewall's rules had changed, and are in force again")
