"""The command ``fgpu images``: the catalogue, looked at and changed. Who runs it may read the Hub's configuration."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fgpu_scheduler import BadSettings
from fgpuspawner.cli import image_build, private_images
from fgpuspawner.cli.command import JsonReport, add_commands, who
from fgpuspawner.cli.image_catalogue import Opened, command, opened
from fgpuspawner.engines.base import ImageStore
from fgpuspawner.images.catalogue import CatalogueError, checked, load_catalogue, written
from fgpuspawner.images.edits import Action, Listed
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.labels import entry_from
from fgpuspawner.images.model import FoundImage, Image, state_words
from fgpuspawner.images.pinning import pinned
from fgpuspawner.images.values import shown

DONE = {
    Action.ENABLE: "may be started again",
    Action.DISABLE: "nobody may start it; running sessions go on",
    Action.HIDE: "is not shown any more; who knows its slug may start it",
    Action.SHOW: "is shown again",
    Action.DEFAULT: "is the default",
    Action.UP: "is one place further up",
    Action.DOWN: "is one place further down",
    Action.BACK: "is as the file has it",
}


def add_to(commands: Any) -> None:
    about = "Look at the image catalogue, and change it. The Hub and the service follow within seconds."
    own = add_commands(commands, "images", "the images that sessions are started from", about)
    command(
        own, run_list, "list", "the images, their state, where file and database differ, and who has them"
    )
    check = command(
        own, run_check, "check", "whether the catalogue can be used, and what of it has no effect"
    )
    check.add_argument("file", nargs="?", metavar="FILE", help="another catalogue's file, checked alone")
    scan = command(own, run_scan, "scan", "what the labels of the engines' images propose for the catalogue")
    scan.add_argument(
        "--add", nargs="*", metavar="SLUG", help="add these to the catalogue; without a slug all new ones"
    )
    export = command(own, run_export, "export", "the catalogue in force, as the file that says the same")
    export.add_argument("--output", metavar="FILE", help="write it here, where there is no file yet")
    of_one = [command(own, run_pin, "pin", "keep an image to what the engines have of it now")]
    for action, said in DONE.items():
        of_one.append(command(own, run_action, action.value, f"the image {said}", action=action))
    for one in of_one:
        one.add_argument("slug", metavar="SLUG", help="which image")
    command(own, run_file_order, "file-order", "the order is the file's again")
    for more in (private_images, image_build):
        more.add_to(own)


# --- Looking ---


def run_list(given: argparse.Namespace) -> list[str]:
    """Return every image with its state, or all of it as JSON."""
    with opened(given.config) as own, own.stores() as stores:
        found = [_listed(one, own, stores) for one in own.images.listed.listed]
        problems = own.problems()
    if given.json:
        return JsonReport({"version": 1, "images": found, "problems": problems})
    lines = []
    for one in found:
        lines.append(f"{one['slug']}: {one['name']}, {one['reference']}")
        lines.append(f"  {'; '.join([one['source'], *one['state']])}")
        lines.extend(f"  differs: {said}" for said in one["differences"])
        if one["engines"] is not None:
            lines.append(f"  on: {'; '.join(one['engines']) or 'no engine yet'}")
    return lines + [f"problem: {problem}" for problem in problems]


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
    """Return what the machines have under an image's reference, by their names."""
    return {store.name: one for store in stores if (one := store.find(image.reference)) is not None}


def run_check(given: argparse.Namespace) -> list[str]:
    """Return that a catalogue can be used; of an installation's also what of it has no effect.

    Raises:
        CatalogueError: it cannot be used, or a part of it has no effect.
    """
    if given.file is not None:
        path, images = given.file, load_catalogue(given.file).images
    else:
        with opened(given.config) as own:
            path, images = own.images.path, own.catalogue.images
            if problems := own.problems():
                raise CatalogueError("; ".join(problems))
    count = f"{len(images)} image{'' if len(images) == 1 else 's'}"
    return [f"OK: {path}: {count} ({', '.join(image.slug for image in images)})"]


def run_export(given: argparse.Namespace) -> list[str]:
    """Return the catalogue in force as a file's lines, or write the file."""
    with opened(given.config) as own:
        if own.images.problem is not None:
            raise CatalogueError(own.images.problem)
        text = written(own.catalogue)
    if given.output is None:
        return [text.rstrip("\n")]
    with Path(given.output).open("x", encoding="utf-8") as file:
        file.write(text)
    return [f"wrote {given.output}"]


# --- Changing ---


def run_action(given: argparse.Namespace) -> list[str]:
    """Do one thing with one image."""
    with opened(given.config) as own:
        own.editor().do(given.action, given.slug, by=who())
        own.images.refresh()
        image = own.catalogue.entry(given.slug)
        unfit = own.unfit(image) if image is not None and given.action is Action.ENABLE else None
    return [f"image {given.slug} {DONE[given.action]}", *([f"problem: {unfit}"] if unfit else [])]


def run_file_order(given: argparse.Namespace) -> list[str]:
    """Take the order of the file again."""
    with opened(given.config) as own:
        own.editor().file_order(by=who())
    return ["the images are in the file's order"]


def run_scan(given: argparse.Namespace) -> list[str]:
    """Return what the images on the engines propose, and add it where that is asked for."""
    with opened(given.config) as own, own.stores() as stores:
        if stores is None:
            raise BadSettings(f"{given.config}: sessions are local processes; there is no engine to look at")
        lines, new = _proposals([(store.name, found) for store in stores for found in store.labelled()], own)
        if given.add is None:
            return lines or ["no image on any engine has the label fgpu.slug"]
        for slug in given.add:
            if slug not in new:
                there = ", ".join(new) or "none"
                raise CatalogueError(f"no new image is proposed as {shown(slug)}; there are {there}")
        chosen = [new[slug] for slug in given.add or new]
        own.editor().add([entry_of(image) for image in chosen], by=who())
        return [*lines, *(f"added {image.slug}" for image in chosen)]


def _proposals(found: Sequence[tuple[str, FoundImage]], own: Opened) -> tuple[list[str], dict[str, Image]]:
    """Return what to say of each image that was found, and those that are new and can be added, by their slugs."""
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


def run_pin(given: argparse.Namespace) -> list[str]:
    """Write into an image's entry what the engines have under its reference."""
    with opened(given.config) as own, own.stores() as stores:
        if stores is None:
            raise BadSettings(f"{given.config}: sessions are local processes; there is nothing to pin")
        image = own.catalogue.entry(given.slug)
        if image is None:
            there = ", ".join(i.slug for i in own.catalogue.images)
            raise CatalogueError(f"there is no image {shown(given.slug)}; there are {there}")
        entry, said = pinned(image, _found(image, stores))
        own.editor().edit(given.slug, entry, by=who())
        return [f"image {given.slug}: {said}"]
