"""Requests for GPUs to a Docker engine: through the NVIDIA runtime, or CDI."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from docker.types import DeviceRequest

from fgpu_scheduler import Device

CDI_KIND = "nvidia.com/gpu="


def all_gpus(info: Mapping[str, Any]) -> DeviceRequest | None:
    """Return a request for all GPUs of an engine, for monitoring only; None if it has none."""
    if _has_nvidia(info):
        return DeviceRequest(driver="nvidia", count=-1, capabilities=[["gpu", "utility"]])
    ids = cdi_devices(info)
    whole = [i for i in ids if i == f"{CDI_KIND}all"]
    return DeviceRequest(driver="cdi", device_ids=whole or ids) if ids else None


def some_gpus(info: Mapping[str, Any], devices: Sequence[Device]) -> DeviceRequest | None:
    """Return a request for these devices; None if the engine does not know all of them.

    CDI names a device by its UUID or its index, depending on its configuration.
    """
    if _has_nvidia(info):
        uuids = [device.uuid for device in devices]
        return DeviceRequest(driver="nvidia", device_ids=uuids, capabilities=[["gpu", "compute", "utility"]])
    known = cdi_devices(info)
    names = [
        next((n for n in (f"{CDI_KIND}{d.uuid}", f"{CDI_KIND}{d.index}") if n in known), None)
        for d in devices
    ]
    found = [name for name in names if name is not None]
    return DeviceRequest(driver="cdi", device_ids=found) if found and len(found) == len(devices) else None


def cdi_devices(info: Mapping[str, Any]) -> list[str]:
    """Return an engine's NVIDIA devices in CDI, as ``docker info`` lists them since Docker 28.2."""
    found = [str(d.get("ID", "")) for d in info.get("DiscoveredDevices") or () if d.get("Source") == "cdi"]
    return sorted(i for i in found if i.startswith(CDI_KIND))


def _has_nvidia(info: Mapping[str, Any]) -> bool:
    return "nvidia" in (info.get("Runtimes") or {})
