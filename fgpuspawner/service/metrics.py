"""Prometheus metrics of the service: requests, errors, the process. They name no users."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector

REGISTRY = CollectorRegistry()
REQUESTS = Histogram(
    "fgpu_service_request_seconds",
    "Requests, by what answers them.",
    ["handler", "status"],
    buckets=(0.005, 0.02, 0.1, 0.5, 2, 10),
    registry=REGISTRY,
)
ERRORS = Counter("fgpu_service_errors", "Errors answered, by their code.", ["code"], registry=REGISTRY)
ProcessCollector(registry=REGISTRY)
