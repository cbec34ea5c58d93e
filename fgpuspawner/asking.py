"""What a user is asked before a start, what they answered, and what it is refused with."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jupyterhub.spawner import Spawner, SpawnException
from traitlets import HasTraits, default

from fgpu_scheduler import Refusal
from fgpuspawner import form, ticket
from fgpuspawner.options import Offer, Refused, parse, read_fields
from fgpuspawner.runtime import Runtime


class AskingSpawner(HasTraits):
    """Part of a `Spawner`: the launch form, and the options that come from it, from a link or from the API."""

    # What a spawner of the Hub has.
    user: Any
    hub: Any
    handler: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused: dict[str, str] = {}
        self._refusals: Sequence[Refusal] = ()

    @property
    def runtime(self) -> Runtime:
        """The Hub's one runtime."""
        return Runtime.current()

    @property
    def hub_groups(self) -> list[str]:
        """The user's groups in JupyterHub, by name."""
        return sorted(group.name for group in self.user.groups)

    def offer(self) -> Offer:
        """Return what this user may choose."""
        return self.runtime.offer(self.user.name, self.hub_groups)

    @default("options_form")
    def _asking_options_form(self) -> Any:
        return self._render_form

    async def _render_form(self, spawner: Spawner) -> str:
        await self.runtime.ready()
        try:
            offer = self.offer()
        except Refused as e:
            return form.render_refusal(e)
        refused, self._refused = self._refused, {}
        refusals, self._refusals = self._refusals, ()
        return form.render(
            offer,
            hub_prefix=self.hub.base_url,
            ticket=ticket.make(ticket.KEY, self.user.name, self.hub_groups, now_s=int(time.time())),
            given=refused or form.given(self.handler),
            refusals=refusals,
        )

    @default("options_from_form")
    def _asking_options_from_form(self) -> Any:
        return self._read_form

    def _read_form(self, fields: dict[str, list[str]]) -> dict[str, object]:
        try:
            return parse(read_fields(fields), self.offer()).as_options()
        except Refused as e:
            # The Hub shows the form again through the default server's spawner, whichever this one is.
            shown = self.user.spawner
            shown._refused, shown._refusals = form.first_of(fields), e.refusals
            raise refusal(e) from None

    @default("apply_user_options")
    def _asking_apply_user_options(self) -> Any:
        # They are applied by asking the scheduler for them, in `start`.
        return lambda spawner, options: None


def refusal(refused: Refused) -> SpawnException:
    """Return what the Hub is told of options that cannot be accepted."""
    return SpawnException(
        str(refused), reason=refused.refusals[0].code, message_html=form.refusal_html(refused)
    )
