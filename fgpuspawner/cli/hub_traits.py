"""What is wrong in the settings of JupyterHub itself, which it would say in its log only, or as a traceback."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import ssl
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from traitlets import TraitError
from traitlets.config import Config, Configurable

from fgpuspawner.cli.command import one_line
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.traits import nearest


def wrong_in_the_hub(app: Any, config: Config, settings: FGPU) -> Iterator[str]:
    """Yield a line for each setting with which the Hub cannot work as intended, with its level before it."""
    yield from _unknown_names(app, config)
    # Another proxy has its own user, and the Hub does not read its certificate.
    if app.proxy.should_start:
        if app.ssl_cert or app.ssl_key:
            if why := wrong_certificate(app.ssl_cert, app.ssl_key):
                yield f"FAIL: c.JupyterHub.ssl_cert and ssl_key: {why}"
        # The trait itself becomes http where there is no certificate.
        elif str(config.JupyterHub.get("bind_url", "")).startswith("https"):
            yield (
                "FAIL: c.JupyterHub.bind_url is https, and there is no certificate: set c.JupyterHub.ssl_cert and "
                'ssl_key; or if another web server encrypts, use bind_url = "http://127.0.0.1:8000" with '
                "c.JupyterHub.public_url"
            )
    yield from _who_may_log_in(app)
    if not _is_running(settings.data_path()):
        for name, (host, port) in _ports(app, settings).items():
            if port and is_taken(host or "", port):
                yield f"FAIL: {name}: port {port} is used by another program: end it, or choose another port"


def _who_may_log_in(app: Any) -> Iterator[str]:
    from jupyterhub.auth import NullAuthenticator

    kind = app.authenticator_class
    try:
        if kind(parent=app).any_allow_config or issubclass(kind, NullAuthenticator):
            return
    except (TraitError, ValueError) as e:
        yield f"FAIL: c.{kind.__name__}: {one_line(str(e))}"
    except Exception as e:
        yield f"WARNING: who may log in is not known: {kind.__name__} needs a running Hub ({type(e).__name__})"
    else:
        # Classes of other packages can have rules of their own.
        own = kind.__module__.startswith("jupyterhub.")
        yield f"{'FAIL: no user may' if own else 'WARNING: perhaps no user may'} log in: set " + (
            "c.Authenticator.allow_all = True, or allowed_users; where your authenticator has its own rules, "
            "c.Authenticator.any_allow_config = True"
        )


def _ports(app: Any, settings: FGPU) -> dict[str, tuple[str | None, int | None]]:
    hub = urlparse(app.hub_bind_url)
    found: dict[str, tuple[str | None, int | None]] = {
        "c.FGPU.service_port": (settings.service_ip, settings.service_port),
        "c.JupyterHub.hub_port": (hub.hostname, hub.port) if hub.netloc else (app.hub_ip, app.hub_port),
    }
    # The Hub ends the proxy that its last run left.
    if app.proxy.should_start and not os.path.exists(getattr(app.proxy, "pid_file", "")):
        public, api = urlparse(app.bind_url), urlparse(getattr(app.proxy, "api_url", ""))
        found["c.JupyterHub.bind_url"] = public.hostname, public.port
        found["c.ConfigurableHTTPProxy.api_url"] = api.hostname, api.port
    return found


def is_taken(host: str, port: int) -> bool:
    """Return whether another program listens on a port of this machine."""
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind((host, port))
        except OSError as e:
            # Another error is of a host that is not this machine, or of a port that is for root.
            return e.errno == errno.EADDRINUSE
    return False


def wrong_certificate(cert: str, key: str) -> str:
    """Return why a certificate and its key cannot be used; "" where they can."""
    try:
        for path in (cert, key):
            if not path:
                return "set both"
            Path(path).open("rb").close()
        password = os.environ.get("CONFIGPROXY_SSL_KEY_PASSPHRASE", "")
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: password)
    except ssl.SSLError as e:
        return f"{cert} with {key}: {e.reason or e}"
    except OSError as e:
        return f"{e.filename or f'{cert} with {key}'}: {e.strerror or e}"
    return ""


def _unknown_names(app: Any, config: Config) -> Iterator[str]:
    used = (type(app), app.proxy_class, app.authenticator_class, app.spawner_class, *app.classes)
    classes: dict[str, set[str]] = {}
    for kind in used:
        for base in kind.mro():
            if issubclass(base, Configurable):
                classes.setdefault(base.__name__, set()).update(kind.class_trait_names(config=True))
    for section, given in config.items():
        if section in classes:
            for name, value in given.items():
                # One class may be set inside another: c.JupyterHub.Spawner.
                if name not in classes[section] and not isinstance(value, Config):
                    yield f"FAIL: c.{section}.{name} is not a setting{nearest(name, classes[section])}"
        elif like := get_close_matches(section, classes, n=1, cutoff=0.9):
            yield f"FAIL: c.{section}: there is no such class; did you mean c.{like[0]}?"


def _is_running(data: Path) -> bool:
    """Return whether a Hub runs on this data folder; True also where this user cannot tell."""
    try:
        with (data / "hub.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
