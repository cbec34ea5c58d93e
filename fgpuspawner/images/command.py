"""The command ``fgpu images``: the catalogue, looked at and changed. Who runs it may read the Hub's configuration."""

from __future__ import annotations

import argparse
import contextlib
import getpass
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from traitlets.config import Config

from fgpu_scheduler import BadSettings, Node
from fgpu_scheduler.store import Store
from fgpuspawner.hubfile import CONFIG, checked_like_the_hub, load_config, quiet
from fgpuspawner.images.catalogue import CatalogueError, load_catalogue
from fgpuspawner.images.editing import Action, Editor
from fgpuspawner.images.entry import entry_of
from fgpuspawner.images.labels import entry_from
from fgpuspawner.images.live import Images
from fgpuspawner.images.merging import Listed, checked
from fgpuspawner.images.model import Image
from fgpuspawner.images.needs import never_held
from fgpuspawner.images.on_engines import Found, engines_of, found_on, labelled_on, name_of
from fgpuspawner.images.pinning import pinned
from fgpuspawner.images.saying import shown
from fgpuspawner.images.states import state_words
from fgpuspawner.images.writing import written
from fgpuspawner.settings import FGPU

DONE = {
    Action.ENABLE: "may be started again",
    Action.DISABLE: "may be started by nobody; what runs goes on",
    Action.HIDE: "is not shown any more; who knows its slug may start it",
    Action.SHOW: "is shown again",
    Action.DEFAULT: "is the default",
    Action.UP: "is one place further up",
    Action.DOWN: "is one place further down",
    Action.BACK: "is as the file has it",
}


def add_to(commands: Any) -> Any:
    """Add the command to the parser of ``fgpu``; return what its own commands are added to."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "images",
        help="the images that sessions are started from",
        description="Look at the image catalogue, and change it. The Hub and the service follow within seconds.",
    )
    own = parser.add_subparsers(dest="what", metavar="WHAT", required=True, parser_class=type(parser))
    listing = command(
        own, "list", "the images, their state, where file and database differ, and who has them"
    )
    listing.add_argument("--json", action="store_true", help="print JSON")
    listing.set_defaults(run=run_list)
    check = command(own, "check", "whether the catalogue can be used, and what of it has no effect")
    check.add_argument("file", nargs="?", metavar="FILE", help="another catalogue's file, checked alone")
    check.set_defaults(run=run_check)
    scan = command(own, "scan", "what the labels of the engines' images propose for the catalogue")
    scan.add_argument(
        "--add", nargs="*", metavar="SLUG", help="add these to the catalogue; without a slug all new ones"
    )
    scan.set_defaults(run=run_scan)
    export = command(own, "export", "the catalogue in force, as the file that says the same")
    export.add_argument("--output", metavar="FILE", help="write it here, where there is no file yet")
    export.set_defaults(run=run_export)
    pin = command(own, "pin", "keep an image to what the engines have of it now")
    pin.add_argument("slug", metavar="SLUG", help="which image")
    pin.set_defaults(run=run_pin)
    for action, said in DONE.items():
        one = command(own, action.value, f"the image {said}")
        one.add_argument("slug", metavar="SLUG", help="which image")
        one.set_defaults(run=run_action, action=action)
    order = command(own, "file-order", "the order is the file's again")
    order.set_defaults(run=run_file_order)
    return own


def command(own: Any, name: str, what: str) -> argparse.ArgumentParser:
    """Add one command, which takes the Hub's configuration."""
    parser: argparse.ArgumentParser = own.add_parser(
        name, help=what, description=f"{what[0].upper()}{what[1:]}."
    )
    parser.add_argument(
        "--config", metavar="FILE", default=CONFIG, help=f"the Hub's configuration; default: {CONFIG}"
    )
    return parser


@dataclass(frozen=True)
class Opened:
    """An installation's catalogue and database, open."""

    config: Config
    settings: FGPU
    store: Store
    images: Images
    nodes: tuple[Node, ...]

    @contextlib.contextmanager
    def engines(self, path: str) -> Iterator[Any]:
        """Connect to the engines; see `engines_of`."""
        with quiet():
            _, app = checked_like_the_hub(self.config, path)
        with engines_of(
            app.spawner_class, self.config, self.settings, self.images, self.store.installation_id
        ) as engines:
            yield engines

    def editor(self) -> Editor:
        """Return what changes the catalogue.

        Raises:
            CatalogueError: the file cannot be used as it is.
        """
        if self.images.problem is not None:
            raise CatalogueError(self.images.problem)
        return Editor(self.store, self.images.file)


@contextlib.contextmanager
def opened(path: str) -> Iterator[Opened]:
    """Open what a configuration is of.

    Raises:
        FGPUError: the configuration, or the database, cannot be used.
    """
    config = load_config(path)
    settings = FGPU.from_config(config).checked()
    with contextlib.closing(Store(settings.database_url())) as store:
        store.connect()
        with quiet():
            images = Images(settings.catalogue_path(), store, must_be_good=False)
            images.refresh()
        if images.trouble is not None:
            raise BadSettings(images.trouble)
        yield Opened(config, settings, store, images, store.snapshot(0).nodes)


