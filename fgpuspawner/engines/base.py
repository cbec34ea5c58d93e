"""The seam between what decides and what runs: all that anything above may know of an engine.

An engine starts, watches and ends what sessions run in: local processes, Docker containers, pods. Above this seam nobody
knows which of them it is. What differs is said in `Capabilities`; what an engine's own settings add travels through
`LaunchSpec.options`, which that engine alone reads. docs/engines.md shows how to write one.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import ClassVar, Protocol

from pydantic import TypeAdapter
from traitlets.config import Config

from fgpu_scheduler import Device, EndCause, FGPUError, Launcher, Observed, PrivateImage, Queue, Seen, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.images.availability import Availability
from fgpuspawner.images.model import Catalogue, FoundImage, Image
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.base import Prepared
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import Answer
from fgpuspawner.meter.disk import DiskUse
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.nodes import Machine


class WhoseQueue(StrEnum):
    """Who decides which session is next."""

    OURS = "ours"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do. Settings, checks, the service and its pages go by this, and by nothing else.

    ``kind`` is in words, for ``fgpu check``: "containers". ``own_root``: a session has a root file system of its own,
    an image's, into which files are mounted; otherwise it sees the host's. ``real_limits``: CPU and memory of a session
    are enforced, not only counted. ``apart``: sessions run as users of their own, whom the engine keeps apart;
    ``networks``: also on the network. ``machines``: nodes may be other machines. ``finds_nodes``: the engine says which
    nodes there are, all of them other machines; ``c.FGPU.nodes`` only says what is other than found.
    """

    kind: str
    own_root: bool = False
    real_limits: bool = False
    apart: bool = False
    networks: bool = False
    machines: bool = False
    finds_nodes: bool = False
    saves_images: bool = False
    fetches_images: bool = False
    warm_pool: bool = False
    queue: WhoseQueue = WhoseQueue.OURS

    @property
    def why_not_saved(self) -> str:
        """Why sessions cannot be saved as images, in words."""
        return f"sessions here are {self.kind}, which cannot be saved as images"

    def to_json(self) -> str:
        """Return it as JSON, for the service."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """Return what `to_json` wrote.

        Raises:
            ValueError, TypeError: it is nothing of the kind.
        """
        said = json.loads(text)
        return cls(**{**said, "queue": WhoseQueue(said["queue"])})


class Safeguard(StrEnum):
    """What an engine may see to, so that a session harms neither its machine nor others."""

    UNPRIVILEGED = "unprivileged"
    """Sessions have no privileges, and gain none."""
    FILTERED = "filtered"
    """System calls that a session has no use for are refused."""
    LIMITS = "limits"
    """CPU and memory of a session are held to what it asked for."""
    PROCESSES = "processes"
    """A session has a limit on its processes."""
    PORTS = "ports"
    """The machine's ports are closed to sessions but for the Hub and the service."""
    COMMANDS = "commands"
    """Nobody on the network but the Hub commands the engine."""
    REMAPPED = "remapped"
    """Root within a session is nobody on the machine."""
    READ_ONLY = "read-only"
    """A session's root file system is read-only."""


@dataclass(frozen=True, slots=True)
class Held:
    """Whether an engine sees to something, None where that cannot be told, and the line that makes it do so."""

    met: bool | None
    line: str


# --- What an engine cannot do now ---


class EngineSilent(FGPUError):
    """The engine does not answer, or not for this machine: nothing follows for what it runs."""

    code = "engine_silent"


