"""Kernels that a user has made: found whatever is configured, and no page of the server's own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from jupyter_core.paths import jupyter_data_dir

LOGO = "<svg xmlns='http://www.w3.org/2000/svg'><script>document.title = 'run'</script></svg>"


async def test_a_kernels_logo_runs_no_script_when_it_is_opened_as_a_page(
    jp_serverapp: Any, jp_fetch: Any
) -> None:
    folder = Path(jp_serverapp.kernel_spec_manager.kernel_dirs[0], "mine")
    folder.mkdir(parents=True)
    spec = {"argv": ["true"], "display_name": "Mine", "language": "python"}
    (folder / "kernel.json").write_text(json.dumps(spec))
    (folder / "logo-svg.svg").write_text(LOGO)
    assert "mine" in json.loads((await jp_fetch("api", "kernelspecs")).body)["kernelspecs"]
    logo = await jp_fetch("kernelspecs", "mine", "logo-svg.svg")
    assert logo.body.decode() == LOGO
    assert logo.headers.get_list("Content-Security-Policy") == ["sandbox; frame-ancestors 'none'"]


def test_kernels_at_home_are_found_where_no_configuration_is_read_there(jp_serverapp: Any) -> None:
    manager = jp_serverapp.kernel_spec_manager
    at_home = str(Path(jupyter_data_dir(), "kernels"))
    manager.kernel_dirs = [folder for folder in manager.kernel_dirs if folder != at_home]
    for _ in range(2):
        manager.find_kernel_specs()
        assert manager.kernel_dirs.count(at_home) == 1
        assert manager.kernel_dirs[0] == at_home
