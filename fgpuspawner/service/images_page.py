"""The administrators' page of the image catalogue: what is in force, where file and database differ, and changes of it.

It works without scripts: every button is a form. What is shown is escaped by tornado, but for our own icons.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fgpuspawner.images.catalogue import CatalogueError
from fgpuspawner.images.edits import Action, Listed, Source
from fgpuspawner.images.entry import AMOUNTS, KEYS, Entry, entry_of
from fgpuspawner.images.icons import ICONS, icon_name, icon_svg
from fgpuspawner.images.live import Images
from fgpuspawner.images.model import Image, state_words
from fgpuspawner.images.needs import never_held
from fgpuspawner.service.base import ADMIN_SCOPE
from fgpuspawner.service.ending import actor_of
from fgpuspawner.service.pages import PageHandler, xsrf_text
from fgpuspawner.service.problems import Problem
from fgpuspawner.service.view import World

ADDRESS = "admin/images"
"""Where the page is, below the service's prefix."""

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
    "name": "Name",
    "framework": "Framework",
    "version": "Its version",
    "python": "Python",
    "description": "Description",
    "reference": "Docker image",
    "digest": "Expected digest or id",
    "environment": "Environment of local processes",
    "cuda": "CUDA",
    "deprecated": "Notice that it is deprecated",
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
    "hidden": "Hidden: only who knows the slug may start it",
    "sudo": "Its users may become root inside it",
}
TEXTS = tuple(key for key in KEYS if key in FIELD_LABELS and key not in (*LISTS, *FLAGS))


@dataclass(frozen=True, slots=True)
class Row:
    """An image as the page shows it."""

    slug: str
    name: str
    reference: str
    icon: str
    source: str
    state: tuple[str, ...]
    deprecated: str
    differences: tuple[str, ...]
    problems: tuple[str, ...]
    actions: tuple[tuple[str, str], ...]


def rows(images: Images, world: World, caps: Any) -> list[Row]:
    """Return the images in their order."""
    return [_row(one, never_held(one.image, world.snapshot.nodes, caps)) for one in images.listed.listed]


def _row(one: Listed, unfit: str | None) -> Row:
    image = one.image
    return Row(
        image.slug,
        image.name,
        image.reference,
        icon_svg(icon_name(image)),
        SOURCES[one.source],
        tuple(state_words(image)),
        image.deprecated,
        tuple(str(difference) for difference in one.differences),
        tuple(problem for problem in (one.problem, unfit) if problem),
        _actions(image, one.source),
    )


def _actions(image: Image, source: Source) -> tuple[tuple[str, str], ...]:
    found = [
        (Action.DISABLE, "Disable") if image.enabled else (Action.ENABLE, "Enable"),
        (Action.SHOW, "Show") if image.hidden else (Action.HIDE, "Hide"),
        (Action.UP, "Up"),
        (Action.DOWN, "Down"),
    ]
    if not image.default:
        found.insert(2, (Action.DEFAULT, "Make default"))
    if source is Source.EDITED:
        found.append((Action.BACK, "Back to the file"))
    if source is Source.ADDED:
        found.append((Action.BACK, "Remove"))
    return tuple((action.value, words) for action, words in found)


class CataloguePage(PageHandler):
    """The table, and one action with one image."""

    needs_scope = ADMIN_SCOPE

    async def get(self) -> None:
        await self._show()

    async def post(self) -> None:
        slug, what = self.get_body_argument("slug", ""), self.get_body_argument("action", "")
        by = actor_of(self)
        try:
            if what == "file-order":
                await self.service.reader.change_images(lambda editor: editor.file_order(by=by))
            elif what in set(Action):
                await self.service.reader.change_images(lambda editor: editor.do(Action(what), slug, by=by))
            else:
                raise Problem(400, "bad_argument", "action: there is no such action", field="action")
        except CatalogueError as e:
            self.set_status(400)
            await self._show(trouble=str(e))
            return
        self.redirect(f"{self.service.prefix}{ADDRESS}#image-{quote(slug)}", status=303)

    async def _show(self, trouble: str | None = None) -> None:
        reader = self.service.reader
        images, world = reader.images, await reader.world()
        self.render(
            "images.html",
            rows=rows(images, world, self.service.settings.caps()),
            problem=images.problem,
            trouble=trouble or images.trouble,
            lost=images.listed.lost,
            reordered=images.listed.reordered,
            path=images.path.name,
            xsrf=xsrf_text(self.xsrf_token),
            address=f"{self.service.prefix}{ADDRESS}",
        )


class EditPage(PageHandler):
    """One image's whole entry."""

    needs_scope = ADMIN_SCOPE

    async def get(self, slug: str) -> None:
        self._show(slug, entry_of(self._image(slug)))

    async def post(self, slug: str) -> None:
        self._image(slug)
        entry = entry_from_form(
            slug, {name: self.get_body_argument(name, "") for name in self.request.body_arguments}
        )
        by = actor_of(self)
        try:
            await self.service.reader.change_images(lambda editor: editor.edit(slug, entry, by=by))
        except CatalogueError as e:
            self.set_status(400)
            self._show(slug, entry, trouble=str(e))
            return
        self.redirect(f"{self.service.prefix}{ADDRESS}#image-{quote(slug)}", status=303)

    def _image(self, slug: str) -> Image:
        image = self.service.reader.images.listed.catalogue.entry(slug)
        if image is None:
            raise Problem(404, "no_such_image", f"there is no image {slug!r}")
        return image

    def _show(self, slug: str, entry: Entry, trouble: str | None = None) -> None:
        self.render(
            "image.html",
            slug=slug,
            values=form_values(entry),
            trouble=trouble,
            labels=FIELD_LABELS,
            texts=TEXTS,
            lists=LISTS,
            tables={table: [(f"{table}.{key}", FIELD_LABELS[key]) for key in AMOUNTS] for table in TABLES},
            flags=FLAGS,
            icons=ICONS,
            xsrf=xsrf_text(self.xsrf_token),
            address=f"{self.service.prefix}{ADDRESS}",
        )


def form_values(entry: Entry) -> dict[str, str]:
    """Return the text of every field of the form; of a flag "1" or ""."""
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
    """Return the entry that a form means; it is checked by whoever takes it."""
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
