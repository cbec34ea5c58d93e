"""The page of a user's own presets: named launch options, also those of a last launch."""

from __future__ import annotations

from dataclasses import replace

from fgpu_scheduler import MOST_PRESETS, OwnPresets, Request, Session
from fgpuspawner import scopes
from fgpuspawner.form.offer import LaunchRequest
from fgpuspawner.service.model import is_mine
from fgpuspawner.service.pages.base import FormPage
from fgpuspawner.service.problems import Problem, bad_argument, forbidden
from fgpuspawner.text.fields import BAD_NAME, clean_name
from fgpuspawner.text.sessions import amount_words, isolated, session_name

LAUNCHES_READ, LAUNCHES_SHOWN = 50, 10


class PresetsPage(FormPage):
    needs_scope = scopes.KEEP

    @property
    def user(self) -> str:
        if self.viewer.user is None or self.viewer.server_name is not None:
            raise forbidden("only a user has presets")
        return self.viewer.user

    async def show(self, trouble: Problem | None = None) -> None:
        user = self.user
        presets = await self.service.reader.read_store(lambda store: OwnPresets(store).of(user))
        latest = await self.service.reader.read_store(
            lambda store: store.latest(user=user, limit=LAUNCHES_READ)
        )
        launches: dict[Request, Session] = {}
        for session in latest:
            launches.setdefault(replace(session.request, server_name="", name="", groups=()), session)
        self.render(
            "presets.html",
            presets={name: self._words(options) for name, options in presets.items()},
            launches=list(launches.values())[:LAUNCHES_SHOWN],
            words=lambda asked: f"{isolated(self._image(asked.image))}, {amount_words(asked)}",
            session_name=session_name,
            refused="" if trouble is None else trouble.message.removeprefix(f"{trouble.field}: "),
            xsrf=self.xsrf,
        )

    def _image(self, slug: str) -> str:
        return self.service.site.image_names.get(slug, slug)

    def _words(self, options: dict[str, object] | object) -> str:
        assert isinstance(options, dict)
        amount = options.get("fgpu")
        gpu = f"{options.get('gpu_memory_mib')} MiB of GPU memory" if amount is None else f"{amount} fGPU"
        own = ["own variables or script"] if options.get("setup") else []
        return ", ".join([isolated(self._image(str(options.get("image")))), gpu, *own])

    async def submit(self) -> None:
        user, name = self.user, self.field("name")
        if self.field("action") == "delete":
            await self.change(lambda store, by, now_s: OwnPresets(store).remove(user, name))
        else:
            await self._save(user, name)
        self.redirect(f"{self.service.prefix}presets/", status=303)

    async def _save(self, user: str, name: str) -> None:
        found, before = clean_name(name), self.field("before")
        if not found:
            raise bad_argument("name", BAD_NAME)
        if before:
            presets = await self.service.reader.read_store(lambda store: OwnPresets(store).of(user))
            options = presets.get(before)
        else:
            number = self.field("session")
            session = await self.visible_session(number if number.isascii() and number.isdigit() else "0")
            asked = LaunchRequest.of(replace(session.request, name=""))
            options = asked.as_options() if is_mine(session, self.viewer) else None
        if options is None:
            raise Problem(404, "no_preset", "there is no such preset or launch of yours")
        kept = await self.change(
            lambda store, by, now_s: OwnPresets(store).save(user, found, options, now_s=now_s)
        )
        if not kept:
            message = f"you have {MOST_PRESETS} presets, which is the most; delete one first"
            raise Problem(409, "too_many_presets", message)
        if before and before != found:
            await self.change(lambda store, by, now_s: OwnPresets(store).remove(user, before))
