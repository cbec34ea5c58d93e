"""What did not fit in one pass, and what therefore cannot fit either: nothing is given back before the pass ends."""

from __future__ import annotations

from collections.abc import Iterable

from fgpu_scheduler.core.units import share_memory_mib

Amounts = tuple[int, int, int, int | None, int | None, tuple[str, ...]]
"""fGPU x 1000, CPU x 1000, memory in MiB, explicit GPU memory in MiB and compute in percent, GPU models."""


class Misfits:
    """Shapes that did not fit. Whoever asks for a fraction in vain rules out all who ask for at least as much of
    everything.

    That holds for amounts that any of the devices could hold by itself with some memory: on none of them is there so
    much left, and what is larger, whole devices too, would need one of them.
    """

    __slots__ = ("_devices", "_least", "_rules_out", "found")

    def __init__(self, devices: Iterable[tuple[int, int]]) -> None:
        """Take the fGPU x 1000 and the memory in MiB of every kind of device there is."""
        self._devices = frozenset(devices)
        self._rules_out: dict[int, bool] = {}
        self.found: dict[Amounts, None] = {}
        """Those that did not fit."""
        self._least: list[Amounts] = []

    def forget(self) -> None:
        """Begin anew."""
        self.found.clear()
        self._least = []

    def rule_out(self, asked: Amounts) -> bool:
        """Return whether it cannot fit, because something that asks for no more did not."""
        fgpu, cpu, memory, gpu_memory, compute, models = asked
        if gpu_memory is not None or compute is not None:
            return False
        # Not any(): a generator costs more than what it would look at, and this is asked of everybody in every pass.
        for least in self._least:
            if fgpu >= least[0] and cpu >= least[1] and memory >= least[2] and _among(models, least[5]):
                return True
        return False

    def add(self, asked: Amounts, *, ruled_out: bool = False) -> None:
        """Note one that did not fit; it adds nothing to what is known of others where it was ruled out."""
        self.found[asked] = None
        if not ruled_out and asked[3] is None and asked[4] is None and self._any_could_hold(asked[0]):
            self._least.append(asked)

    def _any_could_hold(self, fgpu_milli: int) -> bool:
        found = self._rules_out.get(fgpu_milli)
        if found is None:
            found = self._rules_out[fgpu_milli] = fgpu_milli > 0 and all(
                fgpu_milli <= capacity
                and share_memory_mib(fgpu_milli, capacity_milli=capacity, device_memory_mib=memory) > 0
                for capacity, memory in self._devices
            )
        return found


def _among(models: tuple[str, ...], others: tuple[str, ...]) -> bool:
    """Return whether whoever may be placed on these GPU models could be on others alone; none: any model."""
    return not others or models == others or (bool(models) and set(models) <= set(others))
