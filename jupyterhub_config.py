"""The runnable example: what `make run` starts, and a beginning for your own.

From the command line it takes PORT, RUNTIME (local or docker), SIMULATED_GPUS, FGPU_PER_GPU and FGPU_DATA.
"""

import os
import secrets
from pathlib import Path

from fgpuspawner.config import configure

c = get_config()  # noqa: F821

data = Path(os.environ.get("FGPU_DATA", "data")).absolute()
data.mkdir(parents=True, exist_ok=True, mode=0o700)
port = int(os.environ.get("PORT", "8000"))

c.JupyterHub.bind_url = f"http://127.0.0.1:{port}"
c.JupyterHub.hub_port = port + 1


def secret(name: str, length: int) -> str:
    """Return the secret in this file of the data folder, generated the first time."""
    path = data / name
    if not path.exists():
        path.touch(mode=0o600)
        path.write_text(secrets.token_urlsafe(length))
    return path.read_text().strip()


# The proxy is a process of its own, which `make run` starts: open notebooks stay connected while the Hub restarts.
# How to run it under systemd is in docs/operations.md.
c.ConfigurableHTTPProxy.should_start = False
c.ConfigurableHTTPProxy.api_url = f"http://127.0.0.1:{port + 2}"
c.ConfigurableHTTPProxy.auth_token = secret("proxy-token", 32)

# Anybody may log in with one generated password, the administrator with another. On a real Hub: your own
# authenticator.
c.JupyterHub.authenticator_class = "shared-password"
c.SharedPasswordAuthenticator.user_password = secret("password", 12)
c.SharedPasswordAuthenticator.admin_password = secret("admin-password", 32)
c.Authenticator.admin_users = {"admin"}
c.Authenticator.allow_all = True

# A demo leaves nothing behind. On a real Hub leave this out: sessions then outlive a restart of the Hub.
c.JupyterHub.cleanup_servers = True

if os.environ.get("RUNTIME", "local") == "docker":
    # Homes outlive sessions, and are in no image that a session is saved as.
    c.FGPUSpawner.volumes = {"fgpu-home-{username}": "/home/jovyan"}

configure(
    c,
    runtime=os.environ.get("RUNTIME", "local"),
    data_dir=str(data),
    service_port=port + 3,
    fgpu_per_gpu=os.environ.get("FGPU_PER_GPU", "2"),
    owners_may_commit=True,
    # While others wait, idle sessions give their GPU back; their variables stay in this much host memory.
    parked_memory_mib=8192,
    reclaim={"*": {"park": "when needed"}},
    simulated_gpus=os.environ.get("SIMULATED_GPUS", "auto"),
)
