"""Tools for tests of the scheduler: worlds, a store in memory, checks, and a seeded simulator.

``python -m simulator --seed 7 --events 300`` runs one simulation again.
"""

from simulator.checks import Checks, Container, Violation
from simulator.lab import Faults
from simulator.simulator import Report, Simulation, simulate, simulate_in_file
from simulator.world import NOW_S, World, decided, lasting, world

__all__ = [
    "NOW_S",
    "Checks",
    "Faults",
    "Report",
    "Simulation",
    "Container",
    "Violation",
    "World",
    "decided",
    "lasting",
    "simulate",
    "simulate_in_file",
    "world",
]
