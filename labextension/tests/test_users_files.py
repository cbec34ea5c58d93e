"""The server runs no file as code, and no template, that its session's programs can write."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

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


@pytest.fixture
def users_templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Templates where JUPYTER_PATH leads (`pip install` may write there), and with a user's Jupyter data."""
    for place in ("environment", "home"):
        for name in ("lab", "base"):
            folder = tmp_path / place / "nbconvert" / "templates" / name
            folder.mkdir(parents=True)
            for file in ("index.html.j2", "base.html.j2"):
                (folder / file).write_text("{{ 'own ' ~ 'template' }}")
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path / "environment"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "home"))


async def test_notebook_is_converted_by_no_template_that_a_user_installed(
    users_templates: None, tmp_path: Path, jp_serverapp: Any, jp_fetch: Any
) -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(1)")])
    nbformat.write(notebook, Path(jp_serverapp.root_dir, "plain.ipynb"))
    page = (await jp_fetch("nbconvert", "html", "plain.ipynb")).body.decode()
    assert "own template" not in page
    assert "jp-Notebook" in page
    searched = HTMLExporter(config=jp_serverapp.config).template_paths
    assert [path for path in searched if path.startswith(str(tmp_path / "environment"))] == []
