"""Settings, and what users are offered with them, for tests of the launch form."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from bs4 import BeautifulSoup
from traitlets.config import Config

from fgpuspawner.form import page as form
from fgpuspawner.form.offer import Offer, make_offer
from fgpuspawner.images.model import Image
from fgpuspawner.settings import FGPU

PYTHON = Image("python", "Python 3.11", "python", "3.11", "3.11", "fgpuspawner/base:0.1", default=True)
DUO = {"name": "duo", "cpu": 8, "memory_mib": 16384, "gpus": {"simulated": 2, "memory_mib": 8192}}


def settings(**given: Any) -> FGPU:
    """Return settings with two GPUs of 2 fGPU on one node, and what is given."""
    return FGPU.from_config(Config(FGPU={"nodes": [DUO], "fgpu_per_gpu": 2} | given)).checked()


def offer(
    *images: Image,
    of: tuple[str, ...] = ("default",),
    user: str = "ann",
    hub_groups: Collection[str] = (),
    **given: Any,
) -> Offer:
    """Return what a user of the resource groups ``of`` is offered of these images, or of Python alone."""
    own = settings(**given)
    nodes = own.discover_nodes()
    return make_offer(own, nodes, images or (PYTHON,), of, user=user, hub_groups=hub_groups)


def page(offered: Offer, **more: Any) -> BeautifulSoup:
    """Return the launch form of an offer, with no field filled in unless ``given`` says so."""
    given = {"given": {}} | more
    return BeautifulSoup(form.render(offered, hub_prefix="/hub/", ticket="t", **given), "html.parser")
