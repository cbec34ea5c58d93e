"""The command ``fgpu setup``: what an administrator would write and start by hand, planned, shown, then done."""
