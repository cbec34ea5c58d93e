"""The administrator's settings of the launch form."""

from __future__ import annotations

from collections.abc import Sequence

from traitlets import Dict, HasTraits, List

from fgpuspawner.presets import check_presets


class FormSettings(HasTraits):
    """Part of `FGPU`: what the launch form offers beside its fields."""

    presets = List(
        Dict(),
        help="""What users choose with one click in the launch form, in the order in which it is shown.

        Each is a dict with ``name`` and some of the form's options: ``image``, ``group``, ``fgpu`` (or
        ``gpu_memory_mib`` and ``compute_percent``), ``gpu_model``, ``cpu``, ``memory_mib``, ``count`` and
        ``time_limit``. What is left out stays as it is in the form; but with ``image`` or ``group`` go the
        fGPU, CPU and memory that are preselected with it. Nobody is shown one that they may not start.

        Example::

            c.FGPU.presets = [
                {"name": "Exercise", "image": "python", "fgpu": "0.2", "cpu": 1, "memory_mib": 2048},
                {"name": "Training", "fgpu": 1, "cpu": 4, "memory_mib": 16384, "time_limit": "8:00"},
            ]
        """,
    ).tag(config=True)

    def _check_form(self, groups: Sequence[str]) -> None:
        check_presets(self.presets, groups)
