"""The dialects: how each way to share GPUs on Kubernetes expresses a session's share."""

from fgpuspawner.engines.kubernetes.dialects.base import Dialect
from fgpuspawner.engines.kubernetes.dialects.counted import Cce, Mig
from fgpuspawner.engines.kubernetes.dialects.dra import Dra
from fgpuspawner.engines.kubernetes.dialects.hami import Hami
from fgpuspawner.engines.kubernetes.dialects.lease import Lease

DIALECTS: tuple[type[Dialect], ...] = (Lease, Dra, Hami, Cce, Mig)
"""All of them, the default first."""
