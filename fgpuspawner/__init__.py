"""Share GPUs by fractions through JupyterHub: a spawner that queues, with its scheduler embedded."""

__version__ = "0.1.0"
