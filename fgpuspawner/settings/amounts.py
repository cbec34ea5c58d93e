"""The unit, and how much one request may ask for and asks for where it does not say."""

from __future__ import annotations

import fnmatch

from traitlets import Dict, Enum, Float, Integer, Unicode, Union

from fgpu_scheduler import (
    MAX_SHARES,
    MIN_MEMORY_MIB,
    MIN_TIME_LIMIT_S,
    BadSettings,
    Caps,
    FoundDevice,
    format_milli,
)
from fgpuspawner.settings.traits import LARGEST_MIB, AmountTrait, Settings, Whole, milli
from fgpuspawner.text.fields import LONGEST_TIME_LIMIT_S

RESERVE_MIB = 512
RESERVE_PART = 32


class AmountSettings(Settings):
    """The unit fGPU, the limits on one request, and what is preselected."""

    fgpu_per_gpu = Union([Integer(), Float(), Unicode(), Dict()], default_value=2).tag(
        example='{"*A100*": 10, "*": 2}',
        remedy="it must be a number such as 2, or a dict with one for each model",
    )
    """Unit: how many fGPU one GPU is worth. With 5, 1 fGPU is 0.2 GPU.

    May differ between models: a dict from a pattern of the model's name to a number, with "*" for the rest.
    """
    max_shares_per_gpu = Integer(MAX_SHARES, min=1, max=100).tag(example="8")
    """Sessions that may share one GPU at most, 1 to 100; 1: no GPU is shared.

    Each needs a CUDA context of its own, some hundred MiB on today's GPUs. If more run when you lower it, they go on.
    """
    gpu_reserve_mib = Union([Enum(["auto"]), Whole(min=0, max=LARGEST_MIB)], default_value="auto").tag(
        example="1024", remedy='use "auto" or MiB such as 1024'
    )
    """GPU memory of each GPU, in MiB, that no session gets, so that the shares do not add up to all of it.

    The driver takes memory before libfgpu can count it: the code of kernels, and rounding. "auto" is 512 MiB, twice the
    default of ``watchdog_tolerance_mib``, but at most 1/32 of the GPU. There is no reserve on MIG instances, on GPUs with
    a memory that you or a cluster declare, and where ``max_shares_per_gpu`` is 1.
    """
    fgpu_step = AmountTrait("0.1").tag(example='"0.25"')
    """Step in which users choose fGPU, in the form and through the API."""
    max_fgpu = AmountTrait("").tag(example="2")
    """Most fGPU in one session; empty: as many as a machine has."""
    max_cpu = AmountTrait("").tag(example="8")
    """Most CPU cores in one session; empty: the machine's."""
    max_memory_mib = Whole(0, min=MIN_MEMORY_MIB, max=LARGEST_MIB).tag(example="32768")
    """Most memory of one session in MiB; 0: the machine's."""
    max_sessions = Integer(8, min=1).tag(example="4")
    """Most sessions that one request starts."""
    max_pending_per_user = Integer(16, min=1).tag(example="5")
    """Most waiting requests of one user."""
    max_time_limit_s = Whole(0, min=MIN_TIME_LIMIT_S, max=LONGEST_TIME_LIMIT_S).tag(example="24 * 3600")
    """Longest time limit of a session, in seconds, and that of requests without one; 0: none."""
    shared_memory_percent = Integer(50, min=0, max=100).tag(example="25")
    """Size of ``/dev/shm`` in containers and pods, as a percentage of the session's memory; 0: the engine's 64 MiB.

    What is in it counts as the session's memory. PyTorch's data loaders end with "Bus error" where it is too small.
    """
    default_fgpu = AmountTrait("").tag(example='"0.5"')
    """fGPU preselected in the form; empty: half a GPU, rounded down to the step."""
    default_cpu = AmountTrait("").tag(example="2")
    """CPU cores preselected; empty: the same part of the machine as the GPU."""
    default_memory_mib = Whole(0, min=MIN_MEMORY_MIB, max=LARGEST_MIB).tag(example="4096")
    """Memory in MiB preselected; 0: the same part of the machine as the GPU."""
    default_time_limit_s = Whole(0, min=MIN_TIME_LIMIT_S, max=LONGEST_TIME_LIMIT_S).tag(example="4 * 3600")
    """Time limit of requests that give none, in seconds; 0: the longest."""

    def sessions_memory_mib(self, device: FoundDevice) -> int:
        """Return what sessions may have together of a GPU that the driver reports."""
        if device.simulated or device.uuid.startswith("MIG-") or self.max_shares_per_gpu == 1:
            return device.memory_mib
        derived = min(RESERVE_MIB, device.memory_mib // RESERVE_PART)
        reserve = derived if self.gpu_reserve_mib == "auto" else int(self.gpu_reserve_mib)
        return max(MIN_MEMORY_MIB, device.memory_mib - reserve)

    def caps(self) -> Caps:
        """Return the limits on one request."""
        return Caps(
            fgpu_step_milli=milli(self.fgpu_step, "fgpu_step"),
            max_fgpu_milli=self.milli("max_fgpu"),
            max_cpu_milli=self.milli("max_cpu"),
            max_memory_mib=self.max_memory_mib or None,
            max_count=self.max_sessions,
            max_pending_per_user=self.max_pending_per_user,
        )

    def milli(self, name: str) -> int | None:
        """Return an amount such as ``default_fgpu`` in thousandths, or None where it is left open."""
        value = getattr(self, name)
        return None if value == "" else milli(value, name)

    def capacity_milli(self, model: str) -> int:
        """Return what one GPU of this model is worth in milli-fGPU: the first pattern that matches."""
        for pattern, worth_milli in self._units():
            if fnmatch.fnmatchcase(model, pattern):
                return worth_milli
        raise BadSettings(f'c.FGPU.fgpu_per_gpu has no pattern for {model!r}; add "*"')

    def gives_whole_gpus_only(self) -> bool:
        """Return whether users can choose no part of a GPU."""
        step_milli = self.caps().fgpu_step_milli
        return all(worth_milli == step_milli for _, worth_milli in self._units())

    def _units(self) -> list[tuple[str, int]]:
        given = self.fgpu_per_gpu if isinstance(self.fgpu_per_gpu, dict) else {"*": self.fgpu_per_gpu}
        return [(pattern, milli(value, "fgpu_per_gpu")) for pattern, value in given.items()]

    def _check_amounts(self) -> None:
        caps = self.caps()
        step = format_milli(caps.fgpu_step_milli)
        for pattern, worth_milli in self._units():
            where = "c.FGPU.fgpu_per_gpu" if pattern == "*" else f"c.FGPU.fgpu_per_gpu[{pattern!r}]"
            worth = format_milli(worth_milli)
            if worth_milli == 0:
                raise BadSettings(f"{where} is 0; one GPU must be worth more than 0 fGPU, such as 2")
            if caps.fgpu_step_milli > worth_milli:
                raise BadSettings(
                    f"c.FGPU.fgpu_step is {step}, above one whole GPU ({where} is {worth}); use a step of at most {worth}"
                )
            if worth_milli % caps.fgpu_step_milli:
                # The largest smaller step that divides a GPU's worth.
                near = next(n for n in range(caps.fgpu_step_milli, 0, -1) if worth_milli % n == 0)
                raise BadSettings(
                    f"c.FGPU.fgpu_step is {step}, and no number of steps is one whole GPU ({where} is {worth}); "
                    f"use a step that divides {worth}, such as {format_milli(near)}"
                )
        if caps.max_fgpu_milli is not None and caps.max_fgpu_milli < caps.fgpu_step_milli:
            raise BadSettings(
                f"c.FGPU.max_fgpu is {format_milli(caps.max_fgpu_milli)}, below one step of {step}; no request would be "
                "possible"
            )
        for what in ("fgpu", "cpu", "memory_mib", "time_limit_s"):
            names = f"default_{what}", f"max_{what}"
            if what in ("fgpu", "cpu"):
                usual, most = (self.milli(name) or 0 for name in names)
            else:
                usual, most = (getattr(self, name) for name in names)
            if 0 < most < usual:
                said, bound = (getattr(self, name) for name in names)
                raise BadSettings(
                    f"c.FGPU.{names[0]} is {said}, above c.FGPU.{names[1]} of {bound}; make it at most that"
                )
