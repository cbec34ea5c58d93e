"""A launch is one trace at a collector of OpenTelemetry, where one is set."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from hubprocess import running, until

pytestmark = pytest.mark.timeout(300)


class Collector(ThreadingHTTPServer):
    """Takes spans in."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        super().__init__(("127.0.0.1", 0), Takes)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Takes(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        assert self.path == "/v1/traces"
        sent = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.spans += [s for r in sent.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def test_a_launch_is_one_trace_that_names_nobody(collector: Collector, tmp_path: Path) -> None:
    env = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_EXPORTER_OTLP_COMPRESSION": "none",
        "OTEL_BSP_SCHEDULE_DELAY": "200",
    }
    with running(tmp_path / "hub", runtime="local", env=env) as hub:
        hub.add_user("ann-is-nobody")
        hub.spawn("ann-is-nobody", options={"image": "python", "fgpu": "1"})
        until(lambda: hub.ready("ann-is-nobody"), within_s=120, what="ann's server")
        until(lambda: any(span.name == "fgpu.launch" for span in collector.spans), what="the trace")
    spans = {span.name: span for span in collector.spans}
    launch = spans["fgpu.launch"]
    assert {a.key for a in launch.attributes} == {"session_id", "request_id"}
    assert {s.trace_id for s in spans.values()} == {launch.trace_id}
    of = {name: span.parent_span_id for name, span in spans.items()}
    in_it = ("fgpu.wait", "fgpu.prepare", "fgpu.start", "fgpu.answer")
    assert {of[name] for name in in_it} == {launch.span_id}
    assert of["fgpu.verify"] == spans["fgpu.answer"].span_id
    assert not any("ann-is-nobody" in str(span) for span in collector.spans)
