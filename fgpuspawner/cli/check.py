"""The command ``fgpu check``: whether a Hub's configuration can work."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import TYPE_CHECKING

from sqlalchemy import make_url
from traitlets.config import Config

from fgpu_scheduler import FGPUError, Node, StoreUnavailable, format_milli
from fgpuspawner.cli.command import Report, command, config_option, in_json, one_line, read_only
from fgpuspawner.cli.hub_config import checked_like_the_hub, lacks_proxy_token, load_config, quiet
from fgpuspawner.cli.hub_traits import wrong_in_the_hub
from fgpuspawner.cli.units import as_hub_user
from fgpuspawner.form.presets import with_unknown_image
from fgpuspawner.hub.checks import facts_of, security_lines
from fgpuspawner.hub.inherited import overruled
from fgpuspawner.images.catalogue import load_catalogue
from fgpuspawner.isolation.manager import choices_for
from fgpuspawner.settings import FGPU
from fgpuspawner.settings.room import MIB, room_of

if TYPE_CHECKING:
    from fgpuspawner.spawner.base import QueuedSpawner

OK, WARN, FAIL = "OK", "WARN", "FAIL"
NOT_YET = ("the Hub makes it when it starts", "the Hub does it when it starts")
"""How the store ends its words on a database that no Hub has used so far."""


@command("check")
@config_option
def check_command(config: str) -> list[str]:
    """Load a Hub's configuration without starting the Hub, and say whether it can work."""
    try:
        lines = examined(config)
    except FGPUError as e:
        if not in_json():
            raise
        lines, found = [], [{"level": FAIL, "text": one_line(str(e))}]
    else:
        found = [{"level": _level(line), "text": line.strip()} for line in lines]
    worst = max((line["level"] for line in found), key=(OK, WARN, FAIL).index)
    return Report(lines, {"version": 1, "level": worst, "lines": found}, status=int(worst == FAIL))


def _level(line: str) -> str:
    if line.strip().startswith(f"{FAIL}: "):
        return FAIL
    return WARN if line.strip().startswith(("WARNING: ", "DANGER: ", "WARN: ")) else OK


def examined(path: str) -> list[str]:
    """Return what a configuration gives, as lines, the first of them "OK" or "FAIL". Root judges as the Hub's user."""
    config = load_config(path)
    # Its unit reads the token from there, as root. Others cannot.
    no_token = lacks_proxy_token(config) and not Path(path).with_name("proxy.env").exists()
    with as_hub_user(FGPU.from_config(config).data_path()):
        lines = _examined(config, path, no_token=no_token)
    return [f"{FAIL if any(_level(line) == FAIL for line in lines) else OK}: {path}", *lines]


