"""Where the administrators' pages and their part of the API are."""

from __future__ import annotations

from typing import Any

from tornado.routing import URLSpec
from tornado.web import url

from fgpuspawner.service.admin import audit, banner, nodes, queue, quotas, usage

NUMBER = "([0-9]{1,15})"


def routes(prefix: str, own: dict[str, Any]) -> list[URLSpec]:
    """Return them, below the service's prefix."""
    api = f"{prefix}api/v1/admin/"
    return [
        url(f"{prefix}{queue.ADDRESS}", queue.QueuePage, own),
        url(f"{prefix}{nodes.ADDRESS}", nodes.NodesPage, own),
        url(f"{prefix}{nodes.ADDRESS}/(drain|gone)", nodes.ConfirmPage, own),
        url(f"{prefix}{quotas.ADDRESS}", quotas.QuotasPage, own),
        url(f"{prefix}{usage.ADDRESS}", usage.UsagePage, own),
        url(f"{prefix}{banner.ADDRESS}", banner.BannerPage, own),
        url(f"{prefix}{audit.ADDRESS}", audit.AuditPage, own),
        url(f"{api}queue", queue.Queues, own),
        url(f"{api}sessions/{NUMBER}/priority", queue.Priority, own),
        url(f"{api}nodes", nodes.Nodes, own),
        url(f"{api}nodes/([^/]{{1,255}})", nodes.OneNode, own),
        url(f"{api}quotas", quotas.Quotas, own),
        url(f"{api}banner", banner.BannerApi, own),
        url(f"{api}usage", usage.UsageApi, own),
        url(f"{api}usage[.]csv", usage.UsageFile, own),
        url(f"{api}audit", audit.AuditApi, own),
        url(f"{api}audit[.]csv", audit.AuditFile, own),
    ]
