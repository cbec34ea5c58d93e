"""Brings an image to an engine, from a registry or another engine. Both block, in a separate thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import quote

import docker
from docker.auth import encode_header, load_config, resolve_authconfig, resolve_repository_name
from docker.errors import DockerException
from docker.utils import parse_repository_tag

from fgpuspawner.engines.docker.images.long_request import (
    AT_WORK_S,
    SILENT_S,
    BrokenOff,
    EngineRefused,
    EngineRequest,
)
from fgpuspawner.engines.docker.images.pull_reasons import Kind, Reason, reason

Tell = Callable[[Mapping[str, Any]], None]
"""Gets each line that the engine prints about a pull."""
Count = Callable[[int], None]
"""Gets the number of copied bytes."""
COUNTED_EVERY_S = 0.2
MOVING = {"Pulling fs layer", "Downloading", "Verifying Checksum", "Extracting"}
"""States of a layer after which the engine soon reports more."""


def fetch(
    request: EngineRequest, client: docker.APIClient, reference: str, tell: Tell | None
) -> Reason | None:
    """Make the engine pull an image from its registry; return why it could not, or None.

    Without ``tell`` it only asks whether the registry has the image.
    """
    repository, tag = parse_repository_tag(reference)
    try:
        known = _credentials(client, resolve_repository_name(repository)[0])
        headers = {"X-Registry-Auth": known} if known else None
        if tell is None:
            request.ask("GET", f"/distribution/{quote(reference, safe='/:@')}/json", headers=headers)
            return None
        params = {"fromImage": repository, "tag": tag or "latest"}
        request.ask("POST", "/images/create", params=params, headers=headers)
        layers: dict[str, str] = {}
        for told in request.lines():
            if "error" in told:
                return reason(str(told["error"]))
            tell(told)
            layers[str(told.get("id"))] = str(told.get("status"))
            request.set_timeout(AT_WORK_S if is_in_line(layers.values()) else SILENT_S)
    except EngineRefused as e:
        return reason(str(e), e.status)
    except (BrokenOff, DockerException, OSError) as e:
        return Reason(Kind.ENGINE, str(e))
    finally:
        request.close()
    return None


def is_in_line(layers: Iterable[str]) -> bool:
    """Return whether all unfinished layers wait for other pulls of the engine.

    The engine reports once that a layer waits, and then nothing, however long the others take.
    """
    states = set(layers)
    return "Waiting" in states and not states & MOVING


def copy(source: EngineRequest, target: EngineRequest, reference: str, count: Count) -> Reason | None:
    """Copy an image from one engine to another; return why it could not, or None."""

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


def _credentials(client: docker.APIClient, registry: str) -> str | None:
    """Return the Hub user's credentials for a registry; read each time, as some registries' tokens last only hours."""
    known = load_config(credstore_env=client.credstore_env)
    found = resolve_authconfig(known, registry, credstore_env=client.credstore_env)
    return encode_header(found).decode() if found else None
