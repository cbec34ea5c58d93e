"""Share GPUs by fractions through JupyterHub: a spawner that queues, with its scheduler embedded."""

from importlib.metadata import version

__version__ = version("fgpuspawner")
