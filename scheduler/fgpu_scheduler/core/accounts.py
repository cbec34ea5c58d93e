"""Accounts: groups of users with weights, as one tree (https://slurm.schedmd.com/fair_tree.html).

Below each account are its users, with a weight of 1 each, and the accounts that name it as their parent. Fair orders
compare siblings only: what each has used, divided by its weight. So an account gets its share whatever its number of
users. Users of no account share the account `DEFAULT`. Without accounts all users are siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import add

#: The account of users who are in no other one.
DEFAULT = "default"

#: The path of an account, with all accounts above it, and a user. A request names both.
Member = tuple[str, str]
#: A user of an account in the tree or, with "" for the user, an account itself. The root is ("", "").
_Branch = tuple[str, str]
_ROOT: _Branch = ("", "")


def account_names(path: str) -> list[str]:
    """Return the accounts of a path, the outermost first: "science/physics" is physics, in science."""
    return path.split("/") if path else []


@dataclass(frozen=True, slots=True)
class Account:
    """An account: its share beside its siblings, the account above it, and the Hub groups whose members use it."""

    weight: float = 1
    parent: str | None = None
    groups: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AccountShare:
    """What an account should get of all there is and what it has used of all that was used, in percent."""

    path: str
    share_percent: int
    used_percent: int

    @property
    def words(self) -> str:
        """The sentence for a user of the account."""
        name = account_names(self.path)[-1]
        return (
            f"account {name} has used {self.used_percent} % of late, and its share is {self.share_percent} %"
        )


@dataclass(frozen=True, slots=True)
class Accounts:
    """The tree: accounts by name, in the order in which a user of several gets the first. Empty: there are none."""

    by_name: Mapping[str, Account] = field(default_factory=dict)

    def paths_for(self, hub_groups: Collection[str]) -> tuple[str, ...]:
        """Return the paths of the accounts of a member of these Hub groups, the usual one first."""
        own = [n for n, account in self.by_name.items() if not set(account.groups).isdisjoint(hub_groups)]
        return tuple(self.path(name) for name in own or ([DEFAULT] if self.by_name else []))

    def path(self, name: str) -> str:
        """Return the path of an account."""
        parent = self.by_name[name].parent if name in self.by_name else None
        return name if parent is None else f"{self.path(parent)}/{name}"

    def line(self, member: Member) -> tuple[_Branch, ...]:
        """Return a user's branch and those above it, without the root.

        The name of the account counts, not its earlier path: so a moved account keeps what it has used.
        """
        path, user = member
        if not self.by_name:
            return (("", user),)
        name = self.name(path)
        above = reversed(account_names(self.path(name)))
        return ((name, user), *((account, "") for account in above))

    def name(self, path: str) -> str:
        """Return the name of the account that a path leads to; `DEFAULT` if there is no such account."""
        name = path.rpartition("/")[2]
        return name if name in self.by_name else DEFAULT

    def weight(self, branch: _Branch) -> float:
        """Return the weight of a branch beside its siblings."""
        name, user = branch
        return 1 if user or name not in self.by_name else self.by_name[name].weight

    def shares(self, used: Mapping[Member, float]) -> dict[str, AccountShare]:
        """Return the share and the usage of each account, by name, the accounts of each below it."""
        known = {**dict.fromkeys(self.by_name), DEFAULT: None} if self.by_name else {}
        paths = {name: self.path(name) for name in known}
        parents = {name: paths[name].rpartition("/")[0] for name in known}
        of_siblings: dict[str, float] = {}
        for name in known:
            of_siblings[parents[name]] = of_siblings.get(parents[name], 0) + self.weight((name, ""))
        amounts = dict.fromkeys(known, 0.0)
        for member, amount in used.items():
            for name, _ in self.line(member)[1:]:
                amounts[name] += amount
        total = sum(used.values()) or 1
        part: dict[str, float] = {"": 1}
        found = {}
        for name in sorted(known, key=lambda name: account_names(paths[name])):
            above = part[parents[name].rpartition("/")[2]]
            part[name] = above * self.weight((name, "")) / of_siblings[parents[name]]
            used_percent = round(100 * amounts[name] / total)
            found[name] = AccountShare(paths[name], round(100 * part[name]), used_percent)
        return found


class Standings:
    """What each user and account has beside the average of its siblings, while more is added."""

    def __init__(self, accounts: Accounts, amounts: Mapping[Member, float]) -> None:
        self._accounts = accounts
        #: For each branch what it has, for its weight, and the factor that makes it 1 for the average of its siblings.
        self._branches: dict[_Branch, list[float]] = {}
        self._lines: dict[Member, list[tuple[list[float], float]]] = {}
        self._factors: dict[_Branch, float] = {}
        siblings: dict[_Branch, dict[_Branch, None]] = {}
        for member, amount in amounts.items():
            self.add(member, amount)
            for parent, branch in _pairs(accounts.line(member)):
                siblings.setdefault(parent, {})[branch] = None
        for parent, own in siblings.items():
            factor = 1 / max(1.0, sum(self._branches[branch][0] for branch in own) / len(own))
            self._factors[parent] = factor
            for branch in own:
                self._branches[branch][1] = factor

    def add(self, member: Member, amount: float) -> None:
        """Add an amount to a user and to the accounts above."""
        for branch, weight in self._lines.get(member) or self._line(member):
            branch[0] += amount / weight

    def of(self, member: Member) -> float:
        """Return the sum, over a user and the accounts above, of what each has: 1 is the average of its siblings."""
        found = 0.0
        for branch, _ in self._lines.get(member) or self._line(member):
            found += branch[0] * branch[1]
        return found

    def _line(self, member: Member) -> list[tuple[list[float], float]]:
        line = self._lines[member] = []
        for parent, branch in _pairs(self._accounts.line(member)):
            factor = self._factors.get(parent, 1.0)
            line.append((self._branches.setdefault(branch, [0.0, factor]), self._accounts.weight(branch)))
        return line


def _pairs(line: Sequence[_Branch]) -> Iterator[tuple[_Branch, _Branch]]:
    """Yield each branch of a line after its parent."""
    return zip((*line[1:], _ROOT), line, strict=True)


def fair_ranks(
    accounts: Accounts,
    used: Mapping[Member, Sequence[float]],
    waiting: Sequence[Member],
    asked: Sequence[Sequence[float]],
) -> list[int]:
    """Return the rank of each waiting request: from the root down, the branch goes first that has least for its weight.

    ``asked`` has for each resource the amounts of all requests, and the largest resource counts. Each request adds its
    own to its user and accounts, so the next one of the same account ranks behind. ``waiting`` is in the order of
    positions, which decides between equals.
    """
    if not waiting:
        return []
    sums: dict[_Branch, list[float]] = {}
    for member, amounts in used.items():
        for branch in accounts.line(member):
            sums[branch] = list(map(add, sums[branch], amounts)) if branch in sums else list(amounts)
    own: dict[Member, list[int]] = {}
    for n, member in enumerate(waiting):
        if member in own:
            own[member].append(n)
        else:
            own[member] = [n]
    children: dict[_Branch, dict[_Branch, list[int]]] = {}
    for member, numbers in own.items():
        leaf, *above = (line := accounts.line(member))
        for parent, branch in _pairs(line):
            children.setdefault(parent, {}).setdefault(branch, [])
        # An account has several names after a move.
        children[above[0] if above else _ROOT][leaf] += numbers

    def in_order(parent: _Branch) -> list[int]:
        found: list[tuple[int, int]] = []
        for branch, numbers in children[parent].items():
            numbers = sorted(numbers) or in_order(branch)
            has = sums.get(branch) or [0] * len(asked)
            totals = [
                accumulate(map(column.__getitem__, numbers), initial=start)
                for column, start in zip(asked, has, strict=True)
            ]
            weight = accounts.weight(branch)
            most = map(max, *totals) if len(totals) > 1 else totals[0]
            # Rounded, because the order of the additions changes the last digits.
            found += [(int(amount / weight + 0.5), n) for amount, n in zip(most, numbers, strict=False)]
        return [n for _, n in sorted(found)]

    ranks = [0] * len(waiting)
    for rank, n in enumerate(in_order(_ROOT)):
        ranks[n] = rank
    return ranks
