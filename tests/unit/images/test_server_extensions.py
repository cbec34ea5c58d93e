"""The table [server] of image.toml: which extensions it takes, and what is said of those that run users' files."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

IMAGES = Path(__file__).parents[3] / "images"
sys.path.insert(0, str(IMAGES))

import onbase  # noqa: E402
import serverext  # noqa: E402
from debianfiles import CannotBuild  # noqa: E402

RECIPE = """
name = "Ours"
framework = "python"
version = "3"
base = "lab/ours:1"
"""


def table_of(folder: Path, text: str) -> serverext.ServerTable:
    (folder / "image.toml").write_text(RECIPE + text)
    return onbase.read_recipe(folder).server


def test_extensions_and_settings_are_read(tmp_path: Path) -> None:
    said = '[server]\nextensions = ["nbgitpuller==1.3.0"]\n[server.config.ServerApp]\ndefault_url = "/tree"\n'
    table = table_of(tmp_path, said)
    assert (table.extensions, table.trusted) == (["nbgitpuller==1.3.0"], ())
    assert table.config == {"ServerApp": {"default_url": "/tree"}}
    assert table_of(tmp_path, "") == serverext.ServerTable()


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ('extensions = ["nbgitpuller"]', "'nbgitpuller': write name and version, such as nbgitpuller==1.3.0"),
        ('extensions = ["x==1 --index-url http://evil"]', "write name and version"),
        ('extensions = ["x @ https://evil/x.whl"]', "write name and version"),
        ('extensions = ["./x==1"]', "write name and version"),
        ('extensions = ["-r==1"]', "write name and version"),
        ('extensions = "nbgitpuller==1.3.0"', "write a list"),
        ("extensions = [1]", "write name and version"),
        ('index = "http://evil"', "unknown key index; known are extensions, trusted_extensions, config"),
        ("config = 1", "write a table [server]"),
        (
            'extensions = ["NbGrader==0.9.6"]',
            "NbGrader==0.9.6 runs nbgrader_config.py of the course and the home in the server's process, which holds "
            "the session's token; leave it out, or write it into trusted_extensions",
        ),
    ],
)
def test_anything_else_is_refused_in_one_line(tmp_path: Path, said: str, words: str) -> None:
    with pytest.raises(CannotBuild) as refused:
        table_of(tmp_path, f"[server]\n{said}\n")
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)


def test_trusted_extension_is_warned_of(tmp_path: Path) -> None:
    table = table_of(tmp_path, '[server]\ntrusted_extensions = ["nbgrader==0.9.6"]\n')
    assert serverext.warnings_of(table) == [
        "nbgrader==0.9.6 is trusted: nbgrader_config.py of the course and the home may run in the server's process "
        "and can then use the session's token for the Hub"
    ]


def test_warnings_name_what_has_no_server_half() -> None:
    have = serverext.pinned() | {"nbgitpuller"}
    # Of Windows alone, so it is not there.
    assert "jupyterlab" in have
    assert "colorama" not in have
    (warning,) = serverext.without_server_half(
        {"nbgitpuller": "1.3.0", "jupyterlab": "4.6.6", "jupyter_server_proxy": "4.6.0"}, have
    )
    assert warning.startswith("jupyter_server_proxy 4.6.0 is in the image, and its server half is not")
    assert '"jupyter_server_proxy==4.6.0"' in warning


def test_environments_with_kernels_begin_with_the_users() -> None:
    assert serverext.prefixes_of(["/usr", "/usr"]) == ["/opt/env"]
    assert serverext.prefixes_of(["/opt/conda/envs/a", "/opt/conda"]) == [
        "/opt/env",
        "/opt/conda/envs/a",
        "/opt/conda",
    ]
