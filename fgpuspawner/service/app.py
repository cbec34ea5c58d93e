"""The tornado application: every address of the service, its request log, and its static files."""

from __future__ import annotations

import logging
import secrets
from pathlib import Path
from pkgutil import resolve_name

from jupyterhub.services.auth import HubOAuthCallbackHandler
from tornado.template import Loader
from tornado.web import Application, RequestHandler, StaticFileHandler

from fgpuspawner.service import STATIC, navigation
from fgpuspawner.service.admin import audit, banner, images, nodes, overview, queue, quotas, usage
from fgpuspawner.service.api import capacity, events, forecast, me
from fgpuspawner.service.api import history as past_api
from fgpuspawner.service.api import images as images_api
from fgpuspawner.service.api import sessions as sessions_api
from fgpuspawner.service.api.base import Api, NotThere
from fgpuspawner.service.handler import CONTENT_SECURITY_POLICY, Service
from fgpuspawner.service.metrics import REQUESTS
from fgpuspawner.service.navigation import WISHES
from fgpuspawner.service.openapi import document
from fgpuspawner.service.pages import history, presets, private_images, sessions
from fgpuspawner.service.pages.base import NoPage

log = logging.getLogger(__name__)

HERE = Path(__file__).parent
ID = "([0-9]{1,15})"
"""Ids in addresses."""


class OpenApi(Api):
    """The API's own description, for every user of the service: it names no session."""

    needs_scope = None

    async def get(self) -> None:
        self.finish(document(f"{self.service.prefix}api/v1"))


PAGES: tuple[tuple[str, type[RequestHandler]], ...] = (
    *((page.address, resolve_name(f"fgpuspawner.service.{page.handler}")) for page in navigation.PAGES),
    (r"sessions\.csv", sessions.SessionsFile),
    (f"end/{ID}", sessions.EndPage),
    *((f"{wish}/{ID}", sessions.WishPage) for wish in WISHES),
    (f"resize/{ID}", sessions.ResizePage),
    (f"rename/{ID}", sessions.RenameSessionPage),
    (f"log/{ID}", sessions.LogPage),
    ("presets/", presets.PresetsPage),
    (r"history\.csv", history.HistoryFile),
    (f"save/{ID}", private_images.SavePage),
    (f"private-images/{ID}/rename", private_images.RenamePage),
    (f"private-images/{ID}/share", private_images.SharePage),
    (f"private-images/{ID}/answer", private_images.AnswerPage),
    (f"private-images/{ID}/delete", private_images.DeletePage),
    ("admin/nodes/(drain|gone)", nodes.ConfirmPage),
    ("admin/images/([a-z0-9-]{1,40})", images.EditPage),
    ("admin/new-image", images.NewPage),
    ("health", me.Health),
    ("metrics", me.Metrics),
)
"""Below the service's prefix."""

API: tuple[tuple[str, type[RequestHandler]], ...] = (
    ("openapi[.]json", OpenApi),
    ("me", me.Me),
    ("sessions", sessions_api.Sessions),
    (f"sessions/{ID}", sessions_api.OneSession),
    *((f"sessions/{ID}/{wish}", sessions_api.Wish) for wish in WISHES),
    (f"sessions/{ID}/image", images_api.SaveSession),
    (f"sessions/{ID}/meter", sessions_api.SessionMeter),
    (f"sessions/{ID}/log", sessions_api.SessionLog),
    (f"sessions/{ID}/setup", sessions_api.SessionSetup),
    (f"sessions/{ID}/receipt", past_api.OneReceipt),
    ("meters", sessions_api.Meters),
    ("history", past_api.History),
    ("history[.]csv", past_api.HistoryFile),
    ("advice", past_api.Advice),
    ("private-images", images_api.PrivateImages),
    (f"private-images/{ID}", images_api.OnePrivateImage),
    (f"private-images/{ID}/name", images_api.ImageName),
    (f"private-images/{ID}/shares", images_api.ImageShares),
    (f"private-images/{ID}/answer", images_api.ImageAnswer),
    (f"private-images/{ID}/recipe", images_api.Recipe),
    ("queue", capacity.Queue),
    ("capacity", capacity.Capacity),
    ("forecast", forecast.Forecast),
    ("images", images_api.Images),
    ("events", events.Events),
    ("admin/overview", overview.OverviewApi),
    ("admin/queue", queue.QueueApi),
    (f"admin/sessions/{ID}/priority", queue.PriorityApi),
    ("admin/nodes", nodes.NodesApi),
    ("admin/nodes/([^/]{1,255})", nodes.OneNodeApi),
    ("admin/quotas", quotas.QuotasApi),
    ("admin/banner", banner.BannerApi),
    ("admin/usage", usage.UsageApi),
    ("admin/usage[.]csv", usage.UsageFile),
    ("admin/audit", audit.AuditApi),
    ("admin/audit[.]csv", audit.AuditFile),
)
"""Below ``api/v1/``."""


class Static(StaticFileHandler):
    """Scripts and styles; their addresses change with their contents."""

    def set_default_headers(self) -> None:
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Content-Security-Policy", CONTENT_SECURITY_POLICY)
        self.clear_header("Server")


def make_app(service: Service) -> Application:
    prefix, own = service.prefix, {"service": service}
    return Application(
        [
            *((f"{prefix}{address}", handler, own) for address, handler in PAGES),
            (f"{prefix}oauth_callback", HubOAuthCallbackHandler),
            *((f"{prefix}api/v1/{address}", handler, own) for address, handler in API),
            (f"{prefix}api/.*", NotThere, own),
        ],
        default_handler_class=NoPage,
        default_handler_args=own,
        # The cookie only carries a token of the Hub; after a restart the Hub gives another without a log-in.
        cookie_secret=secrets.token_bytes(32),
        template_path=str(HERE / "templates"),
        # Long tables render their lines with these, without a template look-up per line.
        lines=Loader(str(HERE / "templates")),
        static_path=str(STATIC),
        static_url_prefix=f"{prefix}static/",
        static_handler_class=Static,
        log_function=log_request,
    )


def log_request(handler: RequestHandler) -> None:
    """Log one line, without the query, which can hold a token. Successful reads are logged at debug level only."""
    status, request = handler.get_status(), handler.request
    quiet = request.method in ("GET", "HEAD") and status < 400
    user = handler.current_user if isinstance(handler.current_user, dict) else {}
    level = logging.DEBUG if quiet else logging.INFO if status < 500 else logging.WARNING
    took_s = request.request_time()
    REQUESTS.labels(type(handler).__name__, status).observe(took_s)
    words = status, request.method, request.path, user.get("name", "-"), 1000 * took_s
    log.log(level, "%d %s %s (%s) %.0f ms", *words)
