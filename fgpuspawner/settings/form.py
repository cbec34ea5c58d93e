"""What the launch form offers beside its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from traitlets import Dict, List

from fgpu_scheduler import BadSettings
from fgpuspawner.settings.traits import Settings
from fgpuspawner.text.fields import PRESET_FIELDS, Given, short

NAME_MAX_LENGTH = 60


class FormSettings(Settings):
    """Presets: launch options that have a name."""

    presets = List(Dict())
    """One-click choices in the launch form, in this order.

    Each is a dict with ``name`` and some of the form's options: ``image``, ``group``, ``fgpu`` (or
    ``gpu_memory_mib`` and ``compute_percent``), ``gpu_models`` (in order of preference), ``cpu``,
    ``memory_mib``, ``count``, ``folders`` and ``time_limit``. Other fields of the form stay as they are, except that
    ``image`` and ``group`` bring the fGPU, CPU and memory preselected with them. Users see only the presets
    that they may start.

    Example::

        c.FGPU.presets = [
            {"name": "Exercise", "image": "python", "fgpu": "0.2", "cpu": 1, "memory_mib": 2048},
            {"name": "Training", "fgpu": 1, "cpu": 4, "memory_mib": 16384, "time_limit": "8:00"},
        ]
    """

    def _check_form(self, groups: Sequence[str], folders: Sequence[str]) -> None:
        """Check the presets without the images and the GPUs, which are not known yet."""
        names: list[str] = []
        for at, preset in enumerate(self.presets):
            name = preset.get("name")
            if not isinstance(name, str) or not name.strip() or len(name) > NAME_MAX_LENGTH:
                raise BadSettings(
                    f"c.FGPU.presets[{at}]: name is {short(name)}; it must be a text of 1 to {NAME_MAX_LENGTH} letters"
                )
            where = f"c.FGPU.presets: {name!r}"
            if name in names:
                raise BadSettings(f"{where} is there twice; give each another name")
            names.append(name)
            for key in preset:
                if key not in ("name", *PRESET_FIELDS):
                    raise BadSettings(f"{where} has {key!r}; use name and {', '.join(PRESET_FIELDS)}")
            if len(preset) == 1:
                raise BadSettings(f"{where} chooses nothing; add some of {', '.join(PRESET_FIELDS)}")
            wrong = _wrong_values(preset, groups, folders)
            if wrong:
                raise BadSettings(f"{where}: {wrong[0]}")


def _wrong_values(preset: Mapping[str, object], groups: Sequence[str], folders: Sequence[str]) -> list[str]:
    given = Given(preset)
    for name in ("fgpu", "cpu", "gpu_memory_mib", "compute_percent", "memory_mib", "count"):
        if (given.amount(name, 1) if name in ("fgpu", "cpu") else given.maybe_whole(name)) == 0:
            given.refuse(name, "too_small", "must be above 0")
    given.time_limit(None, None)
    if "group" in preset:
        given.choice("group", groups, groups[0])
    if "gpu_models" in preset:
        given.models()
    given.folders(folders)
    for name in ("image", "gpu_model"):
        if name in preset and (not isinstance(preset[name], str) or not preset[name]):
            given.refuse(name, "not_a_text", f"{short(preset[name])} is not a text")
    if "gpu_memory_mib" in preset and "fgpu" in preset:
        given.refuse("gpu_memory_mib", "two_ways", "give this or fgpu, not both")
    if "compute_percent" in preset and "gpu_memory_mib" not in preset:
        given.refuse("compute_percent", "compute_alone", "give gpu_memory_mib, too")
    return [refusal.message for refusal in given.refusals]
