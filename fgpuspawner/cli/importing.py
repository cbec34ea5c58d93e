"""The command ``fgpu import``: what other systems say of limits and profiles, as settings of ours.

A file is read as data, and never run. What was found goes into lines for a configuration; what has no counterpart, or
only nearly, is a list of its own, so that nothing is lost without a word.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from fgpu_scheduler import BadAmount, format_milli, parse_milli
from fgpuspawner.cli.command import JsonReport, add_command, add_commands
from fgpuspawner.cli.csv_rows import BadFile
from fgpuspawner.cli.usage import UsageError
from fgpuspawner.service.csv_file import csv_text
from fgpuspawner.text.tables import printable

Spec = dict[str, Any]

MOST_BYTES = 16 * 2**20
MIB = 2**20
SIZES = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40, "p": 2**50}
QUOTA_COLUMNS = (
    "user",
    "hub_group",
    "resource_group",
    "max_fgpu",
    "max_sessions",
    "max_pending",
    "max_lifetime_s",
)
DUMP = (
    "python -c 'import json; from traitlets.config.loader import PyFileConfigLoader as L; "
    'print(json.dumps(L("jupyterhub_config.py").load_config().KubeSpawner.profile_list, default=str))\' > profiles.json'
)
"""What writes the profiles of a program, by whom it belongs to."""


@dataclass
class Translated:
    """What came of a file: settings of ours, rows for files of ours, and what could not be said."""

    quotas: list[Spec] = field(default_factory=list)
    presets: list[Spec] = field(default_factory=list)
    reclaim: Spec = field(default_factory=dict)
    images: dict[str, str] = field(default_factory=dict)
    """Of each image its slug."""
    members: list[tuple[str, str]] = field(default_factory=list)
    left_out: dict[tuple[str, str], list[str]] = field(default_factory=dict)
    """What was not translated and why, each with the places where it stands."""

    def leave(self, what: str, why: str, where: str = "") -> None:
        """Note what has no counterpart."""
        places = self.left_out.setdefault((what, why), [])
        if where and where not in places:
            places.append(where)

    def left_lines(self) -> list[str]:
        """Return what was not translated, a line each."""
        lines = []
        for (what, why), places in self.left_out.items():
            shown = ", ".join(map(repr, places[:5])) + (
                f" and {len(places) - 5} more" if len(places) > 5 else ""
            )
            lines.append(printable(f"{what}{f' (of {shown})' if places else ''}: {why}"))
        return lines


def add_to(commands: Any) -> None:
    what = "quotas and presets from Backend.AI or KubeSpawner"
    about = "Translate what another system says of limits and profiles into settings. Nothing is changed."
    own = add_commands(commands, "import", what, about, metavar="SYSTEM")
    backend = add_command(
        own,
        run_backend_ai,
        "backend-ai",
        "resource policies and presets of Backend.AI",
        "Translate Backend.AI's resource policies, projects and presets, in the JSON form of its fixtures (as "
        "`mgr fixture` reads them) or as YAML, into quotas and presets.",
    )
    kube = add_command(
        own,
        run_kubespawner,
        "kubespawner",
        "profile_list of KubeSpawner, or values of Zero to JupyterHub",
        "Translate the profiles of Zero to JupyterHub's values, or a list of profiles as YAML or JSON, into presets. "
        "A jupyterhub_config.py is a program and is not run: docs/coming-from.md has the line that writes its list.",
    )
    for one in (backend, kube):
        one.add_argument("file", metavar="FILE", help="what to read, as JSON or YAML")
        one.add_argument(
            "--fgpu-per-gpu", metavar="NUMBER", default="2", help="how many fGPU one whole GPU is; default: 2"
        )
    what = "how many fGPU one of its cuda.shares is; default: as --fgpu-per-gpu"
    backend.add_argument("--fgpu-per-share", metavar="NUMBER", help=what)
    backend.add_argument("--quotas", metavar="FILE.csv", help="also write a new file for fgpu quota import")
    backend.add_argument(
        "--members", metavar="FILE.csv", help="also write a new file for fgpu members import"
    )


def run_backend_ai(given: argparse.Namespace) -> list[str]:
    """Return the settings that Backend.AI's policies mean."""
    from fgpuspawner.cli import import_backend_ai

    per_gpu = _milli("--fgpu-per-gpu", given.fgpu_per_gpu)
    per_share = per_gpu if given.fgpu_per_share is None else _milli("--fgpu-per-share", given.fgpu_per_share)
    return _run(given, lambda data: import_backend_ai.translated(data, per_gpu, per_share))


def run_kubespawner(given: argparse.Namespace) -> list[str]:
    """Return the settings that KubeSpawner's profiles mean."""
    from fgpuspawner.cli import import_kubespawner

    if given.file.endswith(".py"):
        raise UsageError(
            f"{given.file} is a program, which is not run here. Write its profiles first: {DUMP}"
        )
    per_gpu = _milli("--fgpu-per-gpu", given.fgpu_per_gpu)
    return _run(given, lambda data: import_kubespawner.translated(data, per_gpu))


