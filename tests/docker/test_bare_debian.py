"""The page of installation, typed line by line on a bare Debian 12, up to the first cell of a student."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from baredebian import ROOT, BareDebian, installed, make_base, make_image, python_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("debootstrap") is None,
        reason="a Debian is made by root, with debootstrap (apt-get install debootstrap)",
    ),
]


@pytest.fixture
def bare(tmp_path: Path, engine: object) -> Iterator[BareDebian]:
    """A machine on which nothing was done yet. ``FGPU_TEST_DIST`` names what `make dist` made, if it did."""
    dist = Path(os.environ.get("FGPU_TEST_DIST") or tmp_path / "dist")
    if not dist.is_dir():
        subprocess.run([ROOT / "scripts/dist.sh", dist], check=True, capture_output=True, timeout=1800)
    make_image(tmp_path)
    reference = tomllib.loads((ROOT / "images/base/image.toml").read_text())["base"]
    machine = BareDebian(f"fgpu-bare-{secrets.token_hex(3)}")
    try:
        machine.start(dist, make_base(tmp_path, python_of(reference)), reference)
        yield machine
    finally:
        machine.stop()


def test_every_line_of_the_page_works_and_leads_to_a_students_first_cell(bare: BareDebian) -> None:
    steps = installed(bare)
    print(*(f"{step.seconds:7.1f} s  {step.line}" for step in steps), sep="\n")
    assert bare.a_cell_of("ann", "__import__('os').environ['FGPU_AMOUNT']") == "'0.5'"
    assert bare.root("systemctl", "--failed", "--quiet", "--no-legend").strip() == ""
    fgpu, config = "/opt/fgpu/bin/fgpu", "/etc/jupyterhub/jupyterhub_config.py"
    assert "jupyterhub.service: running\n" in bare.root(fgpu, "status", "--config", config)
    # What root restores is the Hub's: it starts.
    bare.root(fgpu, "backup", "/root/backup.tar.gz", "--config", config)
    bare.root("systemctl", "stop", "jupyterhub")
    bare.root(fgpu, "restore", "/root/backup.tar.gz", "--config", config)
    bare.root("systemctl", "start", "jupyterhub", "fgpu-backup")
    # A Hub that cannot start is told as such, with the reason.
    bare.root("sed", "--in-place", 's/fgpu_per_gpu="2"/fgpu_per_gpu="0"/', config)
    bare.root("sh", "-c", "! systemctl restart jupyterhub")
    said = bare.root("sh", "-c", f"! {fgpu} status --config {config}")
    assert "jupyterhub.service: restarting" in said
    assert ": fgpuspawner: c.FGPU.fgpu_per_gpu is 0; " in said
