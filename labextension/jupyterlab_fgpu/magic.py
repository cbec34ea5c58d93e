"""The magic `%fgpu`, for kernels of Python 3.6 and later."""

from typing import Any


def add_magic(shell: Any) -> None:
    """Register `%fgpu` with an IPython shell."""
    shell.register_magic_function(fgpu, "line", "fgpu")


def fgpu(line: str) -> None:
    """Print this session's slice of a GPU, the processes that hold its memory, and the queue."""
    from . import kernel_reading  # noqa: PLC0415 - every kernel loads the magic, few use it

    if line.strip():
        print("%fgpu takes no arguments")
        return
    print(kernel_reading.as_text(kernel_reading.read()))
