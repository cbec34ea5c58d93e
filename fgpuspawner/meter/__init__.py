"""Measures on the host what each running session holds and uses of its GPUs."""
