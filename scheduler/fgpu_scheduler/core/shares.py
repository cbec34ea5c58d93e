"""The shares that a request is worth on given devices. Only this module turns amounts into shares."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import attrgetter
from typing import NamedTuple, TypeVar

from fgpu_scheduler.core.model import Device, Request, RequestCount, Share, ShareMode, Size
from fgpu_scheduler.core.units import COMPUTE_GRAIN_PERCENT, MEMORY_GRAIN_MIB


class RequestShape(NamedTuple):
    """The fields that decide where a request fits: requests of one shape fit in the same places."""

    resource_group: str
    fgpu_milli: int
    cpu_milli: int
    memory_mib: int
    gpu_memory_mib: int | None
    compute_percent: int | None
    gpu_models: tuple[str, ...]


_fields_of = attrgetter(*RequestShape._fields)


def shape(asked: Request | RequestCount) -> RequestShape:
    """Return the shape of a request, or of counted ones."""
    return RequestShape(*_fields_of(asked))


AnyRequest = TypeVar("AnyRequest", Request, RequestShape)


def per_preferred_model(asked: AnyRequest) -> tuple[AnyRequest, ...]:
    """Return the request once per accepted GPU model, the preferred one first; unchanged if it accepts all."""
    if len(asked.gpu_models) < 2:
        return (asked,)
    if isinstance(asked, RequestShape):
        return tuple(asked._replace(gpu_models=(model,)) for model in asked.gpu_models)
    return tuple(replace(asked, gpu_models=(model,)) for model in asked.gpu_models)


def accepts_model(asked: Request | RequestShape, model: str) -> bool:
    """Return whether a request may be placed on a GPU of this model."""
    return not asked.gpu_models or model in asked.gpu_models


def is_explicit(request: Request | RequestShape) -> bool:
    """Return whether a request is for GPU memory or compute instead of fGPU."""
    return request.gpu_memory_mib is not None or request.compute_percent is not None


def devices_needed(fgpu_milli: int, *, capacity_milli: int) -> int | None:
    """Return how many devices of this capacity the amount needs, or None if it is impossible.

    A fraction lies on one device; an amount above one device must be whole devices.
    """
    if fgpu_milli <= capacity_milli:
        return 1
    count, rest = divmod(fgpu_milli, capacity_milli)
    return None if rest else count


def shares_of(request: Request | RequestShape, devices: Sequence[Device]) -> tuple[Share, ...] | None:
    """Return the share of ``request`` on each of exactly these devices, or None if the request cannot use them so.

    A fraction and explicit amounts lie on one device; more is whole devices of one capacity; without fGPU there is no
    device. With GPU models, all devices must be of one of them. A share without memory is impossible, because no
    limit can be set to it.
    """
    if request.gpu_models and not all(
        device.model in request.gpu_models and device.model == devices[0].model for device in devices
    ):
        return None
    if is_explicit(request):
        share = _explicit_share(request, devices[0]) if len(devices) == 1 else None
        return None if share is None else (share,)
    if request.fgpu_milli <= 0 or not devices:
        return () if request.fgpu_milli == 0 and not devices else None
    capacity = devices[0].capacity_milli
    needed = devices_needed(request.fgpu_milli, capacity_milli=capacity)
    if needed != len(devices) or any(device.capacity_milli != capacity for device in devices):
        return None
    each = request.fgpu_milli if needed == 1 else capacity
    shares = tuple(Share.of(device, each) for device in devices)
    return None if any(share.memory_mib <= 0 for share in shares) else shares


def _explicit_share(request: Request | RequestShape, device: Device) -> Share | None:
    """Return the share of explicit amounts on a device (product H2 to H5).

    Its fGPU is the larger one of both parts, so that explicit and fractional sessions are counted in one unit.
    """
    memory_mib, compute_percent = request.gpu_memory_mib, request.compute_percent
    if memory_mib is None or request.fgpu_milli != 0 or not 0 < memory_mib <= device.memory_mib:
        return None
    full = memory_mib == device.memory_mib
    if memory_mib % MEMORY_GRAIN_MIB and not full:
        return None
    if compute_percent is not None and (
        compute_percent % COMPUTE_GRAIN_PERCENT or not 0 < compute_percent <= 100
    ):
        return None
    if full or compute_percent == 100:
        return Share.of(device, device.capacity_milli)
    capacity, compute = device.capacity_milli, compute_percent or 0
    return Share(
        device.uuid,
        max(1, capacity * memory_mib // device.memory_mib, capacity * compute // 100),
        memory_mib,
        compute,
        ShareMode.MEMORY if compute_percent is None else ShareMode.MEMORY_COMPUTE,
    )


def size_until(until_s: int, *, shares: Sequence[Share], devices: Iterable[Device]) -> Size:
    """Return what these shares are until an instant."""
    capacity = {device.uuid: device.capacity_milli for device in devices}
    return Size(
        until_s,
        sum(share.fgpu_milli for share in shares),
        sum(
            gpu_millionths(share.fgpu_milli, capacity.get(share.device_uuid), share.compute_percent)
            for share in shares
        ),
        sum(share.memory_mib for share in shares),
        sum(share.compute_percent for share in shares),
    )


def gpu_millionths(fgpu_milli: int, capacity_milli: int | None, compute_percent: int) -> int:
    """Return a share in millionths of its GPU; if the GPU is gone (None), by the compute percent of the share."""
    return round(1_000_000 * fgpu_milli / capacity_milli) if capacity_milli else 10_000 * compute_percent
