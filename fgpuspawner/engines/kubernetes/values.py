"""The values with which Zero to JupyterHub's chart runs a Hub of queued sessions. Pure."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from sqlalchemy import make_url

from fgpuspawner.images.model import Catalogue
from fgpuspawner.settings import FGPU

HOME = PurePosixPath("/srv/jupyterhub")
"""Where the chart mounts the Hub's volume; all else in the Hub's pod is gone when it starts again."""
DATA = str(HOME / "fgpu")
CATALOGUE = "/etc/fgpu/catalogue.toml"
DB_URL = "FGPU_DB_URL"
SECTIONS = ("FGPU", "KubernetesFGPUSpawner")
OURS = {
    "data_dir",
    "catalogue",
    "db_url",
    "service_ip",
    "service_url_for_sessions",
    "firewall",
    "finds_nodes",
}
OURS |= {"namespace"}
"""Settings that the chart decides, or that go into the file another way."""
MAY_REACH_THE_HUB = {"hub.jupyter.org/network-access-hub": "true"}
HUBS_POD = {"app": "jupyterhub", "component": "hub"}


@dataclass(frozen=True, slots=True)
class Values:
    """What is written for the chart, and the settings that a file cannot hold: functions and the like."""

    values: Mapping[str, Any]
    left_out: Sequence[str] = field(default=())


def values(
    sections: Mapping[str, Mapping[str, Any]],
    settings: FGPU,
    catalogue: Catalogue,
    catalogue_text: str,
    *,
    hub_image: str,
    dialect: str,
) -> Values:
    """Return the chart's values. ``sections`` are what the Hub's configuration sets for each class.

    ``catalogue_text`` is the catalogue's file, empty for the one that comes with fgpuspawner.
    """
    lines, left_out = _settings(sections)
    secret = bool(settings.db_url and make_url(settings.db_url).password)
    given = {"runtime": "kubernetes", "data_dir": DATA, "firewall": "managed-elsewhere"}
    given["service_url_for_sessions"] = f"http://hub:{settings.service_port}/services/fgpu/"
    if catalogue_text:
        given["catalogue"] = CATALOGUE
    if settings.db_url and not secret:
        given["db_url"] = settings.db_url
    said = [f"    {name}={value!r}," for name, value in given.items()]
    said.append("    service_ip=gethostbyname(gethostname()),")
    if secret:
        said.append(f'    db_url=os.environ["{DB_URL}"],')
    program = [
        *(["import os"] if secret else []),
        "from socket import gethostbyname, gethostname",
        "",
        "from fgpuspawner.config import configure",
        "",
        *lines,
        "configure(",
        "    c,",
        *said,
        ")",
        "",
    ]
    name, _, tag = _named(hub_image)
    port = settings.service_port
    may_reach = [{"ports": [{"port": port}], "from": [{"podSelector": {"matchLabels": MAY_REACH_THE_HUB}}]}]
    reaches = {"egress": [{"ports": [{"port": port}], "to": [{"podSelector": {"matchLabels": HUBS_POD}}]}]}
    hub: dict[str, Any] = {
        "image": {"name": name, "tag": tag},
        "consecutiveFailureLimit": 0,
        "allowNamedServers": True,
        "service": {"extraPorts": [{"name": "fgpu", "port": port, "targetPort": port}]},
        "networkPolicy": {"ingress": may_reach},
        "extraConfig": {"fgpu": "\n".join(program)},
    }
    if catalogue_text:
        hub["extraFiles"] = {"fgpu-catalogue": {"mountPath": CATALOGUE, "stringData": catalogue_text}}
    if secret:
        hub["extraEnv"] = {DB_URL: {"valueFrom": {"secretKeyRef": {"name": "fgpu", "key": "db-url"}}}}
    singleuser: dict[str, Any] = {"networkPolicy": reaches}
    if dialect == "hami":
        # HAMi denies pods with a privileged container, the chart's own among them.
        singleuser["cloudMetadata"] = {"blockWithIptables": False}
    return Values(
        {
            "hub": hub,
            "proxy": {"chp": {"networkPolicy": reaches}},
            "singleuser": singleuser,
            "cull": {"enabled": False},
            "scheduling": {"userScheduler": {"enabled": False}},
            "prePuller": {"extraImages": _images(catalogue)},
        },
        left_out,
    )


def _settings(sections: Mapping[str, Mapping[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the lines that set again what was set, and the names of what no line can."""
    lines, left_out = [], []
    for section in SECTIONS:
        for name, value in sorted(sections.get(section, {}).items()):
            if name in OURS:
                continue
            if _can_be_written(value):
                lines.append(f"c.{section}.{name} = {value!r}")
            else:
                left_out.append(f"c.{section}.{name}")
    return lines, left_out


def _can_be_written(value: object) -> bool:
    try:
        return bool(ast.literal_eval(repr(value)) == value)
    except (ValueError, SyntaxError):
        return False


def _images(catalogue: Catalogue) -> dict[str, dict[str, str]]:
    """Return the images that are offered, as the chart has each pulled before somebody asks for it."""
    found = {}
    for image in catalogue.images:
        if image.enabled and image.reference:
            name, _, tag = _named(image.reference)
            found[image.slug] = {"name": name, "tag": tag}
    return found


def _named(reference: str) -> tuple[str, str, str]:
    """Return a reference's name and tag: the chart puts a colon between them, also before a digest's hexadecimals."""
    name, colon, tag = reference.rpartition(":")
    if not colon or "/" in tag:
        return reference, ":", "latest"
    return name, colon, tag
