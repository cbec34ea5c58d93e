"""Spans of a launch for a collector of OpenTelemetry, where one is set in the environment as OpenTelemetry has it."""

from __future__ import annotations

import logging
import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

COLLECTOR = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")

log = logging.getLogger("fgpu")


@cache
def _tracer() -> Any:
    if not any(map(os.environ.get, COLLECTOR)):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as e:
        log.warning("%s is set, and no span is sent (%s): pip install 'fgpuspawner[otel]'", COLLECTOR[0], e)
        return None
    resource = Resource({"service.name": "fgpuspawner"}).merge(OTELResourceDetector().detect())
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("fgpuspawner")


def span(name: str, **attributes: str | int) -> AbstractContextManager[object]:
    """Tell the collector how long what is in this context takes, as a part of the span that it is in.

    What an exception says stays in the log: it may name people.
    """
    tracer = _tracer()
    if tracer is None:
        return nullcontext()
    found: AbstractContextManager[object] = tracer.start_as_current_span(
        f"fgpu.{name}", attributes=attributes, record_exception=False, set_status_on_exception=False
    )
    return found
