"""Which kernels a server offers, in which order, and on which one notebooks open; a user's run no script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import NoSuchKernel
from jupyter_core.paths import jupyter_data_dir

from jupyterlab_fgpu.kernelspecs import ORDER_VARIABLE, KernelSpecs


def add_kernel(prefix: Path, name: str, *argv: str) -> None:
    folder = prefix / "share/jupyter/kernels" / name
    folder.mkdir(parents=True)
    spec = {"argv": [*argv, "{connection_file}"], "display_name": name.title(), "language": "x"}
    (folder / "kernel.json").write_text(json.dumps(spec))


def add_program(prefix: Path, name: str) -> str:
    program = prefix / "bin" / name
    program.parent.mkdir(parents=True, exist_ok=True)
    program.touch()
    return str(program)


@pytest.fixture
def specs(tmp_path: Path) -> KernelSpecs:
    """Finds the kernels of a users' environment and of Conda, and no other."""
    found = KernelSpecs(prefixes=[str(tmp_path / "env"), str(tmp_path / "conda")], ensure_native_kernel=False)
    found.kernel_dirs = [str(tmp_path / "server")]
    return found


def test_kernels_of_the_users_environment_run_its_own_programs(specs: KernelSpecs, tmp_path: Path) -> None:
    add_kernel(tmp_path / "env", "python3", "python", "-m", "ipykernel_launcher", "-f")
    add_kernel(tmp_path / "conda", "ir", "/opt/conda/lib/R/bin/R", "-e", "IRkernel::main()")
    python = add_program(tmp_path / "env", "python")
    assert set(specs.get_all_specs()) == {"python3", "ir"}
    assert specs.get_kernel_spec("python3").argv[0] == python
    assert specs.get_kernel_spec("ir").argv[0] == "/opt/conda/lib/R/bin/R"
    with pytest.raises(NoSuchKernel):
        specs.get_kernel_spec("julia-1.11")


def test_conda_environments_are_named_as_nb_conda_kernels_does(specs: KernelSpecs, tmp_path: Path) -> None:
    environment = tmp_path / "conda/envs/stats"
    (environment / "conda-meta").mkdir(parents=True)
    add_kernel(environment, "python3", "python", "-f")
    add_kernel(environment, "bash", "bash", "-f")
    add_kernel(tmp_path / "conda/envs/no-environment", "python3", "python", "-f")
    python = add_program(environment, "python")
    assert set(specs.find_kernel_specs()) == {"conda-env-stats-py", "conda-env-stats-bash"}
    spec = specs.get_kernel_spec("conda-env-stats-py")
    assert (spec.argv[0], spec.display_name) == (python, "Python3 [conda env:stats]")
    assert spec.env == {"CONDA_PREFIX": str(environment), "PATH": f"{environment}/bin:${{PATH}}"}
    # Not in the environment itself: the first on the PATH.
    assert specs.get_kernel_spec("conda-env-stats-bash").argv[0].startswith("/")


def test_catalogue_decides_the_order(
    specs: KernelSpecs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("bash", "ir", "python3"):
        add_kernel(tmp_path / "env", name, "/bin/true")
    monkeypatch.setenv(ORDER_VARIABLE, "IR,gone,python3")
    assert [*specs.find_kernel_specs()] == ["ir", "python3", "bash"]


class TestDefault:
    @pytest.fixture
    def jp_server_config(
        self, jp_server_config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> dict[str, Any]:
        add_kernel(tmp_path / "env", "bash", "/bin/bash")
        monkeypatch.setenv(ORDER_VARIABLE, "gone,bash,python3")
        return {**jp_server_config, "KernelSpecs": {"prefixes": [str(tmp_path / "env")]}}

    async def test_notebooks_open_on_the_first_kernel_that_is_there(self, jp_fetch: Any) -> None:
        found = json.loads((await jp_fetch("api", "kernelspecs")).body)
        assert found["default"] == "bash"
        assert next(iter(found["kernelspecs"])) == "bash"


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
