"""An image is brought to an engine: from a registry, or from another engine. Both block, in a thread of their own."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import docker
from docker.auth import get_config_header, resolve_repository_name
from docker.errors import DockerException
from docker.utils import parse_repository_tag

from fgpuspawner.images.reasons import Kind, Reason, reason
from fgpuspawner.images.talk import BrokenOff, EngineRefused, Talk

Tell = Callable[[Mapping[str, Any]], None]
"""Is given each line that the engine tells of a pull."""
Count = Callable[[int], None]
"""Is given how many bytes of a copy have gone over."""
COUNTED_EVERY_S = 0.2


def fetch(talk: Talk, client: docker.APIClient, reference: str, tell: Tell) -> Reason | None:
    """Have the engine fetch an image from its registry; return why it could not, or None."""
    repository, tag = parse_repository_tag(reference)
    try:
        header = get_config_header(client, resolve_repository_name(repository)[0])
        talk.ask(
            "POST",
            "/images/create",
            params={"fromImage": repository, "tag": tag or "latest"},
            headers={"X-Registry-Auth": _text(header)} if header else None,
        )
        for told in talk.lines():
            if "error" in told:
                return reason(str(told["error"]))
            tell(told)
    except EngineRefused as e:
        return reason(str(e), e.status)
    except (BrokenOff, DockerException, OSError) as e:
        return Reason(Kind.ENGINE, str(e))
    finally:
        talk.close()
    return None


def copy(source: Talk, target: Talk, reference: str, count: Count) -> Reason | None:
    """Bring an image from one engine to another; return why it could not be, or None."""

    def sent() -> Iterator[bytes]:
        done, told_at = 0, 0.0
        for piece in source.pieces():
            yield piece
            done += len(piece)
            if time.monotonic() - told_at >= COUNTED_EVERY_S:
                told_at = time.monotonic()
                count(done)

    try:
        source.ask("GET", f"/images/{quote(reference, safe='/:@')}/get")
        target.ask(
            "POST",
            "/images/load",
            params={"quiet": "1"},
            headers={"Content-Type": "application/x-tar"},
            body=sent(),
        )
        for told in target.lines():
            if "error" in told:
                return reason(str(told["error"]))
    except EngineRefused as e:
        return reason(str(e), e.status)
    except BrokenOff as e:
        return Reason(Kind.ENGINE, str(e))
    finally:
        source.close()
        target.close()
    return None


def _text(header: bytes | str) -> str:
    return header.decode() if isinstance(header, bytes) else header
