"""A course's image as a public one is made: a Dockerfile with packages, an R kernel and a repository of notebooks."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import nbformat
import pytest
from dockerhub import Engine, build

from fgpuspawner.images.frameworks import find_uv
from hubprocess import ROOT

INSTALLED = (
    "jupyter-server-proxy==4.6.0",
    "nbgitpuller==1.3.0",
    "tensorboard==2.21.0",
    "bash_kernel==0.10.0",
    # Left out of the server.
    "jupyter-resource-usage==1.3.0",
)
DOCKERFILE = """
FROM {base}
COPY --chown=1000:1000 packages /opt/env/lib/python3.11/site-packages
COPY --chown=1000:1000 beside /opt/env
RUN python -m bash_kernel.install --sys-prefix
USER root
COPY r /
RUN ["/usr/sbin/ldconfig"]
COPY course /srv/course
RUN cd /srv/course && git init -q -b main && git add . && git -c user.name=a -c user.email=a@b commit -qm course \
    && chown -R 1000:1000 /srv/course
USER 1000:1000
"""
IMAGE = """
name = "Course"
framework = "python"
version = "3"
base = "127.0.0.1:1/nowhere:1"
kernels = ["ir", "python3"]

[server]
extensions = [
    "jupyter-server-proxy==4.6.0", "nbgitpuller==1.3.0", "notebook==7.6.5", "jupyterlab-git==0.55.0",
    "jupyterlab-lsp==5.3.0",
]

[server.config.ServerApp]
default_url = "/tree"

[server.config.ServerProxy.servers.tensorboard]
command = ["python", "-m", "tensorboard.main", "--logdir", "logs", "--port", "{port}"]
timeout = 60

[server.config.ServerProxy.servers.vscode]
command = ["python", "-m", "http.server", "{port}", "--bind", "127.0.0.1"]
"""


def r_kernel(root: Path) -> None:
    """Copy R and its kernel from this machine's Debian packages."""
    if not Path("/usr/lib/R/site-library/IRkernel").exists():
        pytest.skip("no R kernel is here (apt-get install r-cran-irkernel)")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; import debianfiles as d;"
        "d.PACKAGES = ('r-cran-irkernel',); d.copy_packages(d.closure(tools=False), Path(sys.argv[2]))"
    )
    root.mkdir()
    subprocess.run(["/usr/bin/python3", "-c", code, ROOT / "images", root], check=True)
    for link in [path for path in root.iterdir() if path.is_symlink()]:
        link.unlink()
    # What Debian writes and chooses when it sets the packages up.
    shutil.copytree("/etc/R", root / "etc/R", dirs_exist_ok=True)
    for name in ("blas", "lapack"):
        folder = next((root / "usr/lib").glob(f"*-linux-gnu/{name}"))
        shutil.copy2(folder / f"lib{name}.so.3", folder.parent / f"lib{name}.so.3")


def course_base(engine: Engine, base: str, folder: Path) -> str:
    """Build the course's own Dockerfile on the base, and return its tag."""
    # As `RUN pip install` puts them there, where a container reaches the package index.
    site, beside = folder / "packages", folder / "beside"
    uv = find_uv()
    if uv is None:
        pytest.skip("uv is not here (pip install uv)")
    command = [
        uv,
        "--no-config",
        "--quiet",
        "pip",
        "install",
        "--target",
        str(site),
        "--only-binary",
        ":all:",
    ]
    subprocess.run([*command, "--python-version", "3.11", *INSTALLED], check=True, timeout=300)
    beside.mkdir()
    for name in ("etc", "share"):
        (site / name).rename(beside / name)
    r_kernel(folder / "r")
    (folder / "course").mkdir()
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("6 * 7")])
    (folder / "course/first.ipynb").write_text(nbformat.writes(notebook))
    (folder / "Dockerfile").write_text(DOCKERFILE.format(base=base))
    tag = engine.mine(f"{engine.prefix}/public:1")
    made = subprocess.run(
        ["docker", "build", "--quiet", "--tag", tag, str(folder)], capture_output=True, text=True, check=False
    )
    assert made.returncode == 0, made.stderr[-2000:]
    return tag


def course_image(engine: Engine, base: str, folder: Path, *, server: str) -> tuple[str, str]:
    """Build an image with the server environment on the course's; return its tag, and what the build said."""
    name = folder.name
    folder.mkdir()
    (folder / "image.toml").write_text(IMAGE)
    tag = engine.mine(f"{engine.prefix}/{name}:1")
    made = build(str(folder), "--base", base, "--server", server, "--tag", tag)
    assert made.returncode == 0, made.stderr[-2000:]
    return tag, made.stderr
