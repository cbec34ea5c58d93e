"""What a free part of a device is worth to the fractions that users request.

Fractions share devices as pieces are cut from rolls. The dual of the cutting-stock problem prices each fraction by the
part of a device that it costs when all are packed optimally: 0.81 of a device costs nearly all of it if few requests fit
beside it, and 0.16 costs nothing if such gaps are common.
Method: Gilmore and Gomory, "A linear programming approach to the cutting-stock problem", 1961.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

#: The number of the most popular fractions that are priced.
FRACTIONS = 16
#: The part of a price that is the size of the piece: the dual alone gives several sizes the same price.
SIZE_PART = 0.05
#: The most cells into which a device is divided.
CELLS = 1000
#: Bound of the pivots; some tens are usual.
ROUNDS = 400


def residual_values(demand: Mapping[int, int], *, capacity_milli: int) -> list[int]:
    """Return the worth of each free amount of a device from 0 to ``capacity_milli``, in the same milli.

    ``demand`` counts the requests for each amount; amounts of a whole device or more are left out. A whole device is
    worth its size, and a larger part is never worth less than a smaller one. A part can be worth more than its size:
    0.81 that only a fraction of 0.81 can use is worth the device that it saves.
    """
    popular = sorted(demand, key=lambda amount: (-demand[amount], amount))
    sizes = sorted(a for a in popular[:FRACTIONS] if 0 < a < capacity_milli and demand[a] > 0)
    cell = max(gcd(capacity_milli, *sizes), -(-capacity_milli // CELLS))
    cells = capacity_milli // cell
    # A fraction takes its last, partly filled cell whole; a free amount has only its full cells.
    lengths = [min(-(-size // cell), cells) for size in sizes]
    duals = _prices(lengths, [demand[size] for size in sizes], cells)
    prices = [
        (1 - SIZE_PART) * dual + SIZE_PART * length / cells
        for dual, length in zip(duals, lengths, strict=True)
    ]
    worth, _ = _best_cut(prices, lengths, cells)
    whole = worth[cells] or 1.0
    # All amounts of a cell are worth the same, and round fractions make few cells.
    values = [int(capacity_milli * of_cell / whole) for of_cell in worth for _ in range(cell)]
    return [*values[:capacity_milli], capacity_milli]


def _best_cut(prices: list[float], lengths: list[int], cells: int) -> tuple[list[float], list[int]]:
    """Return for each number of cells the highest sum of prices cut from it, and the first piece of that."""
    worth, first = [0.0] * (cells + 1), [-1] * (cells + 1)
    pieces = [(i, length, price) for i, (length, price) in enumerate(zip(lengths, prices, strict=True))]
    for free in range(1, cells + 1):
        highest, piece = worth[free - 1], -1
        for i, length, price in pieces:
            if length <= free and worth[free - length] + price > highest + 1e-12:
                highest, piece = worth[free - length] + price, i
        worth[free], first[free] = highest, piece
    return worth, first


def _prices(lengths: list[int], demand: list[int], cells: int) -> list[float]:
    """Return each piece's price: the dual of covering ``demand`` with the fewest cuts of one roll.

    Column generation on the inverse of the basis. Only sums, products and quotients: the same everywhere.
    """
    n = len(lengths)
    inverse = [[1.0 / (cells // lengths[i]) if i == j else 0.0 for j in range(n)] for i in range(n)]
    amounts = [demand[i] * inverse[i][i] for i in range(n)]
    prices = [inverse[i][i] for i in range(n)]
    for _ in range(ROUNDS):
        prices = [max(0.0, sum(row[j] for row in inverse)) for j in range(n)]
        worth, first = _best_cut(prices, lengths, cells)
        if worth[cells] <= 1 + 1e-9:
            break
        cut, free = [0] * n, cells
        while free > 0:
            piece = first[free]
            if piece < 0:
                free -= 1
            else:
                cut[piece] += 1
                free -= lengths[piece]
        column = [sum(a * b for a, b in zip(row, cut, strict=True)) for row in inverse]
        ratios = [(amounts[i] / column[i], i) for i in range(n) if column[i] > 1e-9]
        if not ratios:
            break
        ratio, out = min(ratios)
        inverse[out] = [a / column[out] for a in inverse[out]]
        for i in range(n):
            if i != out and column[i]:
                inverse[i] = [a - column[i] * b for a, b in zip(inverse[i], inverse[out], strict=True)]
                amounts[i] -= column[i] * ratio
        amounts[out] = ratio
    # Where the rounds ran out, the prices of the last round are too high by a common factor.
    highest = _best_cut(prices, lengths, cells)[0][cells] if n else 1.0
    return [price / max(highest, 1e-12) for price in prices]