def who() -> str:
    """Return who runs this, for the record."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "fgpu"


# --- Looking ---


def run_list(given: argparse.Namespace) -> list[str]:
    """Return every image with its state, or all of it as JSON."""
    with opened(given.config) as own, own.engines(given.config) as engines:
        found = [_listed(one, own, engines) for one in own.images.listed.listed]
        problems = _problems(own)
    if given.json:
        return [json.dumps({"version": 1, "images": found, "problems": problems}, indent=2)]
    lines = []
    for one in found:
        lines.append(f"{one['slug']}: {one['name']}, {one['reference']}")
        lines.append(f"  {'; '.join([one['source'], *one['state']])}")
        lines.extend(f"  differs: {said}" for said in one["differences"])
        if one["engines"] is not None:
            lines.append(f"  on: {'; '.join(one['engines']) or 'no engine yet'}")
    return lines + [f"problem: {problem}" for problem in problems]


def _listed(one: Listed, own: Opened, engines: Any) -> dict[str, Any]:
    image = one.image
    there = None
    if engines is not None:
        there = [name_of(e) for e in engines.engines if found_on(e, image.reference) is not None]
    return {
        "slug": image.slug,
        "name": image.name,
        "reference": image.reference,
        "source": one.source.value,
        "state": state_words(image),
        "differences": [str(difference) for difference in one.differences],
        "engines": there,
        "problem": one.problem or never_held(image, own.nodes, own.settings.caps()),
    }


def _problems(own: Opened) -> list[str]:
    found = [own.images.problem] if own.images.problem is not None else []
    found += own.images.listed.problems
    caps = own.settings.caps()
    unfit = (
        never_held(image, own.nodes, caps) for image in own.images.listed.catalogue.images if image.enabled
    )
    return [*found, *(problem for problem in unfit if problem is not None)]


def run_check(given: argparse.Namespace) -> list[str]:
    """Return that a catalogue can be used; of an installation's also what of it has no effect.

    Raises:
        CatalogueError: it cannot be used, or a part of it has no effect.
    """
    if given.file is not None:
        catalogue = load_catalogue(given.file)
        return [f"OK: {given.file}: {_count(catalogue.images)}"]
    with opened(given.config) as own:
        problems = _problems(own)
        if problems:
            raise CatalogueError("; ".join(problems))
        return [f"OK: {own.images.path}: {_count(own.images.listed.catalogue.images)}"]


def _count(images: Sequence[Image]) -> str:
    return (
        f"{len(images)} image{'' if len(images) == 1 else 's'} ({', '.join(image.slug for image in images)})"
    )


def run_export(given: argparse.Namespace) -> list[str]:
    """Return the catalogue in force as a file's lines, or write the file."""
    with opened(given.config) as own:
        if own.images.problem is not None:
            raise CatalogueError(own.images.problem)
        text = written(own.images.listed.catalogue)
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
    return [f"image {given.slug} {DONE[given.action]}"]


def run_file_order(given: argparse.Namespace) -> list[str]:
    """Take the order of the file again."""
    with opened(given.config) as own:
        own.editor().file_order(by=who())
    return ["the images are in the file's order"]


def run_scan(given: argparse.Namespace) -> list[str]:
    """Return what the images on the engines propose, and add it where that is asked for."""
    with opened(given.config) as own, own.engines(given.config) as engines:
        if engines is None:
            raise BadSettings(f"{given.config}: sessions are local processes; there is no engine to look at")
        proposals = _proposals([(name_of(e), f) for e in engines.engines for f in labelled_on(e)], own)
        lines = [line for line, _ in proposals]
        if given.add is None:
            return lines or ["no image on any engine has the label fgpu.slug"]
        new = {image.slug: image for _, image in proposals if image is not None}
        unknown = [slug for slug in given.add if slug not in new]
        if unknown:
            there = ", ".join(new) or "none"
            raise CatalogueError(f"no new image is proposed as {shown(unknown[0])}; there are {there}")
        chosen = [new[slug] for slug in given.add or new]
        own.editor().add([entry_of(image) for image in chosen], by=who())
        return [*lines, *(f"added {image.slug}" for image in chosen)]


def _proposals(found: Sequence[tuple[str, Found]], own: Opened) -> list[tuple[str, Image | None]]:
    """Return what to say of each image that was found, with it where it is new and can be added."""
    in_force = own.images.listed.catalogue
    proposals: list[tuple[str, Image | None]] = []
    said: set[str] = set()
    references = {image.reference for image in in_force.images}
    for engine, one in found:
        # One image can have several names.
        reference = next((name for name in one.references if name in references), one.references[0])
        where = f"{reference} on {engine}"
        try:
            image = checked(entry_from(one.labels, reference))
        except CatalogueError as e:
            proposals.append((f"{where}: its labels cannot be used: {e}", None))
            continue
        known = in_force.entry(image.slug)
        if known is not None:
            same = (
                "it is in the catalogue"
                if known.reference == reference
                else f"that is {known.reference} there"
            )
            proposals.append((f"{where}: {image.slug}: {same}", None))
        elif image.slug in said:
            proposals.append((f"{where}: {image.slug}: proposed by another image already", None))
        else:
            said.add(image.slug)
            proposals.append((f"{where}: new: {image.slug}: {image.name}", image))
    return proposals


def run_pin(given: argparse.Namespace) -> list[str]:
    """Write into an image's entry what the engines have under its reference."""
    with opened(given.config) as own, own.engines(given.config) as engines:
        if engines is None:
            raise BadSettings(f"{given.config}: sessions are local processes; there is nothing to pin")
        image = own.images.listed.catalogue.entry(given.slug)
        if image is None:
            there = ", ".join(i.slug for i in own.images.listed.catalogue.images)
            raise CatalogueError(f"there is no image {shown(given.slug)}; there are {there}")
        found = {
            name_of(e): one for e in engines.engines if (one := found_on(e, image.reference)) is not None
        }
        entry, said = pinned(image, found)
        own.editor().edit(given.slug, entry, by=who())
        return [f"image {given.slug}: {said}"]
