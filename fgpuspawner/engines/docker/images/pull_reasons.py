"""The reason for a failed pull, from the engine's message. Pure.

Engines give it only as text, which differs between versions and registries.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from fgpuspawner.engines.docker.endings import as_text

LONGEST_REASON = 300


class Kind(StrEnum):
    NOT_FOUND = "not-found"
    DENIED = "denied"
    NO_SUCH_HOST = "no-such-host"
    NOT_TRUSTED = "not-trusted"
    DISK_FULL = "disk-full"
    DIGEST = "digest"
    PLATFORM = "platform"
    REGISTRY = "registry"
    NETWORK = "network"
    ENGINE = "engine"
    OTHER = "other"


WORDS = {
    Kind.NOT_FOUND: "the registry has no such image",
    Kind.DENIED: "the registry denies access to it, or has no such image",
    Kind.NO_SUCH_HOST: "there is no such registry",
    Kind.NOT_TRUSTED: "the engine does not trust the registry",
    Kind.DISK_FULL: "the disk of the engine is full",
    Kind.DIGEST: "what came is not what its digest says",
    Kind.PLATFORM: "the image is for another kind of machine",
    Kind.REGISTRY: "the registry has trouble of its own",
    Kind.NETWORK: "the registry does not answer",
    Kind.ENGINE: "the Docker engine does not answer",
    Kind.OTHER: "the engine says",
}
PASSING = (Kind.REGISTRY, Kind.NETWORK, Kind.ENGINE)
"""Kinds for which another try may help."""

SAID: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    # An engine, proxy or plugin that does not know or allow the question.
    (Kind.OTHER, ("page not found", "<html", "denied by plugin")),
    (Kind.DISK_FULL, ("no space left on device", "disk quota exceeded")),
    (
        Kind.DIGEST,
        ("verification failed for digest", "failed precondition", "digest mismatch", "does not match digest"),
    ),
    (
        Kind.PLATFORM,
        ("no matching manifest for", "does not match the specified platform", "image operating system"),
    ),
    (Kind.NO_SUCH_HOST, ("no such host",)),
    (Kind.NOT_TRUSTED, ("x509:", "http response to https client", "certificate")),
    (Kind.REGISTRY, ("toomanyrequests", "too many requests", "received unexpected http status: 5")),
    (
        Kind.REGISTRY,
        ("unexpected status code 5", "unexpected status: 5", "bad gateway", "service unavailable"),
    ),
    (
        Kind.DENIED,
        (
            "access denied",
            "denied:",
            "unauthorized",
            "no basic auth credentials",
            "forbidden",
            "incorrect username",
        ),
    ),
    (
        Kind.NOT_FOUND,
        ("manifest unknown", "name unknown", "not found", "does not exist", "no such image", "blob unknown"),
    ),
    (
        Kind.NETWORK,
        (
            "connection refused",
            "connection reset",
            "broken pipe",
            "no route to host",
            "network is unreachable",
            "timeout",
            "timed out",
            "deadline exceeded",
            "server misbehaving",
            "temporary failure",
            "unexpected eof",
            ": eof",
            "use of closed network connection",
        ),
    ),
)
"""Parts of engines' messages in lower case; the first match counts."""


@dataclass(frozen=True, slots=True)
class Reason:
    """The kind of a failure, and the engine's message."""

    kind: Kind
    said: str

    @property
    def may_pass(self) -> bool:
        return self.kind in PASSING

    def words(self) -> str:
        return f"{WORDS[self.kind]}: {self.said}"


def reason(said: str, status: int | None = None) -> Reason:
    """Return why an image could not be fetched; ``status`` is the answer's HTTP status, if it was an error."""
    # A registry's text goes to logs, pages and the command line.
    shown = as_text(" ".join(said.split()))[:LONGEST_REASON]
    text = said.lower()
    for kind, words in SAID:
        if any(word in text for word in words):
            return Reason(kind, shown)
    by_status = {401: Kind.DENIED, 403: Kind.DENIED, 404: Kind.NOT_FOUND}
    return Reason(by_status.get(status or 0, Kind.OTHER), shown)
