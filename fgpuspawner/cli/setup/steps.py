"""The plan: what is as it should be, what is to be done, and how each is done or taken back."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fgpu_scheduler import BadSettings
from fgpuspawner.cli.setup import record as records
from fgpuspawner.cli.setup.answers import Answers, to_json
from fgpuspawner.cli.setup.files import BACKUPS, CONFIG, DAEMON, FIREWALL, HUB, PROXY, File, units
from fgpuspawner.cli.setup.machine import Machine
from fgpuspawner.cli.setup.record import Record, digest
from fgpuspawner.cli.units import unit_states

AS_IT_IS, KEEP = "as it is", "keep"
ALL_UNITS = (PROXY, HUB, FIREWALL, "fgpu-backup.timer", "fgpu-backup.service")
IMAGE = "fgpuspawner/{}:0.1"


@dataclass(frozen=True, slots=True)
class Step:
    """One line of the plan. Without ``do`` there is nothing to do."""

    verb: str
    what: str
    why: str = ""
    do: Callable[[], None] | None = None


class Setup:
    """An installation on a machine: the steps to it, and back."""

    def __init__(self, machine: Machine, record: Record, stamp: str) -> None:
        self.machine = machine
        self.record = record
        self._stamp = stamp

    # -- there -----------------------------------------------------------------------------------------------------

    def steps(self, answers: Answers, wanted: Sequence[File], labextension: str) -> list[Step]:
        """Return the plan for these answers."""
        engine = self._engine() if answers.runtime == "docker" else []
        of_files = [self._file(answers, file) for file in (*wanted, *engine)]
        changed = {
            unit for file, step in zip(wanted, of_files, strict=False) if step.do for unit in file.restarts
        }
        user = of_files[:1] + self._user(answers)
        left = [path for path in self.record.written if path not in {f.path for f in (*wanted, *engine)}]
        return [
            *user,
            *of_files[1:],
            *(self._take_away(path) for path in left),
            *self._data(answers),
            *(self._docker(of_files[-1], answers.images, labextension) if engine else []),
            *self._units(answers, changed),
        ]

    def remember(self, answers: Answers) -> None:
        """Keep what setup was told."""
        self.record.answers = to_json(answers)
        self._save()

    def _save(self) -> None:
        self._write(records.PATH, records.as_text(self.record), 0o600, None)

    def _write(self, path: str, text: str, mode: int, group: int | None) -> None:
        missing = [p for p in Path(path).parents if not self.machine.at(str(p)).is_dir()]
        self.machine.write(path, text, mode, group)
        self.record.folders += [str(p) for p in reversed(missing) if str(p) not in self.record.folders]

    def _file(self, answers: Answers, file: File) -> Step:
        there = self.machine.read(file.path)
        known = self.record.written.get(file.path)
        aside = self._aside(file.path)

        def write() -> None:
            if theirs and there is not None:
                self._keep_aside(file.path, first=known is None)
            group = self.machine.number(answers.user, of="group") if file.of_hub else 0
            self._write(file.path, file.text, file.mode, group)
            self.record.written[file.path] = digest(file.text)
            self._save()

        theirs = there is not None and known != digest(there)
        if there == file.text and not theirs and self._has_rights(answers, file):
            return Step(AS_IT_IS, file.path, file.what)
        if there is None:
            return Step("write", file.path, file.what, write)
        if there == file.text:
            theirs = False
            return Step(
                "take over",
                file.path,
                f"{file.what}: as it should be, but for who may read it or who wrote it",
                write,
            )
        if theirs and known == digest(file.text):
            return Step(KEEP, file.path, f"{file.what}: changed by you")
        kept = f"; yours is kept as {aside}" if theirs else ""
        return Step("replace", file.path, f"{file.what}{kept}", write)

    def _has_rights(self, answers: Answers, file: File) -> bool:
        found = self.machine.at(file.path).stat()
        group = self.machine.number(answers.user, of="group") if file.of_hub else 0
        return found.st_mode & 0o777 == file.mode and (
            os.geteuid() != 0 or (found.st_uid == 0 and found.st_gid == group)
        )

    def _aside(self, path: str) -> str:
        return f"{path}.before-{self._stamp}"

    def _keep_aside(self, path: str, *, first: bool) -> None:
        # With its rights and owner, and before anything is in its place.
        os.link(self.machine.at(path), self.machine.at(self._aside(path)), follow_symlinks=False)
        if first:
            self.record.before[path] = self._aside(path)

    def _engine(self) -> list[File]:
        """Return Docker's own configuration with what keeps sessions while it restarts."""
        text = self.machine.read(DAEMON)
        try:
            given = json.loads(text or "{}")
        except ValueError as e:
            raise BadSettings(f"{DAEMON} is no JSON ({e}): mend it first") from None
        if "live-restore" in given and text is not None:
            why = "sessions outlive a restart of Docker"
            return [File(DAEMON, text, why if given["live-restore"] else f"live-restore is off: not {why}")]
        merged = json.dumps({**given, "live-restore": True}, indent=2) + "\n"
        return [File(DAEMON, merged, "live-restore: sessions outlive a restart of Docker")]

    def _user(self, answers: Answers) -> list[Step]:
        name = answers.user
        groups = answers.groups_of_hub
        why = (
            f"no password, no login; its unit adds the groups {' and '.join(groups)}"
            if groups
            else "no password, no login"
        )
        if self.machine.number(name, of="passwd") is not None:
            return [Step(AS_IT_IS, f"user {name}", why)]

        def make() -> None:
            self.machine.do("systemd-sysusers", f"--root={self.machine.root}", "fgpu.conf")
            self.record.made_user = name
            self._save()

        if os.geteuid() != 0:
            return [Step(KEEP, f"user {name}", "only root makes users")]
        return [Step("make", f"user {name}", why, make)]

    def _data(self, answers: Answers) -> list[Step]:
        backups = self._own(answers, BACKUPS, "the backups, for the Hub's user alone")
        if not answers.data.startswith("/var/lib/"):
            return [self._own(answers, answers.data, "the data, for the Hub's user alone"), backups]
        why = "the data: systemd makes it when the Hub starts, for the Hub's user alone"
        return [Step(AS_IT_IS, answers.data, why), backups]

    def _own(self, answers: Answers, path: str, why: str) -> Step:
        folder = self.machine.at(path)

        def own() -> None:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
            if os.geteuid() == 0:
                numbers = [self.machine.number(answers.user, of=of) for of in ("passwd", "group")]
                self.machine.do("chown", "-R", ":".join(map(str, numbers)), folder)

        number = self.machine.number(answers.user, of="passwd")
        if folder.is_dir() and (os.geteuid() != 0 or folder.stat().st_uid == number):
            return Step(AS_IT_IS, path, why)
        return Step("make", path, why, own)

    def _docker(self, daemon: Step, images: Iterable[str], labextension: str) -> list[Step]:
        if not self.machine.is_real:
            return []
        steps = []
        if daemon.do:
            steps.append(
                Step(
                    "run",
                    "systemctl reload docker",
                    "no container ends",
                    lambda: self.machine.systemctl("reload", "docker"),
                )
            )
        extension = ["--labextension", labextension] if labextension else []
        for image in images:
            name = IMAGE.format(image)
            if self.machine.tried("docker", "image", "inspect", name).returncode == 0:
                steps.append(Step(AS_IT_IS, f"image {name}"))
                continue
            words = [sys.executable, "-m", "fgpuspawner.cli.main", "images", "build", image, *extension]

            def build(words: list[str] = words) -> None:
                self.machine.do(*words)

            steps.append(Step("build", f"image {name}", "takes minutes", build))
        return steps

    def _units(self, answers: Answers, changed: set[str]) -> list[Step]:
        wanted = units(answers)
        off = [unit for unit in wanted if not self.machine.is_on(unit)]
        # The proxy first; the firewall last, whose rules are named by what the Hub makes when it first starts.
        do = [
            unit
            for unit in (PROXY, HUB, "fgpu-backup.timer", FIREWALL)
            if unit in wanted and unit in {*off, *changed}
        ]
        steps = [Step(AS_IT_IS, unit, "starts with the machine") for unit in wanted if unit not in do]
        if self.machine.is_real and do:
            steps.append(
                Step("run", "systemctl daemon-reload", "", lambda: self.machine.systemctl("daemon-reload"))
            )
        for unit in do:
            cuts = "; notebooks connect again" if unit == PROXY and unit not in off else ""
            steps.append(
                Step(
                    "start" if unit in off else "restart",
                    unit,
                    f"and with the machine{cuts}",
                    self._starts(unit),
                )
            )
        return steps

    def _starts(self, unit: str) -> Callable[[], None]:
        def start() -> None:
            self.machine.systemctl("enable", unit)
            if self.machine.is_real:
                # Else one that failed too often is not started.
                self.machine.tried("systemctl", "reset-failed", unit)
                if self.machine.tried("systemctl", "restart", unit).returncode:
                    said = next(
                        (u.words() for u in unit_states() if u.name == unit), f"{unit} does not start"
                    )
                    raise BadSettings(f"{said}; then run fgpu setup again")

        return start

    # -- and back --------------------------------------------------------------------------------------------------

    def back(self, answers: Answers, installation: str | None) -> list[Step]:
        """Return the plan that takes it all back but the data. What no Hub ever ran has no installation."""
        steps = [
            Step(
                "stop",
                " ".join(units(answers)),
                "and not with the machine any more",
                lambda: self._stop(answers),
            )
        ]
        if self.machine.is_real and answers.runtime == "docker":
            steps.insert(0, Step("run", "fgpu firewall --remove", "the rules", self._remove_rules))
        if self.machine.is_real and answers.runtime == "docker" and installation:
            what = f"containers and networks of installation {installation}"
            steps.append(
                Step("remove", what, "such as those kept warm", lambda: self._clear_engine(installation))
            )
        steps += [self._take_away(path) for path in reversed(self.record.written)]
        if self.machine.is_real:
            steps.append(
                Step("run", "systemctl daemon-reload", "", lambda: self.machine.systemctl("daemon-reload"))
            )
        if self.record.made_user:
            steps.append(
                Step("remove", f"user {self.record.made_user}", "", lambda: self._remove_user(answers))
            )
        steps.append(Step(KEEP, answers.data, "the data, for root alone; and homes, images, backups"))
        return [*steps, Step("remove", records.PATH, "the record", self._forget)]

    def _stop(self, answers: Answers) -> None:
        there = [u for u in ALL_UNITS if self.machine.read(f"/etc/systemd/system/{u}") is not None]
        if there:
            self.machine.systemctl("disable", *(["--now"] if self.machine.is_real else []), *there)

    def _remove_rules(self) -> None:
        done = self.machine.tried(
            sys.executable,
            "-m",
            "fgpuspawner.cli.main",
            "firewall",
            "--config",
            self.machine.at(CONFIG),
            "--remove",
        )
        # Where no Hub has started there are no rules.
        if done.returncode and "when it starts" not in done.stderr:
            raise BadSettings(
                f"the firewall's rules cannot be removed: {done.stderr.strip().removeprefix('fgpu: ')}"
            )

    def _clear_engine(self, installation: str) -> None:
        # By name and label: an image can bring forged labels, but no name.
        ours = (
            "--filter",
            f"label=fgpu.installation={installation}",
            "--filter",
            f"name=^fgpu-{installation}-",
        )
        for listed, removed in ((("ps", "-aq"), ("rm", "-fv")), (("network", "ls", "-q"), ("network", "rm"))):
            if found := self.machine.do("docker", *listed, *ours).split():
                self.machine.do("docker", *removed, *found)

    def _take_away(self, path: str) -> Step:
        there = self.machine.read(path)
        before = self.record.before.get(path)
        theirs = there is not None and self.record.written[path] != digest(there)
        if theirs and path == DAEMON:
            return Step(
                KEEP, path, "changed by you since; live-restore is left in it", lambda: self._drop(path)
            )

        def take_away() -> None:
            if theirs:
                self._keep_aside(path, first=False)
            if before is not None and self.machine.at(before).exists():
                self.machine.at(before).replace(self.machine.at(path))
            else:
                self.machine.at(path).unlink(missing_ok=True)
            self._drop(path)

        kept = f"; yours is kept as {self._aside(path)}" if theirs else ""
        return Step("put back" if before else "remove", path, kept.removeprefix("; "), take_away)

    def _drop(self, path: str) -> None:
        self.record.written.pop(path, None)
        self.record.before.pop(path, None)
        self._save()

    def _remove_user(self, answers: Answers) -> None:
        # The number may be given to somebody else: the data is then closed to them. A later setup gives it to its user.
        data = self.machine.at(answers.data)
        for folder in (data, self.machine.at(BACKUPS)):
            if folder.is_dir() and os.geteuid() == 0:
                os.chown(folder, 0, 0)
                folder.chmod(0o700)
        prefix = [] if self.machine.is_real else ["--prefix", str(self.machine.root)]
        self.machine.do("userdel", *prefix, self.record.made_user)
        self.record.made_user = ""
        self._save()

    def _forget(self) -> None:
        self.machine.at(records.PATH).unlink(missing_ok=True)
        for folder in reversed(self.record.folders):
            # What somebody else has put there stays.
            with contextlib.suppress(OSError):
                self.machine.at(folder).rmdir()
