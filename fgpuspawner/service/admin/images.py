"""The administrators' page of the image catalogue: entries in force, differences from the file, and changes.

It works without scripts: every button is a form. Tornado escapes everything except our own icons.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

from fgpu_scheduler import Audit, Node, Store, amounts_that_fit
from fgpuspawner.images.availability import WANTED, Availabilities, Availability
from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Action, Draft, Source, Update
from fgpuspawner.images.entry import AMOUNTS, KEYS, Entry, entry_of
from fgpuspawner.images.frameworks import FRAMEWORKS
from fgpuspawner.images.icons import ICONS, icon_name, icon_svg
from fgpuspawner.images.model import Image, state_words
from fgpuspawner.images.needs import between_steps, never_held
from fgpuspawner.service.admin.base import AdminFormPage
from fgpuspawner.service.problems import Problem, bad_argument

LISTS = ("kernels", "gpu_architectures", "groups", "users")
FLAGS = ("default", "enabled", "hidden", "sudo")
TABLES = ("minimum", "recommended")
WHOLE = ("gpu_memory_mib", "memory_mib")

SOURCES = {
    Source.FILE: "from the file",
    Source.EDITED: "from the file, changed",
    Source.ADDED: "not in the file",
}

FIELD_LABELS = {
    "slug": "Slug: its name in links and in the API, for good",
    "name": "Name",
    "framework": "Framework",
    "version": "Its version",
    "python": "Python",
    "description": "Description",
    "reference": "Image reference",
    "digest": "Expected digest or id",
    "environment": "Folder of its Python environment",
    "cuda": "CUDA",
    "deprecated": "Deprecation notice, shown to users",
    "kernels": "Kernels",
    "gpu_architectures": "GPU architectures",
    "groups": "Only for these groups",
    "users": "Only for these users",
    "fgpu": "fGPU",
    "gpu_memory_mib": "GPU memory (MiB)",
    "cpu": "CPU",
    "memory_mib": "Memory (MiB)",
    "default": "The default",
    "enabled": "Enabled",
    "hidden": "Hidden: users must know the slug to start it",
    "sudo": "Its users may become root inside it",
}
TEXTS = tuple(key for key in KEYS if key in FIELD_LABELS and key not in ("slug", *LISTS, *FLAGS))


def actions_of(image: Image, source: Source) -> tuple[tuple[str, str], ...]:
    """Return the actions for an image, and their buttons' texts."""
    found = [
        (Action.DISABLE, "Disable") if image.enabled else (Action.ENABLE, "Enable"),
        (Action.SHOW, "Show") if image.hidden else (Action.HIDE, "Hide"),
        (Action.UP, "Move up"),
        (Action.DOWN, "Move down"),
    ]
    if not image.default:
        found.insert(2, (Action.DEFAULT, "Make default"))
    if source is Source.EDITED:
        found.append((Action.BACK, "Back to the file"))
    return tuple((action.value, words) for action, words in found)


def places_of(
    image: Image, nodes: Sequence[Node], available: Availabilities
) -> dict[Availability, list[str]]:
    """Return the states of an image, each with its nodes and their groups."""
    found: dict[Availability, list[str]] = {}
    for node in nodes:
        said = f"{node.id} (group {node.resource_group})"
        found.setdefault(available.at(image.slug, node.id), []).append(said)
    return found


