"""The server runs no file as code that its session's programs can write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys
from jupyterlab_fgpu.app import refuse_users_files
refuse_users_files(sys.prefix, sys.base_prefix, *sys.path)
import os, colorsys
from traitlets.config.loader import PyFileConfigLoader
from jinja2 import Environment, FileSystemLoader
mine = sys.argv[1]
def config():
    PyFileConfigLoader("mine_config.py", path=mine).load_config()
def template():
    Environment(loader=FileSystemLoader(mine)).get_template("mine.html").render()
def module():
    sys.path.insert(0, mine)
    import mine_config
def removed():
    code = compile(open(os.path.join(mine, "mine_config.py")).read(), os.path.join(mine, "gone.py"), "exec")
    exec(code)
try:
    locals()[sys.argv[2]]()
except PermissionError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize("way", ["config", "template", "module", "removed"])
def test_file_that_the_session_can_write_is_not_run(tmp_path: Path, way: str) -> None:
    (tmp_path / "mine_config.py").write_text("print('ran')\n")
    (tmp_path / "mine.html").write_text("{{ cycler.__init__.__globals__['os'].system('echo ran') }}")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(tmp_path), way], capture_output=True, text=True, check=True
    )
    assert "ran" not in done.stdout.splitlines()
    assert done.stdout.startswith(f"refused: {tmp_path}/"), done.stdout + done.stderr
