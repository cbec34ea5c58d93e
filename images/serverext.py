"""Server extensions that an administrator adds to /opt/fgpu: the table [server] of image.toml.

They come from the package index, by name and version, with what they need and the server environment lacks. What the
server environment has stays as it is pinned. Users cannot add any: their packages are in /opt/env.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from debianfiles import CannotBuild, run, write
from serverenv import ENVIRONMENT, PREFIX

HERE = Path(__file__).resolve().parent
WANTED = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,80}[A-Za-z0-9])?==[0-9][A-Za-z0-9.+!]{0,40}")
KEYS = ("extensions", "trusted_extensions", "config")
RUN_CODE_OF_USERS: Mapping[str, str] = {
    "ipyparallel": "the cluster profiles at home",
    "jupytext": "jupytext.py beside notebooks",
    "nbgrader": "nbgrader_config.py of the course and the home",
    "voila": "templates at home",
}
"""Extensions that run users' files in the server's process, by what they run."""
# Kernels use these; the server does not, so requirements.txt lacks them.
ONLY_KERNELS = ("debugpy", "jedi", "parso")
CHECK = """
import importlib, json, sys
from jupyter_server.extension.config import ExtensionConfigManager
prefixes, kernels = json.loads(sys.argv[1])
said = ExtensionConfigManager(read_config_path=["/opt/fgpu/etc/jupyter"]).get_jpserver_extensions()
for name in [name for name, enabled in said.items() if enabled]:
    try:
        importlib.import_module(name)
    except Exception as error:
        sys.exit(f"the server extension {name} cannot be loaded: {type(error).__name__}: {error}")
if kernels:
    from jupyterlab_fgpu.kernelspecs import KernelSpecs
    found = KernelSpecs(prefixes=prefixes).find_kernel_specs()
    missing = [name for name in kernels if name.lower() not in found]
    if missing:
        sys.exit(f"kernels: there is no kernel {missing[0]}; there are {', '.join(sorted(found))}")
"""
ABOUT_SERVER = """
import json, os, sys
print(json.dumps(["%d.%d.%d" % sys.version_info[:3], os.uname().machine]))
"""


@dataclass(frozen=True, slots=True)
class ServerTable:
    """What [server] of image.toml says. ``trusted`` extensions may run users' files in the server's process."""

    extensions: Sequence[str] = ()
    trusted: Sequence[str] = ()
    config: Mapping[str, Any] = field(default_factory=dict)


def normal(name: str) -> str:
    """Return a package's name as the index compares names."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read_table(said: Any, where: str) -> ServerTable:
    """Return the table [server].

    Raises:
        CannotBuild: it says it wrongly, or an extension runs users' files and is not marked as trusted.
    """
    if not isinstance(said, dict) or not isinstance(said.get("config", {}), dict):
        raise CannotBuild(f"{where}: server: write a table [server], and [server.config] for settings")
    unknown = [key for key in said if key not in KEYS]
    if unknown:
        raise CannotBuild(f"{where}: server: unknown key {unknown[0]}; known are {', '.join(KEYS)}")
    for key in KEYS[:2]:
        wanted = said.get(key, ())
        if key in said and not isinstance(wanted, list):
            raise CannotBuild(f'{where}: server.{key}: write a list, such as ["nbgitpuller==1.3.0"]')
        for one in wanted:
            if not isinstance(one, str) or not WANTED.fullmatch(one):
                raise CannotBuild(
                    f"{where}: server.{key}: {one!r}: write name and version, such as nbgitpuller==1.3.0"
                )
    table = ServerTable(
        said.get("extensions", ()), said.get("trusted_extensions", ()), said.get("config", {})
    )
    for one in table.extensions:
        runs = RUN_CODE_OF_USERS.get(normal(one.partition("==")[0]))
        if runs is not None:
            raise CannotBuild(
                f"{where}: server.extensions: {one} runs {runs} in the server's process, which holds the session's "
                "token; leave it out, or write it into trusted_extensions if only people you trust use this image"
            )
    return table


def warnings_of(table: ServerTable) -> list[str]:
    """Return what the trusted extensions open, one line each."""
    return [
        f"{one} is trusted: {RUN_CODE_OF_USERS.get(normal(one.partition('==')[0]), 'files that users write')} may run in "
        "the server's process and can then use the session's token for the Hub"
        for one in table.trusted
    ]


def pinned() -> set[str]:
    """Return the names of the packages that every server environment has."""
    lines = (HERE / "requirements.txt").read_text(encoding="utf-8").splitlines()
    elsewhere = re.compile(r".*; (sys_platform|os_name) == '")
    return {
        normal(line.partition("==")[0])
        for line in lines
        if re.match(r"[A-Za-z0-9]", line) and not elsewhere.match(line)
    }


