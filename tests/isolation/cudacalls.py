"""The CUDA driver through ctypes, for programs that run in a session: `tests.isolation` hands them this folder."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable
from ctypes import CFUNCTYPE, POINTER, byref, c_int, c_size_t, c_uint, c_uint64, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

MIB = 2**20
OUT_OF_MEMORY = 2


class Structure(ctypes.Structure):
    """Zero but for what is named."""


class Location(Structure):
    _fields_ = [("type", c_int), ("id", c_int)]


DEVICE, HOST, HOST_NUMA = 1, 2, 3
PINNED, MANAGED = 1, 2


class Properties(Structure):
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    ]


class PoolProperties(Structure):
    _fields_ = [
        ("type", c_int),
        ("handles", c_int),
        ("location", Location),
        ("win32", c_void_p),
        ("most", c_size_t),
        ("usage", ctypes.c_ushort),
        ("reserved", ctypes.c_ubyte * 54),
    ]


class AllocationNode(Structure):
    _fields_ = [
        ("pool", PoolProperties),
        ("access", c_void_p),
        ("access_count", c_size_t),
        ("bytes", c_size_t),
        ("address", c_ulonglong),
    ]


class InstantiateParameters(Structure):
    _fields_ = [("flags", c_uint64), ("stream", c_void_p), ("node", c_void_p), ("result", c_int)]


class ArrayDescription(Structure):
    _fields_ = [
        ("width", c_size_t),
        ("height", c_size_t),
        ("depth", c_size_t),
        ("format", c_int),
        ("channels", c_uint),
        ("flags", c_uint),
    ]


class CudaError(Exception):
    def __init__(self, name: str, result: int) -> None:
        super().__init__(f"{name}: {result}")
        self.result = result


class Cuda:
    """``cuda.cuMemAlloc_v2(...)`` raises unless it succeeds; ``cuda.result("cuMemAlloc_v2", ...)`` is the error."""

    def __init__(self, path: str = "libcuda.so.1") -> None:
        self.library = ctypes.CDLL(path)

    def result(self, name: str, *arguments: Any) -> int:
        # Whole numbers become 64 bits wide: right in registers for all that is narrower, too.
        wide = [c_uint64(a & (2**64 - 1)) if isinstance(a, int) else a for a in arguments]
        return int(getattr(self.library, name)(*wide))

    def __getattr__(self, name: str) -> Callable[..., None]:
        def call(*arguments: Any) -> None:
            result = self.result(name, *arguments)
            if result != 0:
                raise CudaError(name, result)

        return call

    # ---- what programs do often ----

    def start(self, device: int = 0) -> Cuda:
        """Make the device's primary context current."""
        context = c_void_p()
        self.cuInit(0)
        self.cuDevicePrimaryCtxRetain(byref(context), device)
        self.cuCtxSetCurrent(context)
        return self

    def retain_by_table(self, device: int = 0) -> c_void_p:
        """Return the device's primary context, taken as CUDA's runtime may: past the exported functions."""
        table, context = POINTER(c_void_p)(), c_void_p()
        self.cuGetExportTable(byref(table), b"fgpu-simulated-1")
        retain = CFUNCTYPE(c_int, c_void_p, c_int)(table[1] or 0)
        if (result := retain(ctypes.addressof(context), device)) != 0:
            raise CudaError("retain_by_table", result)
        return context

    def start_by_table(self, device: int = 0) -> Cuda:
        """Make the device's primary context current, as CUDA's runtime may."""
        self.cuInit(0)
        self.cuCtxSetCurrent(self.retain_by_table(device))
        return self

    def info(self) -> tuple[int, int]:
        free, total = c_size_t(), c_size_t()
        self.cuMemGetInfo_v2(byref(free), byref(total))
        return free.value, total.value

    def used_mib(self) -> float:
        free, total = self.info()
        return (total - free) / MIB

    def new(self, name: str, *arguments: Any, kind: Any = c_ulonglong) -> int:
        """Return what a function writes through its first parameter."""
        out = kind()
        getattr(self, name)(byref(out), *arguments)
        return out.value or 0

    def alloc(self, mib: float) -> int:
        return self.new("cuMemAlloc_v2", int(mib * MIB))

    def stream(self) -> int:
        return self.new("cuStreamCreate", 1)

    def create(self, mib: int, *, location: int = DEVICE, where: int = 0, type: int = PINNED) -> int:
        return self.new(
            "cuMemCreate", mib * MIB, byref(Properties(type=type, location=Location(location, where))), 0
        )

    def reserve(self, mib: int) -> int:
        return self.new("cuMemAddressReserve", mib * MIB, 0, 0, 0)

    def map(self, address: int, mib: int, handle: int) -> None:
        self.cuMemMap(address, mib * MIB, 0, handle, 0)

    def pool(self, *, location: int = DEVICE, where: int = 0, type: int = PINNED) -> int:
        return self.new(
            "cuMemPoolCreate", byref(PoolProperties(type=type, location=Location(location, where)))
        )

    def graph(self, *mib: int, frees: bool = False) -> tuple[int, list[int]]:
        """Return a graph that allocates, and what addresses it allocates at."""
        graph, addresses = self.new("cuGraphCreate", 0), []
        for size in mib:
            node = AllocationNode(
                pool=PoolProperties(type=PINNED, location=Location(DEVICE, 0)), bytes=size * MIB
            )
            added = c_void_p()
            self.cuGraphAddMemAllocNode(byref(added), graph, None, 0, byref(node))
            addresses.append(node.address)
            if frees:
                freed = c_void_p()
                self.cuGraphAddMemFreeNode(byref(freed), graph, byref(added), 1, node.address)
        return graph, addresses

    def instantiate(self, graph: int) -> int:
        return self.new("cuGraphInstantiateWithFlags", graph, 0)


def log() -> str:
    """Return what libfgpu has logged in this process's session."""
    return (Path(os.environ["LD_PRELOAD"]).parent / "log").read_text()


def say(**values: Any) -> None:
    print(*(f"{name}={value}" for name, value in values.items()))
    sys.stdout.flush()
