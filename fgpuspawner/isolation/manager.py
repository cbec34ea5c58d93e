"""Isolation as the Hub uses it: each node's backend, and the files of each session."""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fgpu_scheduler import Device, Node, Session
from fgpuspawner.isolation import facts, lending, limits, native
from fgpuspawner.isolation.backends import BACKENDS, REGION_BYTES
from fgpuspawner.isolation.base import Backend, CannotPrepare, Host, Prepared
from fgpuspawner.isolation.choice import AUTO, Choice, choose, write_choices
from fgpuspawner.isolation.files import make_folder, remove_folder, write_whole
from fgpuspawner.isolation.limits import BadLimits, Limits
from fgpuspawner.settings import FGPU

log = logging.getLogger("fgpu.isolation")

LOG_MOST_BYTES = 1 << 20
_SMALLEST_FILE_BYTES = 4096  # One block of the file system.
LEDGER_BYTES = 26_406_912
"""Size of ``struct ledger`` in isolation/simulated/machine.h."""


def make_backends(host: Host) -> dict[str, Backend]:
    """Return every kind of backend for a host, by its name."""
    return {kind.name: kind(host) for kind in BACKENDS}


def find_host(settings: FGPU, nodes: Collection[Node], *, own_root: bool, installation: str = "") -> Host:
    """Return what this machine offers. Asks the driver only if there are real GPUs; writes nothing."""
    real = [d for n in nodes for d in n.devices if not d.simulated and not settings.is_elsewhere(n.id)]
    driver = facts.driver_facts() if real else {}
    pipe = Path(settings.mps_pipe_directory) if settings.mps_pipe_directory else None
    accounting = facts.memory_place(installation, settings.accounting_dir) if installation else None
    return Host(
        data=settings.data_path(),
        own_root=own_root,
        native=native.find(),
        accounting=accounting,
        driver=str(driver.get("driver", "")),
        memory_limits=bool(driver.get("memory_limits")),
        as_root=os.geteuid() == 0,
        cgroup_v2=facts.CGROUP_V2.exists(),
        mps_pipe=pipe,
        mps_trouble=facts.mps_trouble(pipe) if pipe and settings.isolation == "mps" else None,
        managed=settings.managed_memory,
        opencl=settings.opencl == "allow",
        # Only through memory: on the Hub's disk a session could make the file of its word grow until it is cut back.
        lends=settings.compute == "elastic" and (accounting is not None or not installation),
        # The same holds for the word by which a parked session asks for its GPU.
        parks=settings.parked_memory_mib > 0 and (accounting is not None or not installation),
        most_percent=settings.max_percent,
    )


def choices_for(settings: FGPU, nodes: Collection[Node], *, own_root: bool) -> tuple[Choice, ...]:
    """Return each node's backend without changing anything, for the command line.

    Raises:
        BadSettings: no backend works for a node.
    """
    backends = make_backends(find_host(settings, nodes, own_root=own_root))
    return tuple(choose(settings.isolation, node, backends) for node in nodes)


def host_elsewhere(host: Host) -> Host:
    """Return what another machine offers: containers, files copied there, and nothing that needs its driver."""
    return replace(
        host,
        own_root=True,
        elsewhere=True,
        lends=False,
        parks=False,
        driver="",
        memory_limits=False,
        mps_pipe=None,
    )