def _run(given: argparse.Namespace, translate: Callable[[Any], Translated]) -> list[str]:
    found = translate(read_data(given.file))
    if not (found.quotas or found.presets or found.left_out or found.members):
        raise BadFile(
            f"{given.file}: there is nothing in it that {given.what} has; docs/coming-from.md says what is read"
        )
    wrote = []
    for option, heading, rows in (
        ("quotas", QUOTA_COLUMNS, [[quota.get(name) for name in QUOTA_COLUMNS] for quota in found.quotas]),
        ("members", ("hub_group", "user"), found.members),
    ):
        path = getattr(given, option, None)
        if path is not None:
            with Path(path).open("x", encoding="utf-8", newline="") as file:
                file.write(csv_text(heading, rows))
            wrote.append(
                f"# {len(rows)} lines are in {path}; fgpu {option.replace('quotas', 'quota')} import reads them."
            )
    if given.json:
        return JsonReport(
            {
                "version": 1,
                "quotas": found.quotas,
                "presets": found.presets,
                "reclaim": found.reclaim,
                "images": [{"slug": slug, "reference": name} for name, slug in found.images.items()],
                "members": [{"hub_group": group, "user": user} for group, user in found.members],
                "not_translated": found.left_lines(),
            }
        )
    return [*_snippet(given.file, found), *wrote]


def _snippet(path: str, found: Translated) -> list[str]:
    """Return lines for a jupyterhub_config.py."""
    lines = [f"# From {printable(Path(path).name)}, for jupyterhub_config.py. Read it before you use it."]
    # What JSON has of texts and numbers is Python, too.
    for name, specs in (("quotas", found.quotas), ("presets", found.presets)):
        if specs:
            shown = [f"    {json.dumps(spec, ensure_ascii=False)}," for spec in specs]
            lines += ["", f"c.FGPU.{name} = [", *shown, "]"]
    if found.reclaim:
        lines += ["", f"c.FGPU.reclaim = {json.dumps(found.reclaim)}"]
    if found.images:
        lines += ["", "# Add these images to the catalogue under these slugs (docs/images.md):"]
        lines += [f"#   {slug}: {printable(name)}" for name, slug in found.images.items()]
    if found.members:
        lines += [
            "",
            f"# Members of groups, {len(found.members)}: --members FILE.csv writes them for fgpu members import.",
        ]
    lines += ["", "# Not translated, or not wholly:" if found.left_out else "# All of it is translated."]
    return [*lines, *(f"#   {line}" for line in found.left_lines())]


# -- Reading ------------------------------------------------------------------------------------------


def read_data(path: str) -> Any:
    """Return what a JSON or YAML file holds.

    Raises:
        BadFile: it is neither.
    """
    import yaml

    with Path(path).open("rb") as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise BadFile(f"{path}: it has more than {MOST_BYTES // MIB} MiB")
    try:
        # Its own words are better where it says it is JSON.
        return json.loads(data) if path.endswith(".json") else yaml.safe_load(data)
    except (ValueError, yaml.YAMLError, RecursionError) as e:
        raise BadFile(f"{path}: it cannot be read as JSON or YAML: {' '.join(str(e).split())}") from None


def _milli(option: str, text: str) -> int:
    try:
        found = parse_milli(text, field=option)
    except BadAmount as e:
        raise UsageError(f"argument {e}") from None
    if found <= 0:
        raise UsageError(f"argument {option}: it must be above 0")
    return found


def number(value: object) -> Decimal | None:
    """Return a number, also of a text; None where it is none, or without limit."""
    try:
        found = Decimal(str(value).strip()) if not isinstance(value, bool) else None
    except InvalidOperation:
        return None
    return found if found is not None and found.is_finite() and found >= 0 else None


def size_mib(value: object) -> int | None:
    """Return a size in whole MiB, of bytes, or of a text such as "4g", "4Gi" or "512M"; None where it is none."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgtp]?)(?:ib?|b)?\s*", str(value).lower())
    if found is None or isinstance(value, bool):
        return None
    return int(Decimal(found[1]) * SIZES[found[2]] / MIB) or None


def fgpu_words(count: Decimal, milli_each: int) -> str:
    """Return so many of something that is worth so much, as an amount of fGPU."""
    return format_milli(int(count * milli_each))


def entries(data: Mapping[str, Any], name: str) -> list[Mapping[str, Any]]:
    """Return the objects that a file has under a name.

    Raises:
        BadFile: what is there are no objects.
    """
    found = data.get(name) or []
    if not isinstance(found, Sequence) or not all(isinstance(one, Mapping) for one in found):
        raise BadFile(f"{name} must be a list of objects")
    return list(found)
