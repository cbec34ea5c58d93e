"""The default image made of this machine's own Debian packages, without a registry.

    images/hostimage.py inputs [OPTION]...            prints a hash of all that goes in
    images/hostimage.py write [OPTION]... --out FILE  writes the archive that `docker load` reads

The same inputs give the same bytes, so the same image id, on any day: paths are sorted, times are
fixed, owners are ours, and byte code is compiled here with hashes for times. It runs under Debian's
own interpreter because that one goes into the image. Standard library only; images/build.sh is the
command for people.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import os
import platform
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
SERVER_FILES = ("fgpu_lazy_imports.py", "fgpu_lazy_imports.pth")
PREFIX = "opt/fgpu"
USER, UID, HOME = "jovyan", 1000, "home/jovyan"

# 2020-01-01: some programs refuse files from before 1980.
FIXED_TIME_S = 1_577_836_800
FIXED_TIME_TEXT = "2020-01-01T00:00:00Z"

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
# Needed to configure packages on a machine, not to run programs out of them.
LEFT_OUT = re.compile(r"debconf|cdebconf|dpkg|init-system-helpers|install-info|openssl|perl.*")
# Pages that nobody reads in a container. Licences stay.
UNWANTED = re.compile(
    r"usr/share/(man|info|locale|lintian|bug|doc-base|menu|bash-completion)(/|$)"
    r"|usr/share/doc/(?!.*/copyright$)"
    r"|usr/lib/python3[^/]*/(test|idlelib|turtledemo)(/|$)"
    r"|lib/systemd(/|$)|usr/lib/systemd(/|$)|etc/(init\.d|cron[^/]*|apt|dpkg)(/|$)"
)
MERGED = ("bin", "lib", "lib32", "lib64", "libx32", "sbin")
# The machine types' names in the image format.
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}
# Fixed, not the number of cores: what shares a compiler process can change the byte code's bytes.
COMPILERS = 4
COMPILER = """
import os, py_compile, sys
for line in sys.stdin:
    file, cached, shown = line.rstrip("\\n").split("\\t")
    os.makedirs(os.path.dirname(cached), exist_ok=True)
    try:
        py_compile.compile(
            file, cached, shown, doraise=True,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
    except (py_compile.PyCompileError, ValueError, UnicodeError):
        pass  # templates and samples for other Pythons: nobody imports them
"""


class CannotBuild(Exception):
    """This machine cannot make the image; the message says what would help."""


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked for."""

    uv: str
    wheel: Path | None
    labels: Mapping[str, str]


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


# --- Debian packages ------------------------------------------------------------------------------


@functools.cache
def installed() -> Mapping[str, Package]:
    """Return every installed package by its plain name."""
    asked = ["db:Status-Abbrev", "binary:Package", "Version", "Depends", "Pre-Depends", "Provides"]
    form = "\t".join(f"${{{field}}}" for field in asked) + "\n"
    packages = {}
    for line in run(["dpkg-query", "-W", "-f", form]).splitlines():
        status, name, version, depends, pre_depends, provides = line.split("\t")
        if status.startswith("ii"):
            packages[name.partition(":")[0]] = Package(name, version, f"{depends}, {pre_depends}", provides)
    return packages


def names(relation: str) -> Iterable[str]:
    """Yield the package names of one side of a dependency field, without versions."""
    for part in relation.split("|"):
        name = re.split(r"[\s(:\[]", part.strip(), maxsplit=1)[0]
        if name:
            yield name


def closure() -> list[Package]:
    """Return the packages that go in, with what they depend on, sorted by name."""
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
    waiting = list(PACKAGES)
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


# --- What packages make when they are configured, and our own files -------------------------------


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
    # The distribution's own authorities: whom this machine trusts besides is its own affair.
    authorities = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    write(
        root / "etc/ssl/certs/ca-certificates.crt",
        "".join(path.read_text(encoding="ascii").rstrip("\n") + "\n" for path in authorities),
    )
    links = {"python3": PYTHON, "awk": "mawk", "sh": "dash", "which": "which.debianutils"}
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


# --- The server environment -----------------------------------------------------------------------


def make_environment(root: Path, options: Options, work: Path) -> None:
    """Install the pinned requirements and the Lab extension under /opt/fgpu."""
    prefix = root / PREFIX
    uv = [options.uv, "--no-config", "--quiet"]
    # System site-packages: without them Python ignores what users install in their home folder.
    venv = ["venv", "--relocatable", "--system-site-packages", "--no-python-downloads"]
    run([*uv, *venv, "--python", f"/usr/bin/{PYTHON}", str(prefix)])
    install = [*uv, "pip", "install", "--python", str(prefix / "bin/python")]
    requirements = str(HERE / "requirements.txt")
    run([*install, "--no-deps", "--require-hashes", "--requirement", requirements])
    if options.wheel is not None:
        # By name out of a folder: installed by path, its metadata would name this machine's path.
        folder = work / "wheels"
        folder.mkdir()
        shutil.copy2(options.wheel, folder)
        name = options.wheel.name.partition("-")[0]
        run([*install, "--no-deps", "--no-index", "--find-links", str(folder), name])
    site = prefix / "lib" / PYTHON / "site-packages"
    for file in SERVER_FILES:
        shutil.copy2(HERE / "server" / file, site / file)
    # The sources of the Hub's own pages: a tenth of the image, and only the Hub serves them.
    shutil.rmtree(prefix / "share/jupyterhub/static/components", ignore_errors=True)
    for leftover in (".lock", ".gitignore", "CACHEDIR.TAG"):
        (prefix / leftover).unlink(missing_ok=True)


def compile_all(root: Path) -> None:
    """Compile every module, as it will be named in the image, trusting it unchecked.

    A start that finds stale byte code loses 1.5 s compiling what a read-only folder cannot keep.
    """
    lines = []
    for folder in (root / "usr/lib" / PYTHON, root / PREFIX / "lib" / PYTHON):
        for file in sorted(folder.rglob("*.py")):
            if file.is_symlink():
                continue
            cached = file.parent / "__pycache__" / f"{file.stem}.{sys.implementation.cache_tag}.pyc"
            lines.append(f"{file}\t{cached}\t/{file.relative_to(root)}\n")
    environment = {**os.environ, "PYTHONHASHSEED": "0"}

    def compile_part(part: list[str]) -> int:
        command = [sys.executable, "-S", "-c", COMPILER]
        return subprocess.run(
            command, check=False, input="".join(part), text=True, env=environment
        ).returncode

    with ThreadPoolExecutor(min(COMPILERS, os.cpu_count() or 1)) as pool:
        parts = [lines[start::COMPILERS] for start in range(COMPILERS)]
        if any(pool.map(compile_part, parts)):
            raise CannotBuild("compiling the Python modules failed")


# --- The archive ----------------------------------------------------------------------------------


def entry_of(path: Path, name: str) -> tarfile.TarInfo:
    """Return the archive's entry for a path: owner, mode and time are ours, not the machine's."""
    mode = path.lstat().st_mode
    entry = tarfile.TarInfo(name)
    entry.mtime = FIXED_TIME_S
    if name == HOME or name.startswith(f"{HOME}/"):
        entry.uid = entry.gid = UID
    if stat.S_ISLNK(mode):
        entry.type, entry.linkname, entry.mode = tarfile.SYMTYPE, os.readlink(path), 0o777
    elif stat.S_ISDIR(mode):
        entry.type = tarfile.DIRTYPE
        entry.mode = 0o1777 if name in ("tmp", "var/tmp") else 0o755
    else:
        # No set-user-id bit of any package comes along.
        entry.mode = 0o755 if mode & 0o111 else 0o644
        entry.size = path.stat().st_size
    return entry


def write_layer(root: Path, layer: Path) -> str:
    """Write the file tree as one layer and return its digest."""
    paths = sorted(path.relative_to(root).as_posix() for path in root.rglob("*"))
    with tarfile.open(layer, "w", format=tarfile.GNU_FORMAT) as archive:
        for name in paths:
            path = root / name
            entry = entry_of(path, name)
            if entry.isreg():
                with path.open("rb") as content:
                    archive.addfile(entry, content)
            else:
                archive.addfile(entry)
    with layer.open("rb") as written:
        return f"sha256:{hashlib.file_digest(written, 'sha256').hexdigest()}"


def configuration(diff_id: str, labels: Mapping[str, str]) -> bytes:
    """Return the image's configuration; its hash is the image's id."""
    path = f"/{PREFIX}/bin:/usr/local/bin:/usr/bin:/bin:/{HOME}/.local/bin"
    value = {
        "architecture": ARCHITECTURES[platform.machine()],
        "os": "linux",
        "created": FIXED_TIME_TEXT,
        "config": {
            "User": f"{UID}:{UID}",
            "WorkingDir": f"/{HOME}",
            "Entrypoint": ["/usr/bin/tini", "--"],
            "Cmd": ["jupyterhub-singleuser"],
            "Env": [f"PATH={path}", f"HOME=/{HOME}", "LANG=C.UTF-8", "SHELL=/bin/bash"],
            "Labels": dict(labels),
        },
        "rootfs": {"type": "layers", "diff_ids": [diff_id]},
        "history": [{"created": FIXED_TIME_TEXT, "created_by": "images/build.sh --base host"}],
    }
    return json.dumps(value, sort_keys=True).encode()


def write_archive(layer: Path, diff_id: str, labels: Mapping[str, str], out: Path) -> None:
    """Write what `docker load` reads: manifest, configuration, layer; nothing is tagged by it."""
    config = configuration(diff_id, labels)
    config_name = f"{hashlib.sha256(config).hexdigest()}.json"
    manifest = [{"Config": config_name, "RepoTags": None, "Layers": ["layer.tar"]}]
    with tarfile.open(out, "w", format=tarfile.GNU_FORMAT) as archive:
        for name, content in (
            ("manifest.json", json.dumps(manifest).encode()),
            (config_name, config),
        ):
            entry = tarfile.TarInfo(name)
            entry.mtime, entry.size = FIXED_TIME_S, len(content)
            archive.addfile(entry, io.BytesIO(content))
        entry = tarfile.TarInfo("layer.tar")
        entry.mtime, entry.size = FIXED_TIME_S, layer.stat().st_size
        with layer.open("rb") as layer_file:
            archive.addfile(entry, layer_file)


# --- The command ----------------------------------------------------------------------------------


def check_machine() -> None:
    """Refuse machines whose own files make no image."""
    needed = "--base host needs Debian 12, Ubuntu 24.04 or newer; give --base a registry's image"
    if shutil.which("dpkg-query") is None:
        raise CannotBuild(f"no dpkg-query here: {needed}")
    if Path(sys.executable).resolve() != Path("/usr/bin", PYTHON):
        raise CannotBuild("run it with /usr/bin/python3, Debian's own interpreter")
    if sys.version_info < (3, 11) or not Path("/bin").is_symlink():
        raise CannotBuild(f"this release is too old: {needed}")
    if platform.machine() not in ARCHITECTURES:
        known = ", ".join(sorted(ARCHITECTURES))
        raise CannotBuild(f"machine type {platform.machine()}: only {known} are known")


def inputs_hash(packages: Sequence[Package], options: Options) -> str:
    """Return a hash that changes whenever the image would."""
    seen = hashlib.sha256()
    files = [Path(__file__), HERE / "requirements.txt"]
    files += [HERE / "server" / name for name in SERVER_FILES]
    files += [options.wheel] if options.wheel is not None else []
    for file in files:
        seen.update(f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}\n".encode())
    for package in packages:
        seen.update(f"{package.name} {package.version}\n".encode())
    seen.update(json.dumps(dict(options.labels), sort_keys=True).encode())
    seen.update(run([options.uv, "--version"]).encode())
    return seen.hexdigest()


def build(packages: Sequence[Package], options: Options, out: Path) -> None:
    """Write the archive to `out`, beside which the work folder lives for a while."""
    with tempfile.TemporaryDirectory(prefix="fgpu-image.", dir=out.parent) as folder:
        work = Path(folder)
        root = work / "root"
        root.mkdir()
        copy_packages(packages, root)
        make_system_files(root)
        make_environment(root, options, work)
        compile_all(root)
        make_loader_cache(root)
        labels = {**options.labels, "fgpu.inputs": inputs_hash(packages, options)}
        if options.wheel is not None:
            # It brings fgpu-start, which takes a session's identity over standard input.
            labels["fgpu.handover"] = "1"
        diff_id = write_layer(root, work / "layer.tar")
        write_archive(work / "layer.tar", diff_id, labels, out)


def label(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is no NAME=VALUE")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(prog="hostimage.py", description=__doc__.splitlines()[0])
    parser.add_argument("action", choices=("inputs", "write"))
    parser.add_argument("--uv", default="uv")
    parser.add_argument("--wheel", type=Path, help="the Lab extension's wheel")
    parser.add_argument("--label", type=label, action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument("--out", type=Path, help="the archive to write")
    given = parser.parse_args()
    if given.action == "write" and given.out is None:
        parser.error("write needs --out")
    options = Options(uv=given.uv, wheel=given.wheel, labels=dict(given.label))
    try:
        check_machine()
        packages = closure()
        if given.action == "inputs":
            print(inputs_hash(packages, options))
        else:
            build(packages, options, given.out.resolve())
    except CannotBuild as error:
        print(f"images: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
