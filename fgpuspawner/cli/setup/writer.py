"""The plan of ``fgpu setup``: files, a user, folders, images and units, each with how it is done; and the way back.

The record is saved after every step, so that a setup which broke off is taken up again, or taken back.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from fgpu_scheduler import BadSettings
from fgpuspawner.cli.setup.answers import Answers
from fgpuspawner.cli.setup.files import BACKUP, BACKUPS, CONFIG, DISK, FIREWALL, UNITS, File, units
from fgpuspawner.cli.setup.machine import RECORD, VERSION, Machine, Record
from fgpuspawner.cli.units import HUB, PROXY, unit_states
from fgpuspawner.isolation.files import write_whole

DAEMON = "/etc/docker/daemon.json"
KEEPS = "sessions outlive a restart of Docker"
AS_IT_IS, KEEP = "as it is", "keep"
FGPU = (sys.executable, "-m", "fgpuspawner.cli.main")


def digest(text: str) -> str:
    """Return what tells two texts apart."""
    return hashlib.sha256(text.encode()).hexdigest()


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the plan. Without ``do`` there is nothing to do."""

    verb: str
    what: str
    why: str = ""
    do: Callable[[], object] | None = None


class Setup:
    """An installation on a machine: the steps to it, and back."""

    def __init__(self, machine: Machine, record: Record, stamp: str) -> None:
        self.machine, self.record, self._stamp = machine, record, stamp

    def steps(self, answers: Answers, wanted: Sequence[File], labextension: str) -> list[Step]:
        """Return the plan for these answers."""
        every = [*wanted, *([self._engine()] if answers.runtime == "docker" else [])]
        of_files = [self._file(answers, file) for file in every]
        changed = {u for file, step in zip(every, of_files, strict=True) if step.do for u in file.restarts}
        left = [path for path in self.record.written if path not in {file.path for file in every}]
        return [
            of_files[0],
            self._user(answers),
            *of_files[1:],
            *map(self._take_away, left),
            *self._folders(answers),
            *(self._docker(of_files[-1], answers.images, labextension) if len(every) > len(wanted) else []),
            *self._units(answers, changed),
        ]

    def remember(self, answers: Answers) -> None:
        """Keep what setup was told."""
        self.record.answers = asdict(answers)
        self._save()

    def _save(self) -> None:
        text = json.dumps({"version": VERSION, **asdict(self.record)}, indent=1, sort_keys=True)
        self._write(File(RECORD, f"{text}\n", "", 0o600), 0)

    def _write(self, file: File, group: int | None) -> None:
        place = self.machine.at(file.path)
        missing = [str(p) for p in Path(file.path).parents if not self.machine.at(str(p)).is_dir()]
        place.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
        # Others may read it only once it has its owner.
        write_whole(place, file.text.encode(), mode=0o600)
        if group is not None and os.geteuid() == 0:
            os.chown(place, 0, group)
        place.chmod(file.mode)
        self.record.folders += [p for p in reversed(missing) if p not in self.record.folders]

    def _group(self, answers: Answers, file: File) -> int | None:
        return self.machine.number(answers.user, of="group") if file.mode == 0o640 else 0

    def _file(self, answers: Answers, file: File) -> Step:
        there, known = self.machine.read(file.path), self.record.written.get(file.path)
        theirs = there not in (None, file.text) and known != digest(there or "")

        def write() -> None:
            if theirs:
                self._keep_aside(file.path, first=known is None)
            self._write(file, self._group(answers, file))
            self.record.written[file.path] = digest(file.text)
            self._save()

        if there is None:
            return Step("write", file.path, file.what, write)
        if there == file.text:
            found, group = self.machine.at(file.path).stat(), self._group(answers, file)
            owned = os.geteuid() != 0 or (found.st_uid == 0 and found.st_gid == group)
            if known == digest(there) and found.st_mode & 0o777 == file.mode and owned:
                return Step(AS_IT_IS, file.path, file.what)
            why = f"{file.what}: as it should be, but for who may read it or who wrote it"
            return Step("take over", file.path, why, write)
        if theirs and known == digest(file.text):
            return Step(KEEP, file.path, f"{file.what}: changed by you")
        kept = f"; yours is kept as {self._aside(file.path)}" if theirs else ""
        return Step("replace", file.path, f"{file.what}{kept}", write)

    def _aside(self, path: str) -> str:
        return f"{path}.before-{self._stamp}"

    def _keep_aside(self, path: str, *, first: bool) -> None:
        # With its rights and owner, and before anything is in its place.
        os.link(self.machine.at(path), self.machine.at(self._aside(path)), follow_symlinks=False)
        if first:
            self.record.before[path] = self._aside(path)

    def _engine(self) -> File:
        text = self.machine.read(DAEMON)
        try:
            given = json.loads(text or "{}")
        except ValueError as e:
            raise BadSettings(f"{DAEMON} is no JSON ({e}): mend it first") from None
        if text is not None and "live-restore" in given:
            return File(DAEMON, text, KEEPS if given["live-restore"] else f"live-restore is off: not {KEEPS}")
        merged = json.dumps({**given, "live-restore": True}, indent=2)
        return File(DAEMON, f"{merged}\n", f"live-restore: {KEEPS}")

    def _user(self, answers: Answers) -> Step:
        groups = " and ".join(answers.groups_of_hub)
        why = f"no password, no login{f'; its unit adds the groups {groups}' if groups else ''}"
        if self.machine.number(answers.user, of="passwd") is not None:
            return Step(AS_IT_IS, f"user {answers.user}", why)
        if os.geteuid() != 0:
            return Step(KEEP, f"user {answers.user}", "only root makes users")

        def make() -> None:
            self.machine.do("systemd-sysusers", f"--root={self.machine.root}", "fgpu.conf")
            self.record.made_user = answers.user
            self._save()

        return Step("make", f"user {answers.user}", why, make)

    def _folders(self, answers: Answers) -> list[Step]:
        backups = self._own(answers, BACKUPS, "the backups, for the Hub's user alone")
        if not answers.in_var_lib:
            return [self._own(answers, answers.data, "the data, for the Hub's user alone"), backups]
        why = "the data: systemd makes it when the Hub starts, for the Hub's user alone"
        return [Step(AS_IT_IS, answers.data, why), backups]

    def _own(self, answers: Answers, path: str, why: str) -> Step:
        folder = self.machine.at(path)
        number = self.machine.number(answers.user, of="passwd")

        def own() -> None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            if os.geteuid() == 0:
                numbers = [self.machine.number(answers.user, of=of) for of in ("passwd", "group")]
                self.machine.do("chown", "-R", ":".join(map(str, numbers)), folder)

        if folder.is_dir() and (os.geteuid() != 0 or folder.stat().st_uid == number):
            return Step(AS_IT_IS, path, why)
        return Step("make", path, why, own)

    def _run(self, *words: str, why: str = "") -> Step:
        return Step("run", " ".join(words), why, lambda: self.machine.do(*words))

    def _docker(self, daemon: Step, images: Iterable[str], labextension: str) -> list[Step]:
        if not self.machine.is_real:
            return []
        steps = [self._run("systemctl", "reload", "docker", why="no container ends")] if daemon.do else []
        extension = ["--labextension", labextension] if labextension else []
        for image in images:
            name, words = f"fgpuspawner/{image}:0.1", [*FGPU, "images", "build", image, *extension]
            if self.machine.tried("docker", "image", "inspect", name).returncode == 0:
                steps.append(Step(AS_IT_IS, f"image {name}"))
            else:
                build = partial(self.machine.do, *words)
                steps.append(Step("build", f"image {name}", "takes minutes", build))
        return steps

    def _units(self, answers: Answers, changed: set[str]) -> list[Step]:
        wanted = units(answers)
        off = [unit for unit in wanted if not self.machine.is_on(unit)]
        # The proxy first. The firewall last: its rules carry an id that the Hub makes at its first start.
        do = [u for u in (PROXY, HUB, BACKUP, DISK, FIREWALL) if u in wanted and u in {*off, *changed}]
        steps = [Step(AS_IT_IS, unit, "starts with the machine") for unit in wanted if unit not in do]
        if self.machine.is_real and do:
            steps.append(self._run("systemctl", "daemon-reload"))
        for unit in do:
            verb = "start" if unit in off else "restart"
            cuts = "; notebooks connect again" if unit == PROXY and unit not in off else ""
            steps.append(Step(verb, unit, f"and with the machine{cuts}", partial(self._start, unit)))
        return steps

    def _start(self, unit: str) -> None:
        self.machine.do("systemctl", "enable", unit)
        if self.machine.is_real:
            # Else one that failed too often is not started.
            self.machine.tried("systemctl", "reset-failed", unit)
            if self.machine.tried("systemctl", "restart", unit).returncode:
                said = [u.words() for u in unit_states() if u.name == unit]
                raise BadSettings(
                    f"{said[0] if said else f'{unit} does not start'}; then run fgpu setup again"
                )

    # -- and back --------------------------------------------------------------------------------------------------

    def back(self, answers: Answers, installation: str | None) -> list[Step]:
        """Return the plan that takes it all back but the data. What no Hub ever ran has no installation."""
        real, docker, steps = self.machine.is_real, answers.runtime == "docker", list[Step]()
        if real and docker:
            steps.append(Step("run", "fgpu firewall --remove", "the rules", self._remove_rules))
        steps.append(Step("stop", " ".join(units(answers)), "and not with the machine any more", self._stop))
        if real and docker and installation:
            what = f"containers and networks of installation {installation}"
            steps.append(
                Step("remove", what, "such as those kept warm", partial(self._clear_engine, installation))
            )
        steps += map(self._take_away, reversed(self.record.written))
        if real:
            steps.append(self._run("systemctl", "daemon-reload"))
        if user := self.record.made_user:
            steps.append(Step("remove", f"user {user}", "", partial(self._remove_user, answers)))
        steps.append(Step(KEEP, answers.data, "the data, for root alone; and homes, images, backups"))
        return [*steps, Step("remove", RECORD, "the record", self._forget)]

    def _stop(self) -> None:
        every = (PROXY, HUB, FIREWALL, DISK, "fgpu-disk.service", BACKUP, "fgpu-backup.service")
        there = [unit for unit in every if self.machine.read(f"{UNITS}/{unit}") is not None]
        if there:
            self.machine.do("systemctl", "disable", *(["--now"] if self.machine.is_real else []), *there)

    def _remove_rules(self) -> None:
        done = self.machine.tried(*FGPU, "firewall", "--config", self.machine.at(CONFIG), "--remove")
        # Where no Hub has started there are no rules.
        if done.returncode and "when it starts" not in done.stderr:
            said = done.stderr.strip().removeprefix("fgpu: ")
            raise BadSettings(f"the firewall's rules cannot be removed: {said}")

    def _clear_engine(self, installation: str) -> None:
        # By name and label: an image can bring forged labels, but no name.
        label, name = f"label=fgpu.installation={installation}", f"name=^fgpu-{installation}-"
        for listed, removed in ((("ps", "-aq"), ("rm", "-fv")), (("network", "ls", "-q"), ("network", "rm"))):
            if found := self.machine.do("docker", *listed, "--filter", label, "--filter", name).split():
                self.machine.do("docker", *removed, *found)

    def _take_away(self, path: str) -> Step:
        there, before = self.machine.read(path), self.record.before.get(path)
        theirs = there is not None and self.record.written[path] != digest(there)
        if theirs and path == DAEMON:
            why = "changed by you since; live-restore is left in it"
            return Step(KEEP, path, why, partial(self._drop, path))

        def take_away() -> None:
            if theirs:
                self._keep_aside(path, first=False)
            if before is not None and self.machine.at(before).exists():
                self.machine.at(before).replace(self.machine.at(path))
            else:
                self.machine.at(path).unlink(missing_ok=True)
            self._drop(path)

        kept = f"yours is kept as {self._aside(path)}" if theirs else ""
        return Step("put back" if before else "remove", path, kept, take_away)

    def _drop(self, path: str) -> None:
        self.record.written.pop(path, None)
        self.record.before.pop(path, None)
        self._save()

    def _remove_user(self, answers: Answers) -> None:
        # Its number may be given to another user: the data is closed to them. A later setup gives it to its own user.
        for folder in map(self.machine.at, (answers.data, BACKUPS)):
            if folder.is_dir() and os.geteuid() == 0:
                os.chown(folder, 0, 0)
                folder.chmod(0o700)
        prefix = [] if self.machine.is_real else ["--prefix", str(self.machine.root)]
        self.machine.do("userdel", *prefix, self.record.made_user)
        self.record.made_user = ""
        self._save()

    def _forget(self) -> None:
        self.machine.at(RECORD).unlink(missing_ok=True)
        for folder in reversed(self.record.folders):
            # What is not ours in there stays.
            with contextlib.suppress(OSError):
                self.machine.at(folder).rmdir()
