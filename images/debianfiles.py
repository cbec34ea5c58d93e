"""The files of this machine's own Debian packages, copied into a folder that becomes an image's root."""

from __future__ import annotations

import functools
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

USER, UID, HOME = "jovyan", 1000, "home/jovyan"
PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
# What a server, a kernel and a terminal need; what these depend on comes along.
PACKAGES = (
    "base-files",
    "bash",
    "ca-certificates",
    "coreutils",
    "dash",
    "debianutils",
    "findutils",
    "grep",
    "gzip",
    "hostname",
    "libc-bin",
    "libgcc-s1",
    # Compiled Python packages bring no C++ library of their own.
    "libstdc++6",
    f"lib{PYTHON}-stdlib",
    "mawk",
    "media-types",
    "ncurses-base",
    "ncurses-bin",
    "procps",
    f"{PYTHON}-minimal",
    "sed",
    "tar",
    "tini",
)
# What people expect in a terminal, and `python -m venv`: each is copied where this machine has it.
TOOLS = ("curl", "git", "less", "nano", f"{PYTHON}-venv")
# Needed to configure packages on a machine, not to run programs out of them; and the few programs of git in Perl.
LEFT_OUT = re.compile(
    r"debconf|cdebconf|dpkg|init-system-helpers|install-info|openssl|perl.*|liberror-perl|git-man"
)
# Manual pages and the like are useless in a container. Licences stay.
UNWANTED = re.compile(
    r"usr/share/(man|info|locale|lintian|bug|doc-base|menu|bash-completion)(/|$)"
    r"|usr/share/doc/(?!.*/copyright$)"
    r"|usr/lib/python3[^/]*/(test|idlelib|turtledemo)(/|$)"
    r"|lib/systemd(/|$)|usr/lib/systemd(/|$)|etc/(init\.d|cron[^/]*|apt|dpkg)(/|$)"
)
MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")


class CannotBuild(Exception):
    """This machine cannot make the image; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Package:
    """An installed Debian package."""

    name: str
    version: str
    depends: str
    provides: str


def run(arguments: Sequence[str], **environment: str) -> str:
    """Return what the command printed; a failure is `CannotBuild` with its last words."""
    done = subprocess.run(
        arguments,
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        env={**os.environ, **environment},
    )
    if done.returncode != 0:
        said = (done.stderr.strip() or done.stdout.strip() or "no output")[-2000:]
        raise CannotBuild(f"{arguments[0]} {arguments[1]} failed ({done.returncode}): {said}")
    return done.stdout


@functools.cache
def installed() -> Mapping[str, Package]:
    """Return every installed package by its plain name."""
    asked = ["db:Status-Abbrev", "binary:Package", "Version", "Depends", "Pre-Depends", "Provides"]
    form = "\t".join(f"${{{field}}}" for field in asked) + "\n"
    packages = {}
    for line in run(["dpkg-query", "-W", "-f", form]).splitlines():
        status, name, version, depends, pre_depends, provides = line.split("\t")
        # Also a package on hold, or one with triggers that another installation still has to run.
        if status[1] in "iWt":
            packages[name.partition(":")[0]] = Package(name, version, f"{depends}, {pre_depends}", provides)
    return packages


def names(relation: str) -> Iterable[str]:
    """Yield the package names of one side of a dependency field, without versions."""
    for part in relation.split("|"):
        name = re.split(r"[\s(:\[]", part.strip(), maxsplit=1)[0]
        if name:
            yield name


def closure(*, tools: bool) -> list[Package]:
    """Return the packages that go in, with what they depend on, sorted by name; with ``tools`` also `TOOLS`."""
    have = installed()
    lacking = sorted(name for name in PACKAGES if name not in have)
    if lacking:
        raise CannotBuild(f"not installed: apt-get install {' '.join(lacking)}")
    providers: dict[str, str] = {}
    for name in sorted(have):
        for relation in have[name].provides.split(","):
            for provided in names(relation):
                providers.setdefault(provided, name)
    chosen: dict[str, Package] = {}
    waiting = [*PACKAGES, *(name for name in TOOLS if tools and name in have)]
    while waiting:
        name = waiting.pop()
        if name in chosen or LEFT_OUT.fullmatch(name):
            continue
        chosen[name] = have[name]
        for relation in have[name].depends.split(","):
            choices = list(names(relation))
            found = [choice for choice in choices if choice in have]
            found += [providers[choice] for choice in choices if choice in providers]
            if found and not any(LEFT_OUT.fullmatch(choice) for choice in choices):
                waiting.append(found[0])
    return [chosen[name] for name in sorted(chosen)]


def copy_packages(packages: Sequence[Package], root: Path) -> None:
    """Copy the packages' files into `root`, in a merged /usr whatever their lists say."""
    for top in MERGED:
        source = Path("/", top)
        if source.is_symlink():
            (root / "usr" / top).mkdir(parents=True, exist_ok=True)
            (root / top).symlink_to(f"usr/{top}")
    for package in packages:
        for line in run(["dpkg-query", "-L", package.name]).splitlines():
            # Lines about diversions are prose.
            if not line.startswith("/") or line == "/.":
                continue
            relative = line.lstrip("/")
            if relative.partition("/")[0] in MERGED:
                relative = f"usr/{relative}"
            if not UNWANTED.match(relative):
                copy_entry(Path(line), root / relative)


