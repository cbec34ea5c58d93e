"""The interface between the Hub and the engines that run sessions: local processes, Docker containers, pods.

Code above this interface does not know which engine it uses. Differences are in `Capabilities`; an engine's own
settings travel in `LaunchSpec.options`, which only that engine reads. docs/engines.md shows how to write one.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Protocol

from pydantic import TypeAdapter
from traitlets.config import Config

from fgpu_scheduler import Device, EndCause, FGPUError, Launcher, Observed, PrivateImage, Queue, Seen, Session
from fgpuspawner.concurrency.background import Background
from fgpuspawner.images.availability import Availability
from fgpuspawner.images.model import Catalogue, FoundImage, Image
from fgpuspawner.images.pull_state import PullState
from fgpuspawner.isolation.base import IN_CONTAINER, Prepared
from fgpuspawner.isolation.manager import Isolation
from fgpuspawner.isolation.nvml_reader import NvmlReader
from fgpuspawner.isolation.report import Answer
from fgpuspawner.meter.disk import DiskUse
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.folders import SharedFolder
from fgpuspawner.settings.nodes import MachineFacts


class WhoseQueue(StrEnum):
    """The owner of the queue that decides which session is next."""

    OURS = "ours"
    ENGINE = "engine"


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do; settings, checks, the service and its pages depend on this alone.

    ``kind`` is in words, for ``fgpu check``: "containers". ``own_root``: a session has its own root file system, an
    image's, into which files are mounted; otherwise it sees the host's. ``real_limits``: CPU and memory of a session
    are enforced, not only counted. ``apart``: sessions run as separate users; ``networks``: also on separate networks.
    ``machines``: nodes may be other machines. ``finds_nodes``: the engine lists all nodes, and ``c.FGPU.nodes`` only
    overrides what it found. ``sees_processes``: it tells which session a process belongs to, which the watchdog needs.
    ``reads_logs``: it returns what a session's server has printed.
    """

    kind: str
    own_root: bool = False
    real_limits: bool = False
    apart: bool = False
    networks: bool = False
    machines: bool = False
    finds_nodes: bool = False
    sees_processes: bool = True
    saves_images: bool = False
    fetches_images: bool = False
    warm_pool: bool = False
    reads_logs: bool = False
    queue: WhoseQueue = WhoseQueue.OURS

    @property
    def why_not_saved(self) -> str:
        """The reason why sessions cannot be saved as images, in words."""
        return f"sessions here are {self.kind}, which cannot be saved as images"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Capabilities:
        """Return what `to_json` wrote; raises ValueError or TypeError if the text is something else."""
        said = json.loads(text)
        return cls(**{**said, "queue": WhoseQueue(said["queue"])})


class Safeguard(StrEnum):
    """What an engine can do so that a session harms neither its machine nor other sessions."""

    UNPRIVILEGED = "unprivileged"
    """Sessions have no privileges and gain none."""
    FILTERED = "filtered"
    """System calls that sessions do not need are refused."""
    LIMITS = "limits"
    """A session's CPU and memory are limited to its request."""
    PROCESSES = "processes"
    """The number of a session's processes is limited."""
    PORTS = "ports"
    """The machine's ports are closed to sessions, except the Hub's and the service's."""
    COMMANDS = "commands"
    """Only the Hub can command the engine over the network."""
    REMAPPED = "remapped"
    """Root in a session is an unprivileged user of the machine."""
    READ_ONLY = "read-only"
    """A session's root file system is read-only."""


@dataclass(frozen=True, slots=True)
class Held:
    """Whether an engine has a safeguard (None: unknown), and the line that turns it on."""

    met: bool | None
    line: str


# --- What an engine cannot do now ---


class EngineSilent(FGPUError):
    """The engine, or this machine of it, does not answer. Nothing follows for what it runs."""

    code = "engine_silent"


class LaunchFailed(FGPUError):
    """A launch failed; the message is for the owner."""

    code = "launch_failed"

    def __init__(self, message: str, cause: EndCause = EndCause.LAUNCH_FAILED) -> None:
        super().__init__(message)
        self.cause = cause


