"""The kernels that a server offers: those of its own environment, of the home, and of environments beside it.

A kernel is a program of the session, not part of its server. So any environment may offer one: the users' own
(`ipykernel install --sys-prefix`), that of the image's framework, and Conda environments, which are named as
nb_conda_kernels names them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from jupyter_client.kernelspec import KernelSpec, KernelSpecManager, NoSuchKernel, _list_kernels_in
from jupyter_core.paths import jupyter_data_dir
from traitlets import List, Unicode

KERNELS = "share/jupyter/kernels"
ORDER_VARIABLE = "FGPU_KERNELS"
"""The names of the image's kernels, separated by commas: the Hub sets it from the catalogue."""


class KernelSpecs(KernelSpecManager):
    """Finds kernels in several environments, in the order of the catalogue."""

    prefixes = List(
        Unicode(),
        config=True,
        help="""Folders of environments that have kernels beside the server's own.

        Example: `c.KernelSpecs.prefixes = ["/opt/env", "/opt/conda"]`
        """,
    )

    def find_kernel_specs(self) -> dict[str, str]:
        """Return the folder of each kernel by its name: first those that the catalogue names."""
        at_home = os.path.join(jupyter_data_dir(), "kernels")
        if at_home not in self.kernel_dirs:
            # The home is on no search path where its configuration is not read.
            self.kernel_dirs = [at_home, *self.kernel_dirs]
        found = super().find_kernel_specs()
        for prefix in self.prefixes:
            for name, folder in _list_kernels_in(f"{prefix}/{KERNELS}").items():
                found.setdefault(name, folder)
        for environment in self._conda_environments():
            for name, folder in _list_kernels_in(f"{environment}/{KERNELS}").items():
                short = "py" if name.startswith("python") else name
                found.setdefault(f"conda-env-{environment.name.lower()}-{short}", folder)
        first = [name for name in named_kernels() if name in found]
        return {name: found[name] for name in dict.fromkeys([*first, *found])}

    def get_kernel_spec(self, kernel_name: str) -> KernelSpec:
        """Return a kernel's specification, with its program's full path."""
        name = kernel_name.lower()
        folder = self.find_kernel_specs().get(name)
        if folder is None:
            raise NoSuchKernel(kernel_name)
        spec = self._get_kernel_spec_by_name(name, folder)
        prefix = Path(folder).parents[3]
        if not folder.startswith(f"{prefix}/{KERNELS}/"):
            return spec
        if spec.argv and "/" not in spec.argv[0]:
            # Jupyter would take "python" for the server's own.
            own = prefix / "bin" / spec.argv[0]
            spec.argv[0] = str(own) if own.exists() else shutil.which(spec.argv[0]) or spec.argv[0]
        if name.startswith("conda-env-"):
            spec.display_name = f"{spec.display_name} [conda env:{prefix.name}]"
            spec.env = {"CONDA_PREFIX": str(prefix), "PATH": f"{prefix}/bin:${{PATH}}", **spec.env}
        return spec

    def _conda_environments(self) -> Iterator[Path]:
        for root in (*self.prefixes, os.path.expanduser("~/.conda")):
            yield from (path.parent for path in sorted(Path(root, "envs").glob("*/conda-meta")))


def named_kernels() -> list[str]:
    """Return the kernels that the catalogue names for this session's image, in its order."""
    return [name.lower() for name in os.environ.get(ORDER_VARIABLE, "").split(",") if name]


def first_kernel(specs: KernelSpecManager) -> str | None:
    """Return the kernel on which notebooks open: the first of the catalogue's that is here."""
    found = specs.find_kernel_specs()
    return next((name for name in named_kernels() if name in found), None)
