"""The command ``fgpu kube``: the Hub's rights, and the check of a cluster."""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any

import click

from fgpuspawner.cli.command import Group, Report, UsageError, config_option
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, quiet
from fgpuspawner.engines.kubernetes.dialects import DIALECTS
from fgpuspawner.engines.kubernetes.rights import REACHES, RIGHTS, manifests, rights_of
from fgpuspawner.settings import FGPU

if TYPE_CHECKING:
    from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


@click.group(cls=Group)
def kube_command() -> None:
    """Make what sessions on Kubernetes need beside the Hub."""


@kube_command.command("manifests")
@click.option("--namespace", metavar="NAME", required=True, help="where the Hub and its sessions are")
@click.option("--account", metavar="NAME", default="hub", help="its service account; default: hub")
@click.option(
    "--dialect",
    default="lease",
    type=click.Choice([kind.name for kind in DIALECTS]),
    help="c.KubernetesFGPUSpawner.dialect; default: lease",
)
@click.option(
    "--reach",
    default="cluster",
    type=click.Choice(REACHES),
    help="what the Hub may read: its namespace only, also the nodes, or also other pods; default: cluster",
)
def print_manifests(namespace: str, account: str, dialect: str, reach: str) -> list[str]:
    """Print what gives a Hub its rights in a cluster.

    They are a Role and a ClusterRole with the Hub's rights only, bound to its service account, for
    `kubectl apply -f -`. With `--reach namespace` there is no ClusterRole; docs/kubernetes.md says what the Hub does
    not know then.
    """
    import yaml

    for option, value in (("namespace", namespace), ("account", account)):
        if LABEL.fullmatch(value) is None:
            raise UsageError(f"--{option} {value!r}: use small letters, digits and dashes")
    rights = rights_of(dialect, reach)
    with_own = {right.dialect for right in RIGHTS} - {""}
    made = manifests(rights, namespace=namespace, account=account)
    return [
        f"# What a Hub needs in namespace {namespace}, with dialect {dialect}.",
        *(f"# Another one for --dialect {name}." for name in sorted(with_own - {dialect})),
        *yaml.safe_dump_all(made, sort_keys=False, width=120).splitlines(),
    ]


@kube_command.command("check")
@config_option
@click.option(
    "--start",
    is_flag=True,
    help="also start a pod that leases a GPU and a session's pod, say which GPUs they see, and remove them",
)
def check_cluster(config: str, start: bool) -> list[str]:
    """Ask a cluster whether it is as the Hub needs it; the status is 1 where sessions cannot start.

    It asks with your rights: in the Hub's pod with the Hub's, else by KUBECONFIG. Without --start nothing is made
    or changed.
    """
    from fgpuspawner.engines.kubernetes.check import findings

    hub_config, settings, kind = _loaded(config)
    reached = kind.reached(hub_config)
    with quiet():
        try:
            found = asyncio.run(findings(kind, hub_config, settings, reached, start=start))
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise UsageError("it was ended before it was done; what it has made is removed") from None
    return Report(map(str, found), status=int(any(one.grade == "FAIL" for one in found)))


def _loaded(path: str) -> tuple[Any, FGPU, type[KubernetesFGPUSpawner]]:
    from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

    config = load_config(path)
    with quiet():
        settings, app = checked_like_the_hub(config, path)
    if not issubclass(app.spawner_class, KubernetesFGPUSpawner):
        raise UsageError(f'{path}: its sessions are no pods; call configure(c, runtime="kubernetes") in it')
    return config, settings, app.spawner_class