def _examined(config: Config, path: str, *, no_token: bool) -> list[str]:
    with quiet():
        settings, app = checked_like_the_hub(config, path)
        lines = [f"  {line}" for line in wrong_in_the_hub(app, config, settings)]
    spawner_class: type[QueuedSpawner] = app.spawner_class
    able = spawner_class.capabilities
    catalogue = load_catalogue(settings.catalogue_path())
    nodes = settings.discover_nodes()
    chosen = {c.node_id: c for c in choices_for(settings, nodes, own_root=able.own_root)}
    lines.append(f"  sessions: {able.kind} ({spawner_class.__name__})")
    if no_token:
        lines.append("  WARNING: CONFIGPROXY_AUTH_TOKEN is not set here; the Hub needs it in its environment")
    if settings.finds_nodes:
        lines.append("  nodes: those that the engine finds, when the Hub starts and while it runs")
    for node in nodes:
        lines.append(
            f"  node {node.id} (group {node.resource_group}): {format_milli(node.cpu_milli)} CPU, {node.memory_mib} MiB, "
            f"{len(node.devices)} GPU{'' if len(node.devices) == 1 else 's'}"
        )
        lines.extend(_more_than_there_is(node, settings))
        lines.extend(
            f"    {d.index}: {d.model}, {d.memory_mib} MiB = {format_milli(d.capacity_milli)} fGPU, {d.uuid}"
            + (" (simulated)" if d.simulated else "")
            for d in node.devices
        )
        lines.append(f"    isolation: {chosen[node.id].backend.name}: {chosen[node.id].reason}")
    offered = [image.slug for image in catalogue.images if image.enabled]
    others = len(catalogue.images) - len(offered)
    lines.append(
        f"  images: {len(offered)} ({', '.join(offered)})" + (f", {others} not enabled" if others else "")
    )
    slugs = {image.slug for image in catalogue.images}
    lines.extend(
        f"  WARNING: {line}" for line in with_unknown_image(settings.presets, settings.warm_pool, slugs)
    )
    lines.extend(f"  WARNING: {line}" for line in overruled(spawner_class, config))
    danger = settings.danger_of_sharing(saves_images=able.saves_images, subdomain_host=app.subdomain_host)
    if danger is not None:
        lines.append(f"  DANGER: {danger}")
    words, installation = _database(settings.database_url())
    lines.append(f"  database: {words}")
    lines.extend(_disk(settings.data_path()))
    lines.append(f"  {_clock()}")
    lines.extend(f"  {line}" for line in spawner_class.holds(config, settings))
    elsewhere = spawner_class.wrong_elsewhere(config, settings, installation)
    lines.extend(f"  {line}" if _level(line) == FAIL else f"  WARNING: {line}" for line in elsewhere)
    with quiet():
        backends = {node_id: choice.backend.name for node_id, choice in chosen.items()}
        facts = facts_of(app, settings, nodes=nodes, backends=backends)
    return [*lines, *(f"  {line}" for line in security_lines(facts))]


def _more_than_there_is(node: Node, settings: FGPU) -> list[str]:
    if settings.is_elsewhere(node.id):
        return []
    cores, memory_mib = has_here()
    has = [f"{cores} cores"] * (node.cpu_milli > 1000 * cores)
    has += [f"{memory_mib} MiB of memory"] * (node.memory_mib > memory_mib)
    return [f"    WARNING: this machine has only {' and '.join(has)}"] if has else []


def has_here() -> tuple[int, int]:
    """Return how many cores this process may use, and this machine's memory in MiB."""
    return len(os.sched_getaffinity(0)), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // MIB


def _disk(data: Path) -> list[str]:
    # It may be for the Hub to make.
    there = next((folder for folder in (data, *data.parents) if folder.is_dir()), None)
    if there is None:
        return []
    if there == data and not os.access(data, os.W_OK | os.X_OK):
        return [f"  {FAIL}: c.FGPU.data_dir: {data} cannot be written to by the Hub's user"]
    try:
        room = room_of(there)
    except OSError as e:
        return [f"  disk: not known: {e.strerror}"]
    return [f"  disk: {room.free_bytes // MIB} MiB left for {data}"] + [
        f"  WARNING: {words}" for words in (room.words(data),) if words
    ]


def _database(url: str) -> tuple[str, str]:
    """Return a line about the database at this URL, and the id of its installation, "" for a new database."""
    became, installation = "answers", ""
    try:
        with read_only(url) as store:
            installation = store.installation_id
    except StoreUnavailable as e:
        # Not there yet, or empty: that is how it is before the first start.
        if not str(e).endswith(NOT_YET):
            raise
        became = "made ready when the Hub starts"
    # The query stays out: it may hold a password too.
    shown = make_url(url).set(query={}).render_as_string(hide_password=True)
    return f"{shown}, {became}", installation


def _clock() -> str:
    timex = ctypes.create_string_buffer(512)
    if ctypes.CDLL(None).adjtimex(timex) < 0:
        return "clock: not known whether it is synchronised; ask on the machine: timedatectl"
    # The field ``status`` of struct timex on 64-bit machines, and its flag STA_UNSYNC.
    if not int.from_bytes(timex.raw[40:44], "little") & 0x40:
        return "clock: synchronised"
    return (
        "WARNING: the clock of this machine is not synchronised: start times, limits and logs go wrong with it, and so "
        "does signing in elsewhere; install chrony, and look again: timedatectl"
    )
