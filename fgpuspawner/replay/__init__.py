"""``fgpu replay``: simulates past requests under another policy or quota."""
