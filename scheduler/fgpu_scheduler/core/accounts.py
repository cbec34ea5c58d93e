"""Accounts: groups of users with weights, as one tree (https://slurm.schedmd.com/fair_tree.html).

Below each account are its users, with a weight of 1 each, and the accounts that name it as their parent. Fair orders
compare siblings only: what each has used, divided by its weight. So an account gets its share whatever its number of
users. Users of no account share the account `DEFAULT`. Without accounts all users are siblings.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from operator import add

#: The account of users who are in no other one.
DEFAULT = "default"

#: The path of an account, with all accounts above it, and a user. A request names both.
Member = tuple[str, str]
#: A user of an account in the tree or, with "" for the user, an account itself.
_Branch = tuple[str, str]


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

    def shares(self, used: Mapping[str, Mapping[str, float]]) -> dict[str, AccountShare]:
        """Return the share and the usage of each account, by name, the accounts of each below it.

        ``used`` is by path and user.
        """
        known = {**dict.fromkeys(self.by_name), DEFAULT: None} if self.by_name else {}
        paths = {name: self.path(name) for name in known}
        parents = {name: paths[name].rpartition("/")[0] for name in known}
        of_siblings: dict[str, float] = {}
        for name in known:
            of_siblings[parents[name]] = of_siblings.get(parents[name], 0) + self.weight((name, ""))
        amounts = dict.fromkeys(known, 0.0)
        for path, users in used.items():
            for name, _ in self.line((path, ""))[1:]:
                amounts[name] += sum(users.values())
        total = sum(sum(users.values()) for users in used.values()) or 1
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

    def __init__(self, accounts: Accounts, amounts: Mapping[str, Mapping[str, float]]) -> None:
        """``amounts`` are by path and user."""
        self._accounts = accounts
        #: By path, its accounts from the innermost out; the last one is the root, "".
        self._lines: dict[str, list[str]] = {}
        #: By account, what each of its users has.
        self._users: dict[str, dict[str, float]] = {}
        #: What each account has, for its weight.
        self._has: dict[str, float] = {}
        for path, own in amounts.items():
            users = self._users.setdefault(self._line(path)[0], {})
            # A moved account has several paths.
            users.update(
                {user: users.get(user, 0) + amount for user, amount in own.items()} if users else own
            )
        below = {name: list(users.values()) for name, users in self._users.items() if users}
        for name, users in self._users.items():
            self._add_above(self._line(name), sum(users.values()))
        for name, amount in self._has.items():
            below.setdefault(self._line(name)[1], []).append(amount)
        #: By account, the factor that makes 1 of the average of its users and of the accounts below it.
        self._factors = {name: 1 / max(1.0, sum(each) / len(each)) for name, each in below.items()}

    def add(self, member: Member, amount: float) -> None:
        """Add an amount to a user and to the accounts above."""
        path, user = member
        line = self._lines.get(path) or self._line(path)
        users = self._users.setdefault(line[0], {})
        users[user] = users.get(user, 0) + amount
        self._add_above(line, amount)

    def of(self, member: Member) -> float:
        """Return the sum, over a user and the accounts above, of what each has: 1 is the average of its siblings."""
        path, user = member
        line, factors = self._lines.get(path) or self._line(path), self._factors
        found = self._users.get(line[0], {}).get(user, 0) * factors.get(line[0], 1.0)
        for name, above in pairwise(line):
            found += self._has.get(name, 0) * factors.get(above, 1.0)
        return found

    def _line(self, path: str) -> list[str]:
        line = self._lines[path] = [*(name for name, _ in self._accounts.line((path, ""))[1:]), ""]
        return line

    def _add_above(self, line: Sequence[str], amount: float) -> None:
        for name in line[:-1]:
            self._has[name] = self._has.get(name, 0) + amount / self._accounts.weight((name, ""))


def fair_ranks(
    accounts: Accounts,
    used: Mapping[Member, Sequence[float]],
    waiting: Sequence[Member],
    asked: Sequence[Sequence[float]],
) -> list[int]:
    """Return the rank of each waiting request: from the root down, the branch goes first that has least for its weight.

    ``asked`` has for each resource the amounts of all requests, and the largest resource counts. Each request adds its
    own to its user and accounts, so the next one of the same account ranks behind. ``waiting`` is in the order of
    positions; equal ranks go by position.
    """
    sums: dict[_Branch, Sequence[float]] = {}
    for member, amounts in used.items():
        for branch in accounts.line(member):
            sums[branch] = list(map(add, sums[branch], amounts)) if branch in sums else amounts
    own: dict[Member, list[int]] = {}
    for n, member in enumerate(waiting):
        if member in own:
            own[member].append(n)
        else:
            own[member] = [n]
    #: For each level of the tree, the numbers of the requests below each of its branches.
    levels: list[dict[_Branch, list[int]]] = []
    for member, numbers in own.items():
        for depth, branch in enumerate(reversed(accounts.line(member))):
            levels += [{} for _ in range(depth + 1 - len(levels))]
            levels[depth].setdefault(branch, []).extend(numbers)
    ranks = [0] * len(waiting)
    for level in reversed(levels):
        for branch, numbers in level.items():
            # The order of the level below, which has ranked them.
            numbers.sort()
            numbers.sort(key=ranks.__getitem__)
            totals = [
                accumulate(map(column.__getitem__, numbers), initial=start)
                for column, start in zip(asked, sums.get(branch) or [0] * len(asked), strict=True)
            ]
            most = map(max, *totals) if len(totals) > 1 else totals[0]
            weight = accounts.weight(branch)
            for n, amount in zip(numbers, most, strict=False):
                # Rounded, because the order of the additions changes the last digits.
                ranks[n] = int(amount / weight + 0.5)
    return ranks
