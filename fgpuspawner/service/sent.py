"""Reading the JSON that a caller sends."""

from __future__ import annotations

import json

LARGEST_BODY = 64 * 1024


def sent_json(body: bytes) -> object:
    """Return what was sent, an empty object for nothing.

    Raises:
        ValueError: it is no JSON, too large or too deep, or has text that is none and that no database takes.
    """
    if len(body) > LARGEST_BODY:
        raise ValueError("it is too large")
    try:
        found: object = json.loads(body or b"{}")
    except RecursionError:
        raise ValueError("it is too deep") from None
    # JSON can spell half of a pair of surrogates.
    json.dumps(found, ensure_ascii=False).encode()
    return found
