"""A user's own variables and start script reach kernels, terminals and the log, and nothing else gets their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import requests

from hubprocess import HubProcess, until

SMALL = {"fgpu": "0.5", "cpu": "0.5", "memory_mib": 512}
SECRET = "s3cret-value-of-alice"
SCRIPT = "echo made by the script\necho $API_SECRET\nenv > script-env\nexit 3\n"
VARIABLES = {"API_SECRET": SECRET, "COLOUR": "blue"}


def read_env(path: Path) -> dict[str, str]:
    lines = path.read_text().splitlines() if path.exists() else []
    return dict(line.split("=", 1) for line in lines if "=" in line)


def test_variables_and_script_reach_kernels_and_terminals_only(
    make_hub: Callable[..., HubProcess],
) -> None:
    hub = make_hub(mini=False, after="c.Spawner.notebook_dir = '.'\n")
    home = hub.data / "home" / "alice"
    kernel = {"argv": ["sh", "-c", "env > kernel-env"], "display_name": "own", "language": "python"}
    (home / ".local/share/jupyter/kernels/own").mkdir(parents=True)
    (home / ".local/share/jupyter/kernels/own/kernel.json").write_text(json.dumps(kernel))
    hub.start()
    token = hub.add_user("alice")
    headers = {"Authorization": f"token {token}"}

    def service(path: str, token: str = token) -> requests.Response:
        url = f"{hub.url}/services/fgpu/api/v1/{path}"
        return requests.get(url, headers={"Authorization": f"token {token}"}, timeout=60)

    def started(options: dict[str, Any] | None) -> int:
        hub.spawn("alice", options=options, token=token)
        until(lambda: hub.ready("alice"), within_s=120, what="alice's server is ready")
        return hub.sessions()["alice/"].id

    def kernels_environment() -> dict[str, str]:
        (home / "kernel-env").unlink(missing_ok=True)
        url = f"{hub.url}/user/alice/api/kernels"
        assert requests.post(url, headers=headers, json={"name": "own"}, timeout=60).status_code == 201
        return until(lambda: read_env(home / "kernel-env"), what="the kernel has begun")

    # Another user's script would run as alice, with her files.
    refused = hub.refused("alice", options={**SMALL, "script": "id"})
    assert "only alice gives variables and a script" in refused.json()["message"]

    first = started({**SMALL, "variables": VARIABLES, "script": SCRIPT})
    assert kernels_environment().items() >= VARIABLES.items()
    until(lambda: "COLOUR" in read_env(home / "script-env"), what="the script has run")
    until(
        lambda: "failed with status 3" in service(f"sessions/{first}/log").text, what="its end is in the log"
    )
    lines = service(f"sessions/{first}/log").json()["lines"]
    assert lines.index("made by the script") + 1 == lines.index("[masked]")
    made = requests.post(f"{hub.url}/user/alice/api/terminals", headers=headers, timeout=60)
    assert made.status_code == 200

    def of_session() -> list[dict[str, str]]:
        found = []
        for process in psutil.process_iter():
            try:
                environment = process.environ()
            except psutil.Error:
                continue
            if environment.get("HOME") == str(home):
                found.append({"": " ".join(process.cmdline()), **environment})
        return found

    until(
        lambda: any("COLOUR" in one and "bash" in one[""] for one in of_session()),
        what="the terminal has them",
    )
    server = next(one for one in of_session() if "singleuser" in one[""])
    assert not server.keys() & VARIABLES.keys()

    # Values are only for the session itself, not even for its owner's other tokens or administrators.
    for asker in (token, hub.add_user("admin")):
        assert service(f"sessions/{first}/setup", asker).status_code == 403
    assert SECRET not in hub.api("GET", "users/alice?include_stopped_servers=1").text
    assert SECRET not in hub.log_text()
    form = hub.browser("admin").get(f"{hub.url}/hub/spawn/alice/other", timeout=60).text
    assert 'name="fgpu"' in form
    assert not [word for word in (SECRET, "API_SECRET", "made by the script") if word in form]
    own = hub.browser("alice").get(f"{hub.url}/hub/spawn/alice/other?again=1", timeout=60).text
    assert SECRET not in own
    assert "API_SECRET" in own

    # The form stores them, too, and the Hub's options have none of them.
    browser = hub.browser("alice", leads_to="/hub/spawn/alice/other")
    proof = {"_xsrf": browser.cookies.get("_xsrf", path="/hub/")}
    form_data = {
        "fgpu": "0.1",
        "cpu": "0.1",
        "memory_gib": "0.25",
        "variables": f"OTHER={SECRET}",
        "script": "",
    }
    url = f"{hub.url}/hub/spawn/alice/other"
    browser.post(url, params=proof, data={**form_data, "fgpu": "7"}, timeout=120)
    assert "Failed to spawn single-user server with form: GPU (fGPU): 7 is more than" in hub.log_text()
    assert "Traceback" not in hub.log_text()
    answer = browser.post(url, params=proof, data=form_data, timeout=120)
    assert answer.ok, answer.text
    until(lambda: hub.sessions()["alice/other"].request.setup > 1, what="it has a setup of its own")
    assert SECRET not in hub.api("GET", "users/alice?include_stopped_servers=1").text
    hub.stop("alice", "other")

    # A start again has the same; a name alone keeps its value.
    setup = hub.sessions()["alice/"].request.setup
    hub.stop("alice")
    until(lambda: "alice/" not in hub.sessions(), what="it has ended")
    (home / "script-env").unlink()
    second = started(None)
    assert hub.sessions()["alice/"].request.setup == setup
    assert kernels_environment()["API_SECRET"] == SECRET
    assert second != first
    hub.stop("alice")
    until(lambda: "alice/" not in hub.sessions(), what="it has ended")
    started({**SMALL, "setup": setup, "variables": "API_SECRET\nCOLOUR=red"})
    assert kernels_environment().items() >= {"API_SECRET": SECRET, "COLOUR": "red"}.items()