class Isolation:
    """Chooses each node's backend and writes the files of sessions. One for the life of the Hub.

    `open` blocks, as the Hub's start does. Call the other methods from any thread.
    """

    def __init__(self, settings: FGPU, nodes: tuple[Node, ...]) -> None:
        self._settings = settings
        self._nodes: Mapping[str, Node] = {node.id: node for node in nodes}
        self._folder = settings.data_path() / "limits"
        # Held while slots are assigned: each assignment must see the limits files that the one before it wrote.
        self._preparing = threading.Lock()
        #: By node id.
        self.choices: Mapping[str, Choice] = {}
        #: What `charge_code` was last told, by session.
        self.code_mib: dict[int, Mapping[str, int]] = {}

    def open(self, *, own_root: bool, installation: str) -> None:
        """Choose and log each node's backend, and write the files that all sessions share.

        Raises:
            BadSettings: no backend works for a node.
            UnsafeFolder: a folder in the way belongs to another user.
        """
        host = find_host(self._settings, self._nodes.values(), own_root=own_root, installation=installation)
        if host.native is not None:
            host = replace(host, native=native.readable_by_all(host.native, host.data))
        self._choose_backends(replace(host, commands=native.install_commands(host.data)), self._nodes)

    def add_node(self, node: Node) -> None:
        """Choose the backend of a node on another machine that is new or has other devices.

        Raises:
            BadSettings: no backend works for it; nothing has changed.
        """
        with self._preparing:
            self._choose_backends(self.host, {**self._nodes, node.id: node}, only=node.id)

    def forget_nodes(self, node_ids: Collection[str]) -> None:
        """Forget removed nodes. Sessions that still run there can only be ended."""
        with self._preparing:
            self._nodes = {name: node for name, node in self._nodes.items() if name not in node_ids}
            self.choices = {name: one for name, one in self.choices.items() if name not in node_ids}
            write_choices(self.host.data, self.choices.values())

    def _choose_backends(self, host: Host, nodes: Mapping[str, Node], *, only: str | None = None) -> None:
        """Choose the backend of all nodes, or of one new node, and write the files that their sessions share."""
        new = [n for n in nodes.values() if only in (None, n.id)]
        chosen = {n.id: choose(self._settings.isolation, n, self._backends_of(n.id, host)) for n in new}
        for choice in chosen.values():
            level = logging.WARNING if choice.loud else logging.INFO
            log.log(level, "Node %s: isolation %s: %s", choice.node_id, choice.backend.name, choice.reason)
        for node in new:
            if host.native is not None and any(d.simulated for d in node.devices):
                memory = None if self.is_elsewhere(node.id) else host.accounting
                native.write_machine(host.data, node, host.native, memory)
        self._nodes, self.choices = nodes, {**self.choices, **chosen}
        self.host = replace(host, context_mib=self._context_mib(host))
        self._backends = make_backends(self.host)
        self.choices = {
            node_id: replace(c, backend=self._backends_of(node_id, self.host)[c.backend.name])
            for node_id, c in self.choices.items()
        }
        write_choices(host.data, self.choices.values())

    def is_elsewhere(self, node_id: str) -> bool:
        return self._settings.is_elsewhere(node_id)

    def _backends_of(self, node_id: str, host: Host) -> dict[str, Backend]:
        return make_backends(host_elsewhere(host) if self.is_elsewhere(node_id) else host)

    def _context_mib(self, host: Host) -> dict[str, int]:
        """Return the memory to charge for a CUDA context, by device UUID, for the devices that a backend limits."""
        limited = [
            d for n in self._nodes.values() for d in n.devices if self.choices[n.id].backend.name != "none"
        ]
        real = [d for d in limited if not d.simulated and not self.is_elsewhere(d.node_id)]
        if self._settings.context_mib != AUTO:
            return {d.uuid: int(self._settings.context_mib) for d in limited}
        found = {
            d.uuid: native.SIMULATED_CONTEXT_MIB if d.simulated else facts.CONTEXT_GUESS_MIB for d in limited
        }
        if real:
            found |= facts.measure_contexts(real, driver=host.driver, data=host.data)
        return found

    def backend_of(self, session: Session) -> Backend:
        """Return the backend of a session that has its shares.

        Raises:
            CannotPrepare: its node is no longer configured.
        """
        assert session.placement is not None
        choice = self.choices.get(session.placement.node_id)
        if choice is None:
            raise CannotPrepare(f"node {session.placement.node_id} was removed; ask for a new session")
        return choice.backend

    @property
    def lending(self) -> frozenset[str]:
        """The nodes on which idle compute is lent."""
        return frozenset(node_id for node_id, choice in self.choices.items() if choice.backend.lends)

    @property
    def parking(self) -> frozenset[str]:
        """The nodes on which sessions can be parked."""
        return frozenset(node_id for node_id, choice in self.choices.items() if not choice.backend.unparkable)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self._nodes.values())

    def devices_of(self, session: Session) -> tuple[Device, ...]:
        assert session.placement is not None
        node = self._nodes.get(session.placement.node_id)
        return tuple(d for d in (node.devices if node else ()) if d.uuid in session.device_uuids)

    def prepare(self, session: Session, live: Collection[int]) -> Prepared:
        """Write a session's files for a launch, with slots beside those of the ``live`` sessions.

        Slots are stored only in the limits files of live sessions. They are written before the launch, so they survive
        a crash of the Hub.

        Raises:
            CannotPrepare: with words for the owner.
        """
        with self._preparing:
            self._prune(live)
            neighbours = self._neighbours(session.id)
            prepared = self.backend_of(session).prepare(session, self.devices_of(session), neighbours)
            own = prepared.limits
            self._publish_lenders([*neighbours, limits.parked(own) if session.request.on_demand else own])
            return prepared

    def resizes(self, session: Session) -> str | None:
        """Return why a running session's slice cannot change, in words for its owner, or None if it can."""
        try:
            return self.backend_of(session).fixed or None
        except CannotPrepare as e:
            return str(e)

    def resize(self, session: Session) -> Limits:
        """Make the limits of a running session match its shares, also for its running processes; return them.

        Raises:
            BadLimits, OSError: the limits cannot change; the old ones stay in force.
        """
        with self._preparing:
            own, neighbours = self.folder(session.id), self._neighbours(session.id)
            before = limits.read(own)
            after = limits.resized(before, session, neighbours)
            # Write equal limits too: a Hub may have died after it wrote them and before it raised their revision.
            limits.change(own, after)
            self._publish_lenders([*neighbours, after])
            return after

    def parks(self, session: Session) -> str | None:
        """Return why a session cannot be parked, in words for its owner, or None if it can."""
        try:
            why = self.backend_of(session).unparkable
        except CannotPrepare as e:
            return str(e)
        if not why and not lending.has_word(self.host.memory, str(session.id)):
            return "it was started before sessions could be parked here, and could not ask for its GPU"
        return why or None

    def gpu_is_wanted(self, session_id: int) -> bool:
        """Return whether a CUDA call of a parked session waits for its GPU now."""
        return lending.is_wanted(self.host.memory, str(session_id))

    def close_gate(self, session_id: int) -> None:
        """Make a session's CUDA calls wait, from their next one on, until `open_gate`; idempotent.

        Raises:
            BadLimits, OSError: it has no gate, or no files any longer.
        """
        with self._preparing:
            limits.close_gate(self.folder(session_id))

    def open_gate(self, session: Session) -> None:
        """Let a session's CUDA calls go on, in slots beside those of its present neighbours; idempotent.

        While its gate was closed, neighbours may have taken the slots that it had.

        Raises:
            BadLimits, OSError: the limits cannot change.
        """
        with self._preparing:
            own, neighbours = self.folder(session.id), self._neighbours(session.id)
            after = limits.rejoined(limits.read(own), neighbours)
            limits.change(own, after)
            limits.open_gate(own)
            self._publish_lenders([*neighbours, after])

    def charge_code(self, session_id: int, counted_mib: Mapping[str, int]) -> None:
        """Take memory off what a running session may allocate: that of the code of its kernels, by device.

        A session with limits that cannot change, or do not charge code, keeps what it has.

        Raises:
            BadLimits, OSError: the limits could not be changed.
        """
        with self._preparing:
            own = self.folder(session_id)
            before = limits.read(own)
            devices = [
                d if d.code_mib is None else replace(d, code_mib=counted_mib.get(d.uuid, d.code_mib))
                for d in before.devices
            ]
            after = replace(before, devices=tuple(devices))
            if after != before and (own / limits.REVISION).is_file():
                limits.change(own, after)
            self.code_mib[session_id] = {d.uuid: d.code_mib or 0 for d in devices}

    def _publish_lenders(self, sessions: Sequence[Limits]) -> None:
        try:
            lending.publish(self.host.memory, sessions)
        except OSError as e:
            log.warning("The owners of compute that can be lent could not be written: %s", e)

    def _neighbours(self, session_id: int | None = None) -> list[Limits]:
        found: list[Limits] = []
        for own in sorted(self._folders(), key=lambda path: int(path.name)):
            if int(own.name) != session_id:
                try:
                    one = limits.read(own)
                    found.append(limits.parked(one) if limits.gate_closed(own) else one)
                except (BadLimits, OSError) as e:
                    # Its slots are unknown, so other sessions may get the same ones.
                    log.warning("The slots of session %s are not known: %s", own.name, e)
        return found

    def _folders(self) -> list[Path]:
        return _of_sessions(self._folder)

    def prune(self, live: Collection[int]) -> None:
        with self._preparing:
            self._prune(live)
            self._publish_lenders(self._neighbours())

    def _prune(self, live: Collection[int]) -> None:
        places = (self._folder, self.host.memory, self.host.memory / lending.FOLDER)
        left = {int(path.name) for place in places for path in _of_sessions(place)}
        for session_id in sorted(left - set(live)):
            self.remove(session_id)

    def remove(self, session_id: int) -> None:
        """Remove the files of a session that is gone; idempotent."""
        # The setting may have changed since the session's start, so every backend removes its files.
        for backend in self._backends.values():
            backend.teardown(session_id)
        self.code_mib.pop(session_id, None)

    def close(self) -> None:
        """Remove the folder in memory unless a session or a warm container uses it."""
        # A folder that cannot be read may hold sessions' files, so it stays.
        with contextlib.suppress(OSError):
            if not self._folders() and not lending.names(self.host.memory):
                remove_folder(self.host.memory)

    def folder(self, session_id: int) -> Path:
        return self._folder / str(session_id)

    # -- warm containers ------------------------------------------------------------------------------

    def words_folder(self, name: str) -> Path:
        """Return the folder of the words by which a session or warm container lends compute."""
        return lending.folder_of(self.host.memory, name)

    def make_warm(self, name: str, files: Collection[tuple[str, int, str | None]], *, words: int = 0) -> Path:
        """Write the files of a container that no session has yet: these ``files``, and limits that allow nothing.

        ``words`` is the number of devices to make lending words for, 0 if its session may not lend. Returns its folder.
        """
        if words or self.host.parks:
            lending.make_words(self.host.memory, name, words, parks=self.host.parks)
        folder = make_folder(self._folder / name, mode=0o755)
        for path, mode, content in sorted(files):
            if content is None:
                make_folder(folder / path, mode=mode)
            else:
                write_whole(folder / path, content.encode(), mode=mode)
        write_whole(folder / limits.NAME, limits.NOTHING.encode(), mode=0o444)
        return folder

    def adopt(self, session_id: int, name: str) -> None:
        """Turn a warm container's files into those of a prepared session, with the session's limits.

        The files are mounted already, so their content changes in place.
        """
        with self._preparing:
            warm, own = self._folder / name, self.folder(session_id)
            text = limits.render(limits.read(own)).encode()
            (warm / limits.NAME).chmod(0o644)
            (warm / limits.NAME).write_bytes(text)
            (warm / limits.NAME).chmod(0o444)
            remove_folder(own)
            warm.rename(own)
            lending.take_over(self.host.memory, name, session_id)
            self._publish_lenders(self._neighbours())

    def forget_warm(self, name: str | None = None) -> None:
        """Remove the files of a warm container that is gone; without a name those of all warm containers."""
        warm = [path.name for path in self._folder.iterdir()] if self._folder.is_dir() else []
        for one in {*warm, *lending.names(self.host.memory)}:
            if one == name or (name is None and not one.isdigit()):
                remove_folder(self._folder / one)
                remove_folder(lending.folder_of(self.host.memory, one))

    def trim_files(self) -> None:
        """Truncate files that sessions let grow: logs and accounts of local processes, and shared ledgers.

        Without this a session could fill the host's memory or disk. Sizes are counted in blocks, because a file can
        have blocks behind its end.
        """
        logs = [path / "log" for path in self._folders()]
        logs += [native.machine_folder(self.host.data, node_id) / "log" for node_id in self._nodes]
        for path in logs:
            _trim(path, most=LOG_MOST_BYTES, to=0)
        for node_id in self._nodes:
            ledger = (native.machine_folder(self.host.data, node_id) / native.LEDGER).resolve()
            if _trim(ledger, most=LEDGER_BYTES, to=LEDGER_BYTES):
                log.warning("Sessions have let the ledger of node %s grow; it was cut back", node_id)
        for word in lending.words(self.host.memory):
            _trim(word, most=_SMALLEST_FILE_BYTES, to=lending.WORD_BYTES)
        for folder in _of_sessions(self.host.memory):
            if _trim(folder / "accounting", most=REGION_BYTES, to=REGION_BYTES):
                log.warning("Session %s has let its accounting file grow; it was cut back", folder.name)


def _trim(path: Path, *, most: int, to: int) -> bool:
    try:
        seen = path.lstat()
        if not stat.S_ISREG(seen.st_mode) or max(seen.st_size, seen.st_blocks * 512) <= most:
            return False
        # Truncation drops the blocks behind the end, even to the current size.
        os.truncate(path, to)
    except OSError:
        return False
    return True


def _of_sessions(folder: Path) -> list[Path]:
    try:
        return [p for p in folder.iterdir() if p.name.isascii() and p.name.isdigit()]
    except FileNotFoundError:
        return []
