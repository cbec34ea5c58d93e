"""The real Prometheus reads the Hub; the dashboard asks for what there is, and the alerts say what they should."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests

from hubprocess import ROOT, HubProcess, free_ports, running, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MONITORING = ROOT / "fgpuspawner/deploy"
INSTALL = """
dir=$1
note() { echo "$*" >&2; }
. tests/packages.sh
install_packages prometheus
"""
PAGE = (ROOT / "docs/operations.md").read_text(encoding="utf-8").partition("\n## Metrics\n")[2]
READS = (
    PAGE.partition("```python\n")[2]
    .partition("```")[0]
    .replace('"..."', '"a-token-of-prometheus-0123456789"')
)
CONFIG = """
global: {{scrape_interval: 1s}}
scrape_configs:
  - job_name: jupyterhub
    metrics_path: /hub/metrics
    authorization: {{credentials: a-token-of-prometheus-0123456789}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
  - job_name: fgpu
    metrics_path: /services/fgpu/metrics
    authorization: {{credentials: a-token-of-prometheus-0123456789}}
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
rule_files: [{rules}]
"""
OF_REAL_GPUS = "power_watts"


@pytest.fixture(scope="module")
def promtool(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prometheus' tool, with Prometheus beside it."""
    done = subprocess.run(
        ["bash", "-c", INSTALL, "-", str(tmp_path_factory.mktemp("apt"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    found = shutil.which("promtool")
    if found is None or done.returncode:
        pytest.skip(f"no Prometheus: {done.stdout}")
    return found


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[HubProcess]:
    with running(tmp_path / "hub", runtime="local", before=READS) as found:
        yield found


@pytest.fixture
def prometheus(promtool: str, hub: HubProcess, tmp_path: Path) -> Iterator[str]:
    port = free_ports(1)
    config = tmp_path / "prometheus.yml"
    config.write_text(CONFIG.format(port=hub.port, rules=MONITORING / "alerts.yml"))
    words = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}"]
    with (tmp_path / "prometheus.log").open("wb") as log:
        process = subprocess.Popen([*words, f"--web.listen-address=127.0.0.1:{port}"], stdout=log, stderr=log)
    try:
        yield f"http://127.0.0.1:{port}/api/v1"
    finally:
        process.kill()
        process.wait(30)


def expressions() -> list[str]:
    """Return all that the dashboard asks."""
    panels = json.loads((MONITORING / "grafana.json").read_text())["panels"]
    return [
        target["expr"].replace("$__rate_interval", "1m") for panel in panels for target in panel["targets"]
    ]


def test_the_alerts_are_sound_and_say_what_they_should(promtool: str) -> None:
    for words in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run([promtool, *words], cwd=MONITORING, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr


def test_prometheus_answers_every_query_of_the_dashboard(prometheus: str, hub: HubProcess) -> None:
    hub.add_user("ann")
    hub.spawn("ann", options={"image": "python", "fgpu": "1"})
    until(lambda: hub.ready("ann"), within_s=120, what="ann's server")
    hub.stop("ann")
    until(lambda: not hub.sessions(), what="ann's session has ended")

    token = {"Authorization": f"token {hub.add_user('ann')}"}
    wrong = requests.get(f"{hub.url}/services/fgpu/api/v1/sessions/999", headers=token, timeout=60)
    assert wrong.status_code == 404

    def result(expression: str) -> list[Any]:
        try:
            answer = requests.get(f"{prometheus}/query", params={"query": expression}, timeout=10)
        except requests.ConnectionError:
            return []
        assert answer.status_code == 200, (expression, answer.text)
        return list(answer.json()["data"]["result"])

    assert len(expressions()) > 15
    for expression in expressions():
        # This Hub has no lost machine and none that reports power.
        if OF_REAL_GPUS not in expression and "LOST" not in expression:
            until(lambda e=expression: result(e), within_s=60, what=expression)
    for expression in (
        "fgpu_pass_seconds_count > 0",
        'fgpu_database_seconds_count{kind="write"} > 0',
        "fgpu_forecast_seconds_count > 0",
        'fgpu_engine_seconds_count{call="start"} > 0',
        'fgpu_engine_seconds_count{call="stop"} > 0',
        'fgpu_service_request_seconds_count{handler="Metrics", status="200"} > 0',
        'fgpu_service_errors_total{code="no_such_session"} > 0',
    ):
        until(lambda e=expression: result(e), within_s=60, what=expression)
    assert {found["value"][1] for found in result("up")} == {"1"}
    alerts = requests.get(f"{prometheus}/rules", timeout=10).json()["data"]["groups"][0]["rules"]
    assert {rule["health"] for rule in alerts} <= {"ok", "unknown"}
    assert [rule["name"] for rule in alerts if rule["state"] == "firing"] == []


@pytest.mark.parametrize(("path", "unknown"), [("hub/metrics", 403), ("services/fgpu/metrics", 401)])
def test_who_has_no_token_reads_no_metrics(hub: HubProcess, path: str, unknown: int) -> None:
    url = f"{hub.url}/{path}"
    until(lambda: requests.get(url, timeout=10).status_code == unknown, what="the service answers")
    token = hub.add_user("ann")
    answer = requests.get(url, headers={"Authorization": f"token {token}"}, timeout=10)
    assert answer.status_code == 403
