"""The API's own description."""

from __future__ import annotations

from fgpuspawner.service.api.base import Api
from fgpuspawner.service.api.openapi import document


class OpenApi(Api):
    """For who may use the service at all: it tells of no session."""

    needs_scope = None

    async def get(self) -> None:
        self.answer(document(f"{self.service.prefix}api/v1"))