class CataloguePage(AdminFormPage):
    """Shared by the catalogue's pages: a change on top of the last valid file."""

    async def change_images(self, change: Callable[[Draft], Update], slug: str) -> None:
        """Change the catalogue, and show the image in the table. A script's form is only checked: ``check=1``."""
        only_check = self.field("check") == "1"
        try:
            await self.service.reader.change_images(change, self.actor, only_check=only_check)
        except CatalogueError as e:
            if only_check:
                words = str(e).partition(f" {e.key}: ")[2] if e.key else str(e)
                self.send_parts({"field": e.key, "message": words})
                return
            raise Problem(400, "bad_argument", str(e)) from None
        if only_check:
            self.send_parts({"field": "", "message": ""})
        else:
            self.back(f"image-{quote(slug)}")

    async def write_file(self, *, without: str = "") -> None:
        """Write the changes into the catalogue's file, or remove an image from it."""
        if not self.service.settings.catalogue:
            words = "the images are those of the package: set c.FGPU.catalogue to a file of your own (fgpu images export)"
            raise Problem(400, "bad_argument", words)
        try:
            await self.service.reader.write_images(self.actor, without=without)
        except CatalogueError as e:
            raise Problem(400, "bad_argument", str(e)) from None
        self.back()


class ImagesPage(CataloguePage):
    async def show(self, trouble: Problem | None = None) -> None:
        reader = self.service.reader
        images, world, caps = reader.images, await reader.world(), self.service.settings.caps()
        amounts = amounts_that_fit(world.snapshot.nodes, caps)
        self.render(
            "images.html",
            listed=images.listed.listed,
            unfit=lambda image: (
                never_held(image, world.snapshot.nodes, caps) or between_steps(image, amounts)
            ),
            places=lambda image: places_of(image, world.snapshot.nodes, world.available),
            moving=world.available.moving or bool(self.service.frameworks.doing),
            fetches=reader.engine.fetches_images,
            icon=lambda image: icon_svg(icon_name(image)),
            sources=SOURCES,
            states=state_words,
            actions=actions_of,
            problem=images.problem,
            trouble=trouble.message if trouble else images.trouble,
            lost=images.listed.lost,
            reordered=images.listed.reordered,
            path=images.path.name,
            own_file=bool(self.service.settings.catalogue),
            changed=[one.image.name for one in images.listed.listed if one.source is not Source.FILE],
            scans=reader.engine.own_root,
            # Local sessions run in Python environments, which can be made here.
            frameworks=() if reader.engine.own_root else FRAMEWORKS,
            installer=self.service.frameworks,
        )

    async def submit(self) -> None:
        slug, action = self.field("slug"), self.field("action")
        if action == "file-order":
            await self.change_images(Draft.file_order, slug)
        elif action == "write":
            await self.write_file()
        elif action == "look":
            await self.service.frameworks.look()
            self.back("frameworks")
        elif action == "install":
            self._install(slug)
            self.back("frameworks")
        elif action == "remove":
            listed = self.service.reader.images.listed.listed
            source = next((one.source for one in listed if one.image.slug == slug), None)
            if source is Source.ADDED:
                await self.change_images(lambda draft: draft.do(Action.BACK, slug), slug)
            else:
                await self.write_file(without=slug)
        elif action == "fetch" and self.service.reader.catalogue.entry(slug) is not None:
            await self.change(functools.partial(self._fetch, slug))
            self.back(f"image-{quote(slug)}")
        elif action in set(Action):
            await self.change_images(lambda draft: draft.do(Action(action), slug), slug)
        else:
            raise bad_argument("action", "there is no such action")

    def _install(self, slug: str) -> None:
        installer, service, actor = self.service.frameworks, self.service, self.actor
        if service.reader.engine.own_root or slug not in installer.wheels or slug in installer.doing:
            raise bad_argument("slug", "it is being installed, or its size was not shown yet")

        async def add(entry: Mapping[str, object]) -> None:
            await service.reader.change_images(lambda draft: draft.add([entry]), actor)

        service.background.run(
            installer.install(slug, service.settings.data_path(), add),
            failed=f"The framework {slug} could not be installed",
        )

    def _fetch(self, slug: str, store: Store, by: str, now_s: int) -> None:
        Audit(store).add(actor=by, action="image.fetch", target=f"image {slug}", now_s=now_s)
        data = self.service.settings.data_path()
        WANTED.write(data, {**WANTED.read(data), slug: now_s})


