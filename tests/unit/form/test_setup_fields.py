"""Variables and start scripts: which names are sealed, what is refused, and that values are in no message."""

from __future__ import annotations

import pytest

from fgpuspawner.form.own_setup import MOST_SCRIPT, GivenSetup, read_setup
from fgpuspawner.text.fields import Given


def read(**raw: object) -> GivenSetup | None:
    given = Given(raw)
    found = read_setup(given)
    assert not given.refusals, given.refusals
    return found


def refusal(**raw: object) -> str:
    given = Given(raw)
    read_setup(given)
    (found,) = given.refusals
    return found.message


def test_lines_and_objects_mean_the_same() -> None:
    lines = "# mine\n\nWANDB_PROJECT=vision=2 \r\n  HF_TOKEN\nEMPTY="
    expected = {"WANDB_PROJECT": "vision=2", "HF_TOKEN": None, "EMPTY": ""}
    for given in (lines, expected):
        found = read(variables=given, script="\npip install x\r\npip install y\n")
        assert found == GivenSetup(expected, "pip install x\npip install y")
    assert read() is None
    assert read(variables="", script="") == GivenSetup({}, "")


@pytest.mark.parametrize(
    "name",
    [
        *("NVIDIA_VISIBLE_DEVICES", "NVIDIA_ANYTHING", "CUDA_VISIBLE_DEVICES", "CUDA_MPS_PIPE_DIRECTORY"),
        *(
            "FGPU_AMOUNT",
            "FGPU_SERVICE_URL",
            "LD_PRELOAD",
            "LD_LIBRARY_PATH",
            "JUPYTERHUB_API_TOKEN",
            "JPY_X",
        ),
        *("PYTHONHOME", "PYTHONSTARTUP", "PATH", "HOME", "BASH_ENV"),
    ],
)
def test_variables_of_the_slice_and_the_server_are_sealed(name: str) -> None:
    assert refusal(variables=f"{name}=s3cret") == f"variables: {name} is set by the session; leave it out"


@pytest.mark.parametrize("name", ["PYTHONHASHSEED", "PYTHONPATH", "CUDA_LAUNCH_BLOCKING", "_x", "TORCH_HOME"])
def test_other_variables_are_the_users(name: str) -> None:
    assert read(variables={name: "1"}) == GivenSetup({name: "1"}, "")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({"variables": "2X=s3cret"}, "'2X' is no name"),
        ({"variables": "A B=s3cret"}, "'A B' is no name"),
        ({"variables": {"": "s3cret"}}, "is no name"),
        ({"variables": {"A": ["s3cret"]}}, "the value of A must be a text"),
        ({"variables": {"A": "s3cret\0"}}, "the value of A must be a text"),
        ({"variables": {"A": "s3cret" * 4096}}, "at most 4096 characters"),
        ({"variables": {f"A{n}": "s3cret" for n in range(51)}}, "at most 50"),
        ({"variables": ["s3cret"]}, "give lines NAME=value"),
        ({"script": "s3cret" * MOST_SCRIPT}, "at most 8000 characters"),
        ({"script": 7}, "at most 8000 characters"),
        ({"script": "s3cret\0"}, "at most 8000 characters"),
        # Half a surrogate pair: no database and no environment can hold it.
        ({"script": "s3cret\ud800"}, "at most 8000 characters"),
        ({"variables": {"A": "s3cret\udfff"}}, "the value of A must be a text"),
    ],
)
def test_bad_ones_are_refused_without_their_values(raw: dict[str, object], words: str) -> None:
    message = refusal(**raw)
    assert words in message
    assert "s3cret" not in message
