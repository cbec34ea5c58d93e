"""What tests of the scheduler are made of: worlds, a store in memory, checks, and a seeded simulator.

``python -m fgpu_scheduler.testing --seed 7 --events 300`` runs one simulation again.
"""

from fgpu_scheduler.testing.checks import Checks, Standing, Violation
from fgpu_scheduler.testing.lab import Faults
from fgpu_scheduler.testing.memory import MemoryStore
from fgpu_scheduler.testing.simulator import Report, Simulation, simulate, simulate_in_file
from fgpu_scheduler.testing.world import NOW_S, World, decided, lasting, world