class NotBound(FGPUError):
    """The assigned place is not available after all, and nothing of the launch is left there.

    The session waits again, at its old position. The message, in the cluster's words, is for its owner.
    """

    code = "not_bound"


class PullFailed(FGPUError):
    """An image could not be fetched; the message for the session's owner names it and the reason."""

    code = "pull_failed"


class CannotSave(FGPUError):
    """A session cannot be saved as an image; the message is for its owner. ``may_pass``: another try may succeed."""

    code = "cannot_commit"

    def __init__(self, message: str, *, may_pass: bool = False) -> None:
        super().__init__(message)
        self.may_pass = may_pass


# --- What is said to an engine, and what it says ---


@dataclass(frozen=True, slots=True)
class LaunchSpec:
    """Everything that an engine needs to start a session's server.

    ``command`` is empty to run the image's own; ``arguments`` follow either. ``environment`` is the Hub's, with the
    server's token; ``slice_environment`` describes the slice, without secrets. ``prepared`` has the files, variables
    and search paths that hold the session to its slice. ``devices`` are its real GPUs; none for simulated ones.
    ``folder`` has the session's own files on this machine, ``shared`` are the shared folders that it is given, each at
    `place_of`. ``shared_memory_mib`` is the size of ``/dev/shm``; 0: the engine's default. ``options`` are the engine's
    own.
    """

    session: Session
    image: Image
    command: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: Mapping[str, str] = field(repr=False)
    slice_environment: Mapping[str, str]
    prepared: Prepared
    devices: tuple[Device, ...]
    folder: Path
    port: int
    shared: tuple[SharedFolder, ...] = ()
    shared_memory_mib: int = 0
    simulated: bool = False
    sudo: bool = False
    options: object = None


FOLDERS = "folders"
"""The folder of the session's own files in which shared folders are mounted."""


def place_of(folder: SharedFolder) -> str:
    """Return where a shared folder is in a session with its own root file system; in the home is a link to it.

    Not in the home itself: a link of the user's there would decide which files of the session the mount covers.
    """
    return f"{IN_CONTAINER}/{FOLDERS}/{folder.name}"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a session's server will listen.

    ``has_driver``: it has a driver for its GPUs, a simulated one too. ``warm``: it comes from the warm pool.
    """

    ip: str
    port: int
    has_driver: bool = True
    warm: bool = False


@dataclass(frozen=True, slots=True)
class ServerToken:
    """What JupyterHub's database has of a server's token: hashes, from which the token cannot be made.

    ``prefix``, ``hashed`` and ``scopes`` are the token's; ``secret``, ``redirect_uri`` and ``allowed_scopes`` are of
    the OAuth client through which browsers log in to the server.
    """

    prefix: str
    hashed: str
    scopes: tuple[str, ...]
    secret: str
    redirect_uri: str
    allowed_scopes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Launched:
    """The record of a session, made when its server answers: its address, isolation and token.

    The scheduler stores it as text in `Session.launched`, for the time after a restart.
    """

    ip: str
    port: int
    isolation: str
    token: ServerToken | None = None
    """None if the Hub's database lacked a part of it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, note: str | None) -> Launched | None:
        """Return what `to_json` wrote; None for anything else, which is not trusted."""
        try:
            return _LAUNCHED.validate_json(note or "", strict=True)
        except ValueError:
            return None


_LAUNCHED = TypeAdapter(Launched)


@dataclass(frozen=True, slots=True)
class Ended:
    """How a session's server ended: exit status (128 plus a signal's number), cause, and message for the owner."""

    status: int
    cause: EndCause
    message: str

    def without_values(self, session: Session) -> Ended:
        """Return it without the server's last words, which may hold a value of the session's own variables."""
        return replace(self, message=self.message.partition(LAST_WORDS)[0]) if session.request.setup else self


LAST_WORDS = "; its last words: "
"""Comes in an end's message before the last line of the server's log."""


