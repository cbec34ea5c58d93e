"""The meter: what each running session holds and uses of its GPUs, measured on the host."""
