"""What is wrong in the settings of JupyterHub itself, which it would say in its log only, or as a traceback."""

from __future__ import annotations

import errno
import fcntl
import socket
import ssl
from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from traitlets.config import Config, Configurable

from fgpuspawner.settings import FGPU
from fgpuspawner.settings.traits import nearest


def wrong_in_the_hub(app: Any, config: Config, settings: FGPU) -> list[str]:
    """Return a line for each setting with which the Hub cannot work as it is meant."""
    public, proxy = urlparse(app.bind_url), app.proxy
    wrong = list(_unknown_names(app, config))
    if app.ssl_cert or app.ssl_key:
        why = wrong_certificate(app.ssl_cert, app.ssl_key)
        wrong += [f"c.JupyterHub.ssl_cert and ssl_key: {why}"] if why else []
    # The trait itself becomes http where there is no certificate.
    elif proxy.should_start and str(config.JupyterHub.get("bind_url", "")).startswith("https"):
        wrong.append(
            "c.JupyterHub.bind_url is https, and there is no certificate: set c.JupyterHub.ssl_cert and ssl_key; or if "
            'another web server encrypts, use bind_url = "http://127.0.0.1:8000" with c.JupyterHub.public_url'
        )
    if not app.authenticator_class(parent=app).any_allow_config:
        wrong.append(
            "nobody may log in: set c.Authenticator.allow_all = True, or allowed_users; where your authenticator has its "
            "own rules, c.Authenticator.any_allow_config = True"
        )
    ports: dict[str, tuple[str | None, int | None]] = {
        "c.FGPU.service_port": (settings.service_ip, settings.service_port),
        "c.JupyterHub.hub_port": (app.hub_ip, app.hub_port),
    }
    if proxy.should_start:
        api = urlparse(getattr(proxy, "api_url", ""))
        ports |= {"c.JupyterHub.bind_url": (public.hostname, public.port)}
        ports |= {"c.ConfigurableHTTPProxy.api_url": (api.hostname, api.port)}
    if not _is_running(settings.data_path()):
        wrong += [
            f"{name}: port {port} is used by another program: end it, or choose another port"
            for name, (host, port) in ports.items()
            if port and is_taken(host or "", port)
        ]
    return wrong


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
    for path in (cert, key):
        if not Path(path).is_file():
            return f"there is no file {path or 'for one of them'}"
    try:
        # A key's password nobody could tell the proxy.
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(cert, key, password=lambda: "")
    except (OSError, ssl.SSLError) as e:
        return f"{cert} with {key}: {e.strerror or getattr(e, 'reason', '') or e}"
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
            for name in given.keys() - classes[section]:
                yield f"c.{section}.{name} is not a setting{nearest(name, classes[section])}"
        elif like := get_close_matches(section, classes, n=1, cutoff=0.9):
            yield f"c.{section}: there is no such class; did you mean c.{like[0]}?"


def _is_running(data: Path) -> bool:
    """Return whether a Hub runs on this data folder, or that is not for this user to know."""
    try:
        with (data / "hub.lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        return False
    except FileNotFoundError:
        return False
    except OSError:
        return True