@dataclass(frozen=True, slots=True)
class SaveSpec:
    """A request to save a session as an image.

    ``base`` is the catalogue entry that the session was started from, None if it is gone. ``recipe`` and ``under_id``
    are the recorded recipe and the engine's id of the private image it was started from, None if it was not. ``check``
    gets the number of written bytes and raises if these are too many; ``note`` gets the progress. Both block.
    ``again``: an earlier try did not finish.
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
    """A saved image: the engine's id, its bytes beyond the session's own image, and a recipe to rebuild it.

    ``server_kept``: the session could not change the server's files.
    """

    engines_id: str
    size_bytes: int
    recipe: str
    server_kept: bool


@dataclass(frozen=True, slots=True)
class ImageStore:
    """The images of one machine, for administrators' commands. Calls block.

    ``find`` returns the image of a reference, or None. ``labelled`` returns the images with labels that propose a
    catalogue entry. Both return nothing if the machine does not answer.
    """

    name: str
    find: Callable[[str], FoundImage | None]
    labelled: Callable[[], Sequence[FoundImage]]


class Firewall(Protocol):
    """Closes a machine to an installation's sessions, except for what they need. Calls block."""

    def script(self) -> str:
        """Return a shell script for root that applies the rules; it may be run repeatedly."""

    def apply(self) -> None:
        """Apply the rules on this machine; raises FGPUError with the reason."""

    def remove(self) -> None:
        """Remove the rules, if any; raises FGPUError with the reason."""


# --- What an engine is given ---


@dataclass(frozen=True, slots=True)
class Installation:
    """The installation that an engine works for. ``id`` marks what it makes; ``config`` has the engine's own settings."""

    id: str
    settings: FGPU
    config: Config
    catalogue: Callable[[], Catalogue]


