"""Spans where there is no collector, or no OpenTelemetry: launches go on, and who set a collector is told."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import nullcontext

import pytest

from fgpuspawner import spans


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in spans.COLLECTOR:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    spans._tracer.cache_clear()
    yield
    spans._tracer.cache_clear()


def test_without_a_collector_opentelemetry_is_not_even_looked_for(caplog: pytest.LogCaptureFixture) -> None:
    with spans.span("launch", session_id=1):
        pass
    assert isinstance(spans.span("wait"), nullcontext)
    assert not caplog.records


def test_a_collector_without_opentelemetry_is_one_line_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("fgpu"), "propagate", True)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    for _ in range(2):
        with spans.span("launch", session_id=1):
            pass
    (line,) = caplog.messages
    assert line.endswith("pip install 'fgpuspawner[otel]'")
