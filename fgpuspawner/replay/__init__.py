"""``fgpu replay``: what another policy or quota would have done with the requests that there were."""
