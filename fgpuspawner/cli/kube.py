"""The command ``fgpu kube``: what sessions on Kubernetes need beside the Hub."""

from __future__ import annotations

import argparse
import asyncio
import re
from pathlib import Path
from shlex import quote
from typing import TYPE_CHECKING, Any

from fgpuspawner.cli.command import Report, add_command, add_commands, add_config
from fgpuspawner.cli.hub_config import checked_like_the_hub, load_config, quiet
from fgpuspawner.cli.usage import UsageError
from fgpuspawner.engines.kubernetes.dialects import DIALECTS
from fgpuspawner.engines.kubernetes.files_image import REFERENCE, write_files_image
from fgpuspawner.engines.kubernetes.rights import RIGHTS, manifests, rights_of
from fgpuspawner.isolation import native
from fgpuspawner.settings import FGPU

if TYPE_CHECKING:
    from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

# A name with a tag, as docker and containerd know it.
NAMED = re.compile(
    r"[a-z0-9][a-z0-9._-]*(:[0-9]+)?(/[a-z0-9][a-z0-9._-]*)*:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}"
)

LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")


def add_to(commands: Any) -> None:
    about = "Make what sessions on Kubernetes need beside the Hub."
    own = add_commands(commands, "kube", "what sessions on Kubernetes need", about)
    image = add_command(
        own,
        run_image,
        "image",
        "write the image that puts libfgpu and its files into sessions",
        "Write the files image, with which a pod gets libfgpu and what goes with it, as a file that docker, skopeo and "
        "ctr can load. It is of this version of fgpuspawner: after an update write and push it again.",
    )
    image.add_argument("file", metavar="FILE", help="the file to write, such as files.tar")
    image.add_argument(
        "--reference", metavar="NAME", default=REFERENCE, help=f"its name; default: {REFERENCE}"
    )
    rights = add_command(
        own,
        run_manifests,
        "manifests",
        "print what gives a Hub its rights in a cluster",
        "Print the Role and the ClusterRole with what a Hub needs and no more, bound to its service account, for "
        "`kubectl apply -f -`.",
    )
    rights.add_argument(
        "--namespace", metavar="NAME", required=True, help="where the Hub and its sessions are"
    )
    rights.add_argument("--account", metavar="NAME", default="hub", help="its service account; default: hub")
    rights.add_argument(
        "--dialect",
        metavar="NAME",
        default="lease",
        choices=[kind.name for kind in DIALECTS],
        help="c.KubernetesFGPUSpawner.dialect; default: lease",
    )
    check = add_command(
        own,
        run_check,
        "check",
        "ask a cluster whether it is as the Hub needs it",
        "Ask a cluster whether it is as the Hub needs it, with your rights: in the Hub's pod with the Hub's, else by "
        "KUBECONFIG. Nothing is made or changed.",
    )
    add_config(check)


def run_image(given: argparse.Namespace) -> list[str]:
    """Write the files image, and return how it gets to the cluster."""
    path, reference = Path(given.file), given.reference
    if NAMED.fullmatch(reference) is None:
        raise UsageError(
            f"--reference {reference!r}: use a name with a tag, such as registry.example.org/{REFERENCE}"
        )
    write_files_image(native.FOLDER, path, reference=reference)
    file = quote(str(path))
    return [
        f"wrote {path}: the image {reference}",
        "Push it to a registry that the cluster's machines can pull from, with one of these:",
        f"  docker load -i {file} && docker push {reference}",
        f"  skopeo copy docker-archive:{file} docker://{reference}",
        "or, without a registry, load it on every machine of the cluster:",
        f"  ctr -n k8s.io images import {file}",
    ]


def run_manifests(given: argparse.Namespace) -> list[str]:
    """Return the manifests of the Hub's rights."""
    import yaml

    for option in ("namespace", "account"):
        if LABEL.fullmatch(getattr(given, option)) is None:
            raise UsageError(f"--{option} {getattr(given, option)!r}: use small letters, digits and dashes")
    rights = rights_of(given.dialect)
    with_own = {right.dialect for right in RIGHTS} - {""}
    made = manifests(rights, namespace=given.namespace, account=given.account)
    return [
        f"# What a Hub needs in namespace {given.namespace}, with dialect {given.dialect}.",
        *(f"# Another one for --dialect {name}." for name in sorted(with_own - {given.dialect})),
        *yaml.safe_dump_all(made, sort_keys=False, width=120).splitlines(),
    ]


def run_check(given: argparse.Namespace) -> list[str]:
    """Return what was found in the cluster; status 1 where sessions cannot start."""
    from fgpuspawner.engines.kubernetes.check import Grade, findings

    config, settings, kind = _loaded(given.config)
    reached = kind.reached(config)
    with quiet():
        found = asyncio.run(findings(kind, config, settings, reached))
    return Report(map(str, found), status=int(any(one.grade is Grade.FAIL for one in found)))


def _loaded(path: str) -> tuple[Any, FGPU, type[KubernetesFGPUSpawner]]:
    """Return a Hub's configuration, its settings and its spawner class.

    Raises:
        UsageError: its sessions are no pods.
    """
    from fgpuspawner.engines.kubernetes.spawner import KubernetesFGPUSpawner

    config = load_config(path)
    with quiet():
        settings, app = checked_like_the_hub(config, path)
    if not issubclass(app.spawner_class, KubernetesFGPUSpawner):
        raise UsageError(f'{path}: its sessions are no pods; call configure(c, runtime="kubernetes") in it')
    return config, settings, app.spawner_class