def add_to_server(
    roots: Path, table: ServerTable, *, uv: str, server: str, prefixes: Sequence[str]
) -> set[str]:
    """Write below ``roots`` the extensions and settings that go into /opt/fgpu; return the packages that it then has.

    ``server`` is the image with the server environment; ``prefixes`` are the environments with kernels and front ends.

    Raises:
        CannotBuild: an extension is not available, or needs other versions than the server environment has.
    """
    have = pinned()
    wanted = [*table.extensions, *table.trusted]
    if wanted:
        ask = ["docker", "run", "--rm", "--network", "none", "--entrypoint", f"/{PREFIX}/bin/python", server]
        version, machine = json.loads(run([*ask, "-I", "-c", ABOUT_SERVER]))
        with tempfile.TemporaryDirectory(prefix="fgpu-extensions.") as folder:
            have |= _install(roots, wanted, Path(folder), uv=uv, version=version, machine=machine, have=have)
    front_ends = [f"{prefix}/share/jupyter/labextensions" for prefix in prefixes]
    lab = {"LabApp": {"extra_labextensions_path": front_ends}}
    write(roots / PREFIX / "etc/jupyter/jupyter_lab_config.json", json.dumps(lab) + "\n")
    config = {
        name: dict(value) if isinstance(value, Mapping) else value for name, value in table.config.items()
    }
    config.setdefault("KernelSpecs", {}).setdefault("prefixes", list(prefixes))
    config.setdefault("FGPUStatus", {})["users_files_may_run"] = bool(table.trusted)
    write(roots / PREFIX / "etc/jupyter/jupyter_server_config.json", json.dumps(config, indent=1) + "\n")
    return have


def _install(
    roots: Path, wanted: Sequence[str], work: Path, *, uv: str, version: str, machine: str, have: set[str]
) -> set[str]:
    target, asked, locked = work / "target", work / "asked.txt", work / "locked.txt"
    write(asked, "\n".join(wanted) + "\n")
    platform = ["--python-version", version, "--python-platform", f"{machine}-manylinux_2_28"]
    left_out = [word for name in (*sorted(have), *ONLY_KERNELS) for word in ("--no-emit-package", name)]
    quiet = [uv, "--no-config", "--quiet", "pip"]
    options = ["--only-binary", ":all:", "--generate-hashes", "--no-header", "--no-annotate"]
    constraint = ["--constraint", str(HERE / "requirements.txt"), "--output-file", str(locked)]
    run([*quiet, "compile", str(asked), *platform, *options, *left_out, *constraint])
    install = ["install", "--target", str(target), *platform, "--only-binary", ":all:", "--no-deps"]
    run([*quiet, *install, "--require-hashes", "--requirement", str(locked)])
    # Not its commands: what starts a server is on the PATH, and nothing else of /opt/fgpu.
    for leftover in ("bin", "share/jupyter/kernels"):
        shutil.rmtree(target / leftover, ignore_errors=True)
    (target / ".lock").unlink(missing_ok=True)
    for folder in ("etc", "share"):
        if (target / folder).exists():
            shutil.copytree(target / folder, roots / PREFIX / folder, dirs_exist_ok=True)
            shutil.rmtree(target / folder)
    minor = ".".join(version.split(".")[:2])
    shutil.copytree(target, roots / PREFIX / f"lib/python{minor}/site-packages", dirs_exist_ok=True)
    return {
        normal(line.partition("==")[0])
        for line in locked.read_text(encoding="utf-8").splitlines()
        if "==" in line
    }


def check_built(tag: str, *, kernels: Sequence[str], prefixes: Sequence[str]) -> None:
    """Check that an image's server extensions load, and that it has these kernels.

    Raises:
        CannotBuild: an extension or a kernel is missing; the message names it.
    """
    command = ["docker", "run", "--rm", "--network", "none", "--entrypoint", f"/{PREFIX}/bin/python", tag]
    done = subprocess.run(
        [*command, "-I", "-c", CHECK, json.dumps([prefixes, kernels])],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        raise CannotBuild((done.stderr.strip().splitlines() or ["the image does not start"])[-1][:500])


def without_server_half(found: Mapping[str, str], have: set[str]) -> list[str]:
    """Return the warnings about the base's extensions, by name and version, that the server environment lacks."""
    return [
        f"{name} {version} is in the image, and its server half is not: what it adds to JupyterLab will get answer 404. "
        f'Add "{name}=={version}" to extensions of [server] in image.toml'
        for name, version in sorted(found.items())
        if normal(name) not in have
    ]


def prefixes_of(found: Sequence[str]) -> list[str]:
    """Return the environments with kernels and front ends, from those of the base's Python; the users' is first."""
    # Below these the server looks by itself.
    return [
        f"/{ENVIRONMENT}",
        *(one for one in dict.fromkeys(found) if one not in ("/usr", "/usr/local", f"/{ENVIRONMENT}")),
    ]