class LaunchFailed(FGPUError):
    """A launch that came to nothing; the message is for the owner."""

    code = "launch_failed"

    def __init__(self, message: str, cause: EndCause = EndCause.LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class NotBound(FGPUError):
    """The place that a session was given cannot be had after all, and nothing of the launch is left there.

    The session waits again, at its old place. The message, in the cluster's own words, is what its owner reads.
    """

    code = "not_bound"


class PullFailed(FGPUError):
    """An image cannot be had; the message names it and says why, for the owner of the session."""

    code = "pull_failed"


class CannotSave(FGPUError):
    """A session cannot be saved as an image; the message is for its owner. ``may_pass``: another try may do better."""

    code = "cannot_commit"

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


# --- What is said to an engine, and what it says ---


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """What a session's server is launched with: made above, carried out below, changed nowhere in between.

    ``command`` is empty where the image's own is meant; ``arguments`` follow either. ``environment`` is what the Hub
    gives the server, its token too; ``told`` is what it is told of its slice, which is no secret. ``prepared`` holds
    it to the slice: files to be put in, variables, search paths. ``devices`` are the real GPUs to be given; empty for
    simulated ones. ``folder`` has the session's own files on this machine. ``shared_memory_mib`` is the size of
    ``/dev/shm``; 0: the engine's default. ``options`` are the engine's own.
    """

    session: Session
    image: Image
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    told: Mapping[str, str]
    prepared: Prepared
    devices: tuple[Device, ...]
    folder: Path
    port: int
    shared_memory_mib: int = 0
    simulated: bool = False
    sudo: bool = False
    options: object = None


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a session's server will listen.

    ``has_driver``: it was given a driver for its GPUs, a simulated one too. ``warm``: it ran before it was asked for.
    """

    ip: str
    port: int
    has_driver: bool = True
    warm: bool = False


@dataclass(frozen=True, slots=True)
class ServerToken:
    """What JupyterHub's database has of a server's token: hashes, of which nobody makes the token.

    ``prefix``, ``hashed`` and ``scopes`` are the token's; ``secret``, ``redirect_uri`` and ``allowed_scopes`` are of the
    OAuth client by which browsers log in to the server.
    """

    prefix: str
    hashed: str
    scopes: tuple[str, ...]
    secret: str
    redirect_uri: str
    allowed_scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """What is noted of a session once its server answers: where that listens, what holds it to its slice, its token.

    The scheduler keeps it as text, `Session.launched`, and gives it back after a restart.
    """

    ip: str
    port: int
    isolation: str
    token: ServerToken | None = None
    """None where the Hub's database did not have all of it."""

    def to_json(self) -> str:
        """Return the note."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, note: str | None) -> Launched | None:
        """Return what `to_json` wrote; None where nothing was noted, or something else, which is not trusted."""
        try:
            return _LAUNCHED.validate_json(note or "", strict=True)
        except ValueError:
            return None


_LAUNCHED = TypeAdapter(Launched)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session's server ended: its exit status (128 and the signal's number), our cause, words for the owner."""

    status: int
    cause: EndCause
    message: str


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """What is to be saved as an image, and how it is to be known.

    ``base`` is the catalogue's entry that the session was started from, None if it is there no more; ``recipe`` is
    what was recorded of the private image that it was made from, and ``under_id`` what that is on its engine, None where
    it was none. ``check`` is told how many bytes the session has written, and raises where that is too much; ``note`` is
    told how far it is. Both block. ``again``: it was begun before, and did not come to its end.
    """

    session: Session
    image: PrivateImage
    base: Image | None
    recipe: str | None
    under_id: str | None
    check: Callable[[int], None]
    note: Callable[[str], None]
    again: bool


@dataclass(frozen=True, slots=True)
class SavedImage:
    """An image as its engine has it: its id, the bytes beyond what the session ran, and how to build it anew.

    ``server_kept``: nothing in the session could change what its server is made of.
    """

    engines_id: str
    size_bytes: int
    recipe: str
    server_kept: bool


@dataclass(frozen=True, slots=True)
class ImageStore:
    """The images of one machine, for administrators' commands. What is asked blocks.

    ``find`` returns what is there under a name, or None; ``labelled`` what proposes an entry of the catalogue by its
    labels. Both return nothing where the machine does not answer.
    """

    name: str
    find: Callable[[str], FoundImage | None]
    labelled: Callable[[], Sequence[FoundImage]]


class Firewall(Protocol):
    """Closes a machine to the sessions of an installation, but for what they are to reach. What it does blocks."""

    def script(self) -> str:
        """Return a shell script that does so, for root; it may be run again at any time."""

    def apply(self) -> None:
        """Do so here.

        Raises:
            FGPUError: it cannot be done; with its words.
        """

    def remove(self) -> None:
        """Take it all back, as far as it is there.

        Raises:
            FGPUError: it cannot be done; with its words.
        """


# --- What an engine is given ---


@dataclass(frozen=True, slots=True)
class Installation:
    """Whom an engine works for. ``id`` marks what it makes; ``config`` is the Hub's, with the engine's own settings."""

    id: str
    settings: FGPU
    config: Config
    catalogue: Callable[[], Catalogue]


@dataclass(frozen=True, slots=True)
class HubSide:
    """The Hub that an engine works for, once that is open.

    ``urls`` are what sessions have to reach. ``nodes_changed`` is to be called, in the Hub's event loop, when `survey`
    may say something else than before: it is asked soon then, and else about once a minute. ``ended`` returns so many of
    the sessions that ended last, ``kept_images`` the names of all private images that somebody has; both block, and
    raise StoreUnavailable.
    """

    isolation: Isolation
    queue: Queue
    background: Background
    urls: tuple[str, ...]
    nodes_changed: Callable[[], None]
    ended: Callable[[int], Sequence[Session]]
    kept_images: Callable[[], Collection[str]]


# --- The protocol ---


class Engine(Launcher):
    """What sessions run in. What an engine cannot do, by its capabilities, it need not have.

    One object for the Hub's life, made before it is known which GPUs there are: making it connects, blocks, and raises
    BadSettings where the engine cannot be used. Everything of a session is known by its id, attempt and node; a call may
    come again after a restart, for what an earlier Hub has started.
    """

    capabilities: ClassVar[Capabilities]

    # -- the Hub's life -------------------------------------------------------------------------------

    def survey(self) -> Mapping[str, Machine | None]:
        """Return what other machines than the Hub's say of themselves, by node; None for one that is silent. Blocks.

        An engine that finds nodes returns all that there are: one that is left out is gone, and its devices too. What
        others use of a machine is left out of what it has. Asked again while the Hub runs, from another thread.

        Raises:
            EngineSilent: it is not known which there are; everything stays as it was.
        """
        return {}

    def open(self, hub: HubSide) -> None:
        """Check, and close in, what sessions will run in; begin what needs no sessions. Blocks, in the Hub's event loop.

        Raises:
            BadSettings: it cannot be held to what is set.
        """

    def begin(self) -> None:
        """Begin what is to be done once it is known which sessions live."""

    def close(self) -> None:
        """Let go of everything; sessions run on. Blocks."""

    def answering(self) -> tuple[int, int]:
        """Return how many of the engine's machines answer, and how many are silent."""
        return 1, 0

    # -- what runs: `Launcher` ------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Do nothing: that something has ended is seen by looking."""

    @abstractmethod
    async def observe(self) -> Seen: ...

    @abstractmethod
    async def remove(self, observed: Observed) -> bool: ...

    # -- one session ----------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, spec: LaunchSpec) -> Endpoint:
        """Start a session's server and return where it will listen; whether it answers there is seen by whoever called.

        A cancelled call has no more effects once it returns, but for what `stop` then finds and ends.

        Raises:
            LaunchFailed: with words for the owner.
            NotBound: the place is not to be had now, and what was launched is known to be gone again.
        """

    @abstractmethod
    async def ended(self, session: Session) -> Ended | None:
        """Return how the session's server ended; None while it runs, or while that cannot be told."""

    @abstractmethod
    async def probe(
        self, session: Session, command: Sequence[str], *, told: Mapping[str, str], timeout_s: float
    ) -> Answer:
        """Run one of the probes within the session and return what it prints. Cancelled, it may take its time.

        Raises:
            LaunchFailed: it could not be run at all.
        """

    async def disk_use(self, session: Session) -> DiskUse:
        """Return what the session takes of the disk, as far as that can be told. It may take its time.

        Raises:
            EngineSilent: its machine does not answer.
        """
        return DiskUse()

    @abstractmethod
    async def stop(self, session: Session, *, now: bool) -> bool:
        """End everything that any attempt of the session left; return whether it is known to hold nothing any more."""

    def is_away(self, session: Session) -> bool:
        """Return whether the session's machine does not answer, and may again: it is not known what runs there."""
        return False

    async def cgroup(self, session: Session) -> str | None:
        """Return the session's cgroup (version 2), as a path below the file system's root; None if it is not known."""
        return None

    # -- who uses which GPU ---------------------------------------------------------------------------

    @abstractmethod
    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        """Return the session of each process of a node's machine that is one of this installation's. Blocks.

        Without a node the processes are of this machine.

        Raises:
            EngineSilent: it cannot be told.
        """

    def gpu_reader(self, node_id: str) -> NvmlReader:
        """Return what asks the driver of a node on another machine.

        Raises:
            EngineSilent: no such node is configured any more.
        """
        raise EngineSilent(f"node {node_id} is not another machine")

    # -- images ---------------------------------------------------------------------------------------

    async def availability(self, image: Image, node_id: str) -> Availability:
        """Return where an image is for a node. It may take seconds.

        Raises:
            EngineSilent: it cannot be told.
        """
        return Availability()

    async def has_image(self, image: Image, node_id: str) -> bool:
        """Return whether a session of this image can start on a node without fetching anything.

        Raises:
            EngineSilent: it cannot be told.
        """
        return True

    async def fetch_image(self, image: Image, node_id: str, session_id: int, *, ahead: bool = False) -> None:
        """Return when a node has the image. Cancelling this is leaving; the last to leave stops the fetching.

        ``session_id`` needs it; ``ahead``: that one only waits in the queue.

        Raises:
            PullFailed: it cannot be had.
            EngineSilent: the node's machine does not answer.
        """

    def fetching(self) -> Mapping[int, PullState]:
        """Return how far the fetching is that sessions wait for, by session."""
        return {}

    async def save_image(self, spec: SaveSpec) -> SavedImage:
        """Save a running session's files, without its identity and its home, as an image. Again after a crash: anew.

        Raises:
            CannotSave, and whatever ``spec.check`` raises: with words for the owner.
            EngineSilent: it does not answer; try again.
        """
        raise CannotSave(self.capabilities.why_not_saved)

    async def rename_image(self, image: PrivateImage, reference: str) -> bool:
        """Give a saved image another name, beside its own, wherever it is; return whether that is done.

        Raises:
            EngineSilent: it does not answer; try again.
        """
        return False

    async def delete_image(self, image: PrivateImage) -> None:
        """Remove a saved image, wherever it is.

        Raises:
            EngineSilent: it is not known to be gone; try again.
        """

    def image_stores(self) -> Sequence[ImageStore]:
        """Return the machines' images, for administrators' commands."""
        return ()
