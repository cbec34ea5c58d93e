"""The REST API as an OpenAPI 3.1 document: ``docs/openapi.json``, and ``api/v1/openapi.json`` of a running service.

Every route of the API is in `paths` or `admin`, with its answer's object from `fgpuspawner.service.objects`; tests
compare both with the service. A new endpoint adds its lines there.
"""

from __future__ import annotations

from typing import Any

import fgpuspawner
from fgpuspawner.service.openapi import admin, paths
from fgpuspawner.service.openapi.operations import described

BASE = "/services/fgpu/api/v1"


def document(base: str = BASE) -> dict[str, Any]:
    """Return the document, with the address below which the paths are."""
    calls, schemas = described([*paths.CALLS, *admin.CALLS])
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "fgpu",
            "version": fgpuspawner.__version__,
            "description": "GPU sessions: the queue, what runs, and what has run. docs/rest-api.md says what is meant.",
            "license": {"name": "BSD-3-Clause", "identifier": "BSD-3-Clause"},
        },
        "servers": [{"url": base.rstrip("/")}],
        "security": [{"token": []}],
        "paths": calls,
        "components": {
            "schemas": schemas,
            "securitySchemes": {
                "token": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "`token ...`, of a user, a server or a service of JupyterHub",
                }
            },
        },
    }
