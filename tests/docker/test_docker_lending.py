"""Compute that is lent, in real containers that were made for their session and in such that had waited for one.

Who of those on a GPU can read and write which words, what user code tries, and that a session gets what is idle.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator

import pytest
from dockerhub import BASE, PYTHON, DockerHub, Engine, Running, entry
from warmpool import HALF, Pool

WORDS = """
import json, os
folder = "/run/fgpu/lending"
line = [l for l in open("/run/fgpu/limits") if l.startswith("device=")][0]
own = dict(w.split("=", 1) for w in line.split())["lending"]
files = sorted(os.path.relpath(os.path.join(at, name), folder) for at, _, names in os.walk(folder) for name in names)
results = {"own": int(own), "files": files, "done": []}
results["owners"] = [open(folder + "/0/owners", "rb").read().count(n) for n in (0, 1, 2)]
def attempt(name, function):
    try:
        function()
        results["done"].append(name)
    except OSError:
        pass
def write(path):
    with open(path, "r+b", buffering=0) as file:
        file.write(bytes(8))
for name in files:
    path = f"{folder}/{name}"
    attempt(f"write {name}", lambda: write(path))
    attempt(f"truncate {name}", lambda: os.truncate(path, 8))
    attempt(f"times of {name}", lambda: os.utime(path))
    attempt(f"write {name} of the first process", lambda: write("/proc/1/root" + path))
    for label, there in (("remove", os.remove), ("move", lambda path: os.rename(path, "/tmp/moved"))):
        attempt(f"{label} {name}", lambda: there(path))
    attempt(f"own word as {name}", lambda: os.link(folder + "/own-0", path + "-more"))
    attempt(f"{name} elsewhere", lambda: os.link(path, "/tmp/elsewhere"))
for name in ("0/3", "own-1", "../lending/0/new", "../limits", "0/../../../fgpu/lending/1"):
    attempt(f"make {name}", lambda: os.close(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT)))
attempt("link", lambda: os.symlink("/etc/passwd", folder + "/0/4"))
attempt("a folder away", lambda: os.rename(folder + "/0", "/tmp/away"))
attempt("all away", lambda: os.rename(folder, "/tmp/away"))
results["mounted"] = [l.split()[4] for l in open("/proc/self/mountinfo") if "lending" in l]
print(json.dumps(results))
"""
SAY = "open('/run/fgpu/lending/own-0', 'r+b', buffering=0).write({word!r} * 8)"
HEARD = "print(open('/run/fgpu/lending/0/{number}', 'rb').read().hex())"
ELSEWHERE = {**HALF, "fgpu": "1.5"}
"""More than is left beside the pair: a share of another GPU."""

Pair = tuple[Running, Running]


@pytest.fixture(scope="module")
def pool(
    make_hub: Callable[..., DockerHub], engine: Engine, image: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    catalogue = tmp_path_factory.mktemp("catalogue") / "catalogue.toml"
    catalogue.write_text(entry("python", BASE))
    hub = make_hub(after="", catalogue=str(catalogue), warm_pool={"python": 2}).start()
    yield Pool(hub, engine)
    hub.terminate()


@pytest.fixture(scope="module", params=["one of each", "two that had waited"])
def pair(request: pytest.FixtureRequest, pool: Pool) -> Iterator[Pair]:
    """Two sessions of a quarter of one GPU each. The Hub's first one finds no container that waits."""
    if request.param == "one of each":
        one = pool.hub.running("carol", **HALF)
        pool.filled(2)
    else:
        pool.filled(2)
        one, _ = pool.take("carol")
    two, _ = pool.take("dave")
    yield one, two
    pool.hub.end("carol")
    pool.hub.end("dave")


def run(engine: Engine, running: Running, *command: str, user: str = "") -> str:
    status, output = engine.run_in(running.id, *command, user=user)
    assert status == 0, output
    return output.strip()


@pytest.mark.parametrize("user", ["", "0"], ids=["its user", "root"])
def test_session_writes_only_its_own_lending_word(engine: Engine, pair: Pair, user: str) -> None:
    numbers = []
    for running in pair:
        found = json.loads(run(engine, running, PYTHON, "-c", WORDS, user=user))
        numbers.append(found["own"])
        assert found["files"] == ["0/1", "0/2", "0/owners", "own-0"]
        assert found["owners"] == [50, 25, 25]
        possible = {"write own-0", "truncate own-0", "times of own-0", "write own-0 of the first process"}
        assert {"write own-0", "truncate own-0"} <= set(found["done"]) <= possible
        assert found["mounted"] == ["/run/fgpu/lending", "/run/fgpu/lending/own-0"]
    assert sorted(numbers) == [1, 2]


def test_lending_words_are_seen_only_on_the_same_gpu(engine: Engine, pool: Pool, pair: Pair) -> None:
    stranger = pool.hub.running("erin", **ELSEWHERE)
    for number, running in enumerate((*pair, stranger)):
        own = json.loads(run(engine, running, PYTHON, "-c", WORDS))["own"]
        word = bytes([0xA0 + number])
        run(engine, running, PYTHON, "-c", SAY.format(word=word))
        hearers = pair if running in pair else (stranger,)
        for hearer in hearers:
            assert run(engine, hearer, PYTHON, "-c", HEARD.format(number=own)) == word.hex() * 8
    assert json.loads(run(engine, stranger, PYTHON, "-c", WORDS))["files"] == ["0/1", "0/owners", "own-0"]
    pool.hub.end("erin")


def test_slice_with_an_idle_neighbour_gets_more_and_is_verified(
    engine: Engine, pool: Pool, pair: Pair
) -> None:
    for running in pair:
        said = run(engine, running, PYTHON, "/run/fgpu/fgpu-verify")
        (compute,) = re.findall(r"kernels get their share of time: ([0-9.]+) %", " ".join(said.split()))
        assert float(compute) > 35, said
        assert "Your limits are in force." in said
        assert f"Session {running.session.id} is verified" in pool.hub.log_text()