def copy_entry(source: Path, target: Path) -> None:
    """Copy one file, link or folder of a package; what an administrator deleted stays away."""
    try:
        mode = source.lstat().st_mode
    except FileNotFoundError:
        return
    if stat.S_ISDIR(mode):
        target.mkdir(parents=True, exist_ok=True)
        return
    if target.is_symlink() or target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISLNK(mode):
        # A package's folder under the merged /bin may be listed through the link.
        if not source.is_dir() or target.parent.resolve() != target.resolve():
            target.symlink_to(os.readlink(source))
    elif stat.S_ISREG(mode):
        shutil.copy2(source, target)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    path.write_text(text, encoding="utf-8")


def make_system_files(root: Path) -> None:
    """Write what package scripts would have written: accounts, names, certificates, links."""
    write(
        root / "etc/passwd",
        "root:x:0:0:root:/root:/bin/bash\n"
        "nobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n"
        f"{USER}:x:{UID}:{UID}:{USER}:/{HOME}:/bin/bash\n",
    )
    # 5 is the terminals' group on Debian: a pseudo-terminal is handed to it by name.
    write(
        root / "etc/group",
        f"root:x:0:\ntty:x:5:\nusers:x:100:\nnogroup:x:65534:\n{USER}:x:{UID}:\n",
    )
    # Without "files" the C library would not even look at /etc/hosts.
    write(
        root / "etc/nsswitch.conf",
        "passwd: files\ngroup: files\nshadow: files\nhosts: files dns\n"
        "networks: files\nprotocols: files\nservices: files\n",
    )
    # The distribution's own authorities, without those that only this machine trusts.
    authorities = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    write(
        root / "etc/ssl/certs/ca-certificates.crt",
        "".join(path.read_text(encoding="ascii").rstrip("\n") + "\n" for path in authorities),
    )
    # Where Debian's OpenSSL looks; the package that makes these links is not here.
    ssl = root / "usr/lib/ssl"
    ssl.mkdir(parents=True, exist_ok=True)
    (ssl / "cert.pem").symlink_to("/etc/ssl/certs/ca-certificates.crt")
    (ssl / "certs").symlink_to("/etc/ssl/certs")
    links = {"python3": PYTHON, "awk": "mawk", "sh": "dash", "which": "which.debianutils"}
    # What git starts for a message, and for a long output.
    alternatives = {"editor": "nano", "pager": "less"}
    links |= {name: tool for name, tool in alternatives.items() if (root / "usr/bin" / tool).exists()}
    for program, goal in links.items():
        name = f"usr/bin/{program}"
        if not (root / name).is_symlink():
            (root / name).symlink_to(goal)
    for folder in ("dev", "mnt", "proc", "root", "run", "srv", "sys", "tmp", "var/tmp", HOME):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for skeleton in (root / "etc/skel").glob(".*"):
        shutil.copy2(skeleton, root / HOME / skeleton.name)


def make_loader_cache(root: Path) -> None:
    """Let ldconfig list the libraries: `ctypes.util.find_library` reads that list."""
    ldconfig = ["ldconfig", "-r", str(root), "-X"]
    path = f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin"
    if os.geteuid() != 0:
        ldconfig = ["unshare", "--map-root-user", *ldconfig]
    run(ldconfig, PATH=path)
    # Inode numbers and times of this machine.
    shutil.rmtree(root / "var/cache/ldconfig", ignore_errors=True)
