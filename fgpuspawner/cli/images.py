"""The command ``fgpu images``: the catalogue, looked at and changed. Who runs it may read the Hub's configuration."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import click

from fgpu_scheduler import BadSettings
from fgpuspawner import __version__
from fgpuspawner.cli import private_images
from fgpuspawner.cli.command import FILE, Group, Report, UsageError, command, config_option
from fgpuspawner.cli.csv_files import output_option, printed
from fgpuspawner.cli.image_catalogue import Opened, opened
from fgpuspawner.engines.base import ImageStore
from fgpuspawner.images.catalogue import CatalogueError, checked, load_catalogue, written
from fgpuspawner.images.edits import Action, Draft, Listed, pinned
from fgpuspawner.images.entry import entry_of, shown
from fgpuspawner.images.labels import entry_from
from fgpuspawner.images.model import FoundImage, Image, state_words
from fgpuspawner.settings.images import recipes

ACTIONS = {
    Action.ENABLE: ("Let users start an image again.", "may be started again"),
    Action.DISABLE: ("Let no user start an image.", "nobody may start it; running sessions go on"),
    Action.HIDE: (
        "Hide an image in the launch form.",
        "is not shown any more; who knows its slug may start it",
    ),
    Action.SHOW: ("Show a hidden image again.", "is shown again"),
    Action.DEFAULT: ("Make an image the default.", "is the default"),
    Action.UP: ("Move an image up by one place.", "is one place further up"),
    Action.DOWN: ("Move an image down by one place.", "is one place further down"),
    Action.BACK: ("Undo all changes to an image.", "is as the file has it"),
}
"""Each action with its help, and its result."""


@click.group(cls=Group)
def images_command() -> None:
    """Look at the image catalogue, and change it. The Hub and the service follow within seconds."""


# --- Looking ---


@images_command.command("list")
@config_option
def list_images(config: str) -> list[str]:
    """List the images, their state and their machines.

    It also says where file and database differ.
    """
    with opened(config) as own, own.stores() as stores:
        found = [_listed(one, own, stores) for one in own.images.listed.listed]
        problems = own.problems()
    lines = []
    for one in found:
        lines.append(f"{one['slug']}: {one['name']}, {one['reference']}")
        lines.append(f"  {'; '.join([one['source'], *one['state']])}")
        lines.extend(f"  differs: {said}" for said in one["differences"])
        if one["engines"] is not None:
            lines.append(f"  on: {'; '.join(one['engines']) or 'no engine yet'}")
    lines += [f"problem: {problem}" for problem in problems]
    return Report(lines, {"version": 1, "images": found, "problems": problems})


def _listed(one: Listed, own: Opened, stores: Sequence[ImageStore] | None) -> dict[str, Any]:
    image = one.image
    return {
        "slug": image.slug,
        "name": image.name,
        "reference": image.reference,
        "source": one.source.value,
        "state": state_words(image),
        "differences": [str(difference) for difference in one.differences],
        "engines": None if stores is None else [*_found(image, stores)],
        "problem": one.problem or own.unfit(image),
    }


def _found(image: Image, stores: Sequence[ImageStore]) -> dict[str, FoundImage]:
    return {store.name: one for store in stores if (one := store.find(image.reference)) is not None}


@images_command.command()
@click.argument("file", required=False, type=FILE)
@config_option
def check(file: str | None, config: str) -> list[str]:
    """Check the catalogue, or the one in FILE.

    Of the installation's own catalogue it also names what has no effect.
    """
    if file is not None:
        where, images = file, load_catalogue(file).images
    else:
        with opened(config) as own:
            where, images = str(own.images.path), own.catalogue.images
            if problems := own.problems():
                raise CatalogueError("; ".join(problems))
    count = f"{len(images)} image{'' if len(images) == 1 else 's'}"
    return [f"OK: {where}: {count} ({', '.join(image.slug for image in images)})"]


@images_command.command()
@output_option
@config_option
def export(output: str | None, config: str) -> list[str]:
    """Print the catalogue in force, as the file that says the same."""
    with opened(config) as own:
        if own.images.problem is not None:
            raise CatalogueError(own.images.problem)
        return printed(written(own.catalogue), output, f"{len(own.catalogue.images)} images")


# --- Changing ---


def _act(action: Action, slug: str, config: str) -> list[str]:
    with opened(config) as own:
        own.edit(lambda draft: draft.do(action, slug))
        own.images.refresh()
        image = own.catalogue.entry(slug)
        unfit = own.unfit(image) if image is not None and action is Action.ENABLE else None
    return [f"image {slug} {ACTIONS[action][1]}", *([f"problem: {unfit}"] if unfit else [])]


for _action, (_help, _) in ACTIONS.items():
    _one = config_option(click.argument("slug")(partial(_act, _action)))
    images_command.add_command(command(_action.value, help=_help)(_one))


@images_command.command()
@config_option
def file_order(config: str) -> list[str]:
    """Take the order of the file again."""
    with opened(config) as own:
        own.edit(Draft.file_order)
    return ["the images are in the file's order"]


@images_command.command()
@click.argument("slugs", nargs=-1, metavar="[SLUG]...")
@click.option("--add", is_flag=True, help="add these to the catalogue; without a slug all new ones")
@config_option
def scan(slugs: tuple[str, ...], add: bool, config: str) -> list[str]:
    """Propose new images by the labels that engines have."""
    if slugs and not add:
        raise UsageError(f"{slugs[0]}: name images only with --add")
    with opened(config) as own, own.stores() as stores:
        if stores is None:
            raise BadSettings(f"{config}: sessions are local processes; there is no engine to look at")
        lines, new = _proposals([(store.name, found) for store in stores for found in store.labelled()], own)
        if not add:
            return lines or ["no image on any engine has the label fgpu.slug"]
        for slug in slugs:
            if slug not in new:
                there = ", ".join(new) or "none"
                raise CatalogueError(f"no new image is proposed as {shown(slug)}; there are {there}")
        chosen = [new[slug] for slug in slugs or new]
        own.edit(lambda draft: draft.add([entry_of(image) for image in chosen]))
        return [*lines, *(f"added {image.slug}" for image in chosen)]


def _proposals(found: Sequence[tuple[str, FoundImage]], own: Opened) -> tuple[list[str], dict[str, Image]]:
    lines: list[str] = []
    new: dict[str, Image] = {}
    references = {image.reference for image in own.catalogue.images}
    for engine, one in found:
        # One image can have several names.
        reference = next((name for name in one.references if name in references), one.references[0])
        try:
            image = checked(entry_from(one.labels, reference))
        except CatalogueError as e:
            lines.append(f"{reference} on {engine}: its labels cannot be used: {e}")
            continue
        known = own.catalogue.entry(image.slug)
        if known is not None and known.reference == reference:
            said = f"{image.slug}: it is in the catalogue"
        elif known is not None:
            said = f"{image.slug}: that is {known.reference} there"
        elif image.slug in new:
            said = f"{image.slug}: proposed by another image already"
        else:
            new[image.slug] = image
            said = f"new: {image.slug}: {image.name}"
        lines.append(f"{reference} on {engine}: {said}")
    return lines, new


@images_command.command()
@click.argument("slug")
@config_option
def pin(slug: str, config: str) -> list[str]:
    """Keep an image to what the engines have of it now."""
    with opened(config) as own, own.stores() as stores:
        if stores is None:
            raise BadSettings(f"{config}: sessions are local processes; there is nothing to pin")
        image = own.catalogue.entry(slug)
        if image is None:
            there = ", ".join(i.slug for i in own.catalogue.images)
            raise CatalogueError(f"there is no image {shown(slug)}; there are {there}")
        entry, said = pinned(image, _found(image, stores))
        own.edit(lambda draft: draft.edit(slug, entry))
        return [f"image {slug}: {said}"]


@images_command.command(
    speaks_json=False,
    context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False},
)
@click.argument("name")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def build(name: str, arguments: tuple[str, ...]) -> NoReturn:
    """Build a session image, for the engine of this machine.

    NAME is a recipe, such as base or pytorch, or a folder: ./ours. The arguments are those that images/README.md lists;
    fgpu images build NAME --help shows them.
    """
    # The script finds this environment's uv and its Python with pip, which fetches the extension of this version.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    sys.stdout.flush()
    os.execvpe(
        "bash",
        ["bash", str(recipes() / "build.sh"), name, *arguments],
        {**os.environ, "PATH": path, "FGPU_VERSION": __version__},
    )


for _own in private_images.COMMANDS:
    images_command.add_command(_own)
