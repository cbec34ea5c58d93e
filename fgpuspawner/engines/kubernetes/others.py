"""Sessions of other installations in our namespace, as after a change of ``db_url``. No Hub ends them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from kubernetes_asyncio.client import Configuration

from fgpu_scheduler import FGPUError
from fgpuspawner.engines import marks
from fgpuspawner.engines.kubernetes.api import Api, at_once
from fgpuspawner.engines.kubernetes.dialects.base import label


def in_namespace(reached: Callable[[], Configuration], where: str, installation: str) -> Sequence[str]:
    """Return for ``fgpu check`` a line for each other installation with sessions in a namespace. Blocks."""
    try:
        cluster = reached()
        found = at_once(lambda: _sessions_of_others(cluster, where, installation))
    except FGPUError as e:
        return [f"whose sessions run in namespace {where} is not known: {e}"]
    return [
        f"Sessions of another installation, {other}, run in namespace {where} ({count}): they count as any pods here, "
        "and nobody ends them. If they are this Hub's, of another database: set c.FGPU.db_url back to go on with them; "
        f"else end them: kubectl --namespace {where} delete pods --selector {marks.INSTALLATION}={other},{marks.SESSION}"
        for other, count in found.items()
    ]


async def _sessions_of_others(reached: Configuration, where: str, installation: str) -> Counter[str]:
    """Return how many sessions each other installation has in a namespace.

    Raises:
        Refused, EngineSilent: it cannot be told.
    """
    api = Api(reached)
    try:
        pods = await api.listed(
            f"/api/v1/namespaces/{where}/pods",
            (
                ("labelSelector", f"{marks.INSTALLATION},{marks.SESSION}"),
                ("fieldSelector", "status.phase!=Succeeded,status.phase!=Failed"),
            ),
            keep=lambda pod: (str(pod["metadata"]["name"]), label(pod, marks.INSTALLATION) or ""),
        )
    finally:
        await api.close()
    return marks.of_others(pods, installation)
