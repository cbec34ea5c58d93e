"""The dialects: what a share of ours is in the words of each way to share GPUs on Kubernetes."""

from fgpuspawner.engines.kubernetes.dialects.base import (
    LIBFGPU,
    Beside,
    Dialect,
    Given,
    NotKnown,
    NotSayable,
    PodPatch,
    Registered,
)
from fgpuspawner.engines.kubernetes.dialects.cce import Cce
from fgpuspawner.engines.kubernetes.dialects.dra import Dra
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.dialects.lease import Lease
from fgpuspawner.engines.kubernetes.dialects.mig import Mig

DIALECTS: tuple[type[Dialect], ...] = (Lease, Dra, Hami, Cce, Mig)
"""All of them, the default first."""

__all__ = [
    "DIALECTS",
    "LIBFGPU",
    "Beside",
    "Cce",
    "Dialect",
    "Dra",
    "Given",
    "Hami",
    "Lease",
    "Mig",
    "NotKnown",
    "NotSayable",
    "PodPatch",
    "Registered",
]
