#!/usr/bin/env python3
"""In place of NVIDIA's container runtime in its mode "cdi", for tests/kube/cluster.sh: runc, after what CDI adds.

Debian's containerd knows no CDI. As NVIDIA's own (internal/modifier/cdi.go), it takes the devices of annotations
``nvidia.cdi.k8s.io/``, else those of NVIDIA_VISIBLE_DEVICES, where a name that is not qualified is one of
``management.nvidia.com/gpu``; and it refuses a container with devices that are in no specification.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

PREFIX, VISIBLE, DEFAULT = "nvidia.cdi.k8s.io/", "NVIDIA_VISIBLE_DEVICES=", "management.nvidia.com/gpu"


class Unresolvable(Exception):
    """A device that no specification has."""


def asked(config: dict[str, Any]) -> list[str]:
    """Return the qualified names of the devices that a container asks for."""
    notes = [v for k, v in (config.get("annotations") or {}).items() if k.startswith(PREFIX)]
    if notes:
        return ",".join(notes).split(",")
    values = [e.removeprefix(VISIBLE) for e in config["process"].get("env", ()) if e.startswith(VISIBLE)]
    names = [name for name in ",".join(values[-1:]).split(",") if name not in ("", "void", "none")]
    return [name if "=" in name else f"{DEFAULT}={name}" for name in names]


def add(bundle: Path) -> None:
    """Add to a container's description what it asks for."""
    path = bundle / "config.json"
    config = json.loads(path.read_text())
    folder = Path(str(bundle).partition("/containerd/state/")[0]) / "own/cdi"
    specs = [json.loads(spec.read_text()) for spec in folder.glob("*.json")]
    has = {f"{spec['kind']}={d['name']}": d["containerEdits"] for spec in specs for d in spec["devices"]}
    devices = asked(config)
    missing = [name for name in devices if name not in has]
    if missing:
        raise Unresolvable(f"failed to inject CDI devices: unresolvable CDI devices {', '.join(missing)}")
    for name in devices:
        config["process"]["env"] += has[name].get("env", [])
        for mount in has[name]["mounts"]:
            options = mount.get("options", ["rbind", "ro"])
            source, target = mount["hostPath"], mount["containerPath"]
            config["mounts"].append(
                {"source": source, "destination": target, "type": "bind", "options": options}
            )
    path.write_text(json.dumps(config))


if __name__ == "__main__":
    words = sys.argv[1:]
    if "create" in words:
        try:
            add(Path(words[words.index("--bundle") + 1]))
        except Unresolvable as e:
            Path(words[words.index("--log") + 1]).write_text(json.dumps({"level": "error", "msg": str(e)}))
            sys.exit(1)
    os.execvp("runc", ["runc", *words])