@dataclass(frozen=True, slots=True)
class HubSide:
    """The Hub as the engine sees it.

    ``urls`` must be reachable for sessions. Call ``nodes_changed`` in the Hub's event loop when `survey` may have a new
    answer; it is called soon then, otherwise about once a minute. ``ended`` returns that many of the last ended
    sessions, ``kept_images`` the names of all private images in use; both block and raise StoreUnavailable.
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
    """Runs sessions. Methods beyond its capabilities need no implementation.

    One object lives as long as the Hub. Making it connects, blocks, and raises BadSettings if the engine cannot be
    used. It is made before the GPUs are known. Sessions are identified by id, attempt and node; calls may concern
    sessions that an earlier Hub has started. Methods raise EngineSilent if the engine or the node's machine does not
    answer, or the node is no longer configured; call them again later.
    """

    capabilities: Capabilities

    # -- the Hub's life -------------------------------------------------------------------------------

    def survey(self) -> Mapping[str, MachineFacts | None]:
        """Return the other machines' descriptions by node; None for a silent one. Blocks.

        An engine that finds nodes returns all of them: a missing one is gone, with its devices. What other users of a
        machine take is left out. Also called while the Hub runs, from another thread.

        Raises:
            EngineSilent: the nodes are unknown; everything stays as it was.
        """
        return {}

    def open(self, hub: HubSide) -> None:
        """Check the settings, set up networks, and begin what needs no sessions. Blocks, in the Hub's event loop.

        Raises:
            BadSettings: the engine cannot do what is set.
        """

    def begin(self) -> None:
        """Begin the work that needs to know which sessions live."""

    def close(self) -> None:
        """Release everything; sessions run on. Blocks."""

    def answering(self) -> tuple[int, int]:
        """Return the numbers of the engine's machines that answer and that are silent."""
        return 1, 0

    # -- what runs: `Launcher` ------------------------------------------------------------------------

    def watch(self, changed: Callable[[], None]) -> None:
        """Register ``changed`` to be called when a session may have ended. By default ends are found by `observe`."""

    @abstractmethod
    async def observe(self) -> Seen: ...

    @abstractmethod
    async def remove(self, observed: Observed) -> bool: ...

    # -- one session ----------------------------------------------------------------------------------

    @abstractmethod
    async def start(self, spec: LaunchSpec) -> Endpoint:
        """Start a session's server and return where it will listen; the caller waits until it answers.

        After a cancelled call returns, only what `stop` finds and ends may be left.

        Raises:
            LaunchFailed: with words for the owner.
            NotBound: the place is not available now, and the launch left nothing behind.
        """

    @abstractmethod
    async def ended(self, session: Session) -> Ended | None:
        """Return how the session's server ended; None while it runs or while that is unknown."""

    @abstractmethod
    async def probe(
        self, session: Session, command: Sequence[str], *, environment: Mapping[str, str], timeout_s: float
    ) -> Answer:
        """Run a probe in the session and return its output. A cancelled call may return late.

        Raises:
            LaunchFailed: it could not be run.
        """

    async def disk_use(self, session: Session) -> DiskUse:
        """Return what the session takes of the disk, if known. May be slow."""
        return DiskUse()

    @abstractmethod
    async def stop(self, session: Session, *, now: bool) -> bool:
        """End everything that any attempt of the session left; return whether it certainly holds nothing now."""

    def is_away(self, session: Session) -> bool:
        """Return whether the session's machine is silent, but may answer again: what it runs is unknown."""
        return False

    async def log(self, session: Session, *, lines: int) -> bytes | None:
        """Return the last lines that the session's server has printed; None if there are none, or no longer.

        Raises:
            EngineSilent: the engine does not answer.
        """
        return None

    async def set_memory(self, session: Session, memory_mib: int) -> None:
        """Change the memory limit of a running session; nothing where the engine only counts memory.

        Raises:
            LaunchFailed: it could not be changed.
        """

    async def cgroup(self, session: Session) -> str | None:
        """Return the session's cgroup (version 2) as a path below the cgroup root; None if unknown."""
        return None

    # -- who uses which GPU ---------------------------------------------------------------------------

    @abstractmethod
    def sessions_of(self, pids: Sequence[int], node_id: str | None = None) -> Mapping[int, int]:
        """Return the session of each process that runs in a session of this installation. Blocks.

        Without a node the processes are of this machine.
        """

    def gpu_reader(self, node_id: str) -> NvmlReader:
        """Return the reader of the GPUs of a node on another machine."""
        raise EngineSilent(f"node {node_id} is not another machine")

    # -- images ---------------------------------------------------------------------------------------

    async def availability(self, image: Image, node_id: str) -> Availability:
        """Return where an image is for a node. May take seconds."""
        return Availability()

    async def has_image(self, image: Image, node_id: str) -> bool:
        """Return whether a session of this image can start on a node without a pull."""
        return True

    async def fetch_image(self, image: Image, node_id: str, session_id: int, *, ahead: bool = False) -> None:
        """Return when a node has the image. Cancelling this leaves the pull; when the last waiter leaves, the pull
        stops.

        ``session_id`` needs it; ``ahead``: the session still waits in the queue.

        Raises:
            PullFailed: it could not be fetched.
            EngineSilent: the node's machine does not answer.
        """

    def fetching(self) -> Mapping[int, PullState]:
        """Return the progress of the pulls that sessions wait for, by session."""
        return {}

    async def save_image(self, spec: SaveSpec) -> SavedImage:
        """Save a running session's files, without its identity and home, as an image. After a crash it starts over.

        Raises:
            CannotSave, and whatever ``spec.check`` raises: with words for the owner.
            EngineSilent: the engine does not answer; try again.
        """
        raise CannotSave(self.capabilities.why_not_saved)

    async def rename_image(self, image: PrivateImage, reference: str) -> bool:
        """Give a saved image another name, beside its own, on every machine; return whether that is done."""
        return False

    async def delete_image(self, image: PrivateImage) -> None:
        """Remove a saved image from every machine."""

    def image_stores(self) -> Sequence[ImageStore]:
        """Return the images of each machine, for administrators' commands."""
        return ()