class EditPage(CataloguePage):
    """The form of an image: changes it."""

    new = False

    async def show(self, trouble: Problem | None = None) -> None:
        entry = self.given() if trouble else self.shown_entry()
        values = form_values(entry) | {"slug": str(entry.get("slug", ""))}
        # Fields that the engine ignores are shown only if they are set.
        unused = ("environment",) if self.service.reader.engine.own_root else ("reference", "digest", "sudo")
        # An image needs a reference, which other engines use.
        shown = [
            key for key in TEXTS if key not in unused or values[key] or (self.new and key == "reference")
        ]
        self.render(
            "image.html",
            slug="" if self.new else self.path_args[0],
            new=self.new,
            values=values,
            trouble=trouble.message if trouble else None,
            labels=FIELD_LABELS,
            texts=[*(["slug"] if self.new else []), *shown],
            lists=LISTS,
            tables={table: [(f"{table}.{key}", FIELD_LABELS[key]) for key in AMOUNTS] for table in TABLES},
            flags=[key for key in FLAGS if key not in unused or values[key]],
            icons=ICONS,
        )

    async def submit(self) -> None:
        entry = self.given()
        await self.change_images(lambda draft: draft.edit(self.path_args[0], entry), self.path_args[0])

    def shown_entry(self) -> Entry:
        """Return what the form has at first."""
        return entry_of(self.image(self.path_args[0]))

    def given(self) -> Entry:
        """Return the entry that the form was sent with."""
        slug = self.field("slug") if self.new else self.image(self.path_args[0]).slug
        return entry_from_form(slug, {name: self.field(name) for name in self.request.body_arguments})

    def image(self, slug: str) -> Image:
        found = self.service.reader.images.listed.catalogue.entry(slug)
        if found is None:
            raise Problem(404, "no_such_image", f"there is no image {slug!r}")
        return found


class NewPage(EditPage):
    """The same form, empty or with another image's values (``?copy=SLUG``): adds an image."""

    new = True

    async def submit(self) -> None:
        entry = self.given()
        await self.change_images(lambda draft: draft.add([entry]), str(entry["slug"]))

    def shown_entry(self) -> Entry:
        slug = self.get_query_argument("copy", "")
        if not slug:
            return {"python": "3"}
        entry = entry_of(self.image(slug))
        return {**entry, "slug": f"{slug[:35]}-copy", "name": f"{entry['name']} (copy)", "default": False}


def form_values(entry: Entry) -> dict[str, str]:
    """Return the text of every field of the form; flags are "1" or ""."""
    found = dict.fromkeys((*TEXTS, "icon"), "")
    found |= {key: str(value) for key, value in entry.items() if isinstance(value, str)}
    for key in LISTS:
        value = entry.get(key, [])
        found[key] = "\n".join(str(one) for one in value) if isinstance(value, list) else str(value)
    for table in TABLES:
        amounts = entry.get(table, {})
        known = amounts if isinstance(amounts, Mapping) else {}
        found |= {f"{table}.{key}": str(known.get(key, "")) for key in AMOUNTS}
    found |= {key: "1" if entry.get(key, key == "enabled") else "" for key in FLAGS}
    return found


def entry_from_form(slug: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the entry of a form, not yet checked."""
    entry: dict[str, Any] = {"slug": slug}
    for key in (*TEXTS, "icon"):
        if text := fields.get(key, "").strip():
            entry[key] = text
    for key in LISTS:
        lines = [line.strip() for line in fields.get(key, "").splitlines() if line.strip()]
        if lines:
            entry[key] = lines
    for table in TABLES:
        amounts = {key: text for key in AMOUNTS if (text := fields.get(f"{table}.{key}", "").strip())}
        if amounts:
            entry[table] = {key: _amount(key, text) for key, text in amounts.items()}
    return entry | {key: bool(fields.get(key)) for key in FLAGS}


def _amount(key: str, text: str) -> object:
    return int(text) if key in WHOLE and text.isascii() and text.isdigit() and len(text) < 12 else text
