"""The ways to order a queue. Each is a function of a line; a resource group's policy names one."""

from fgpu_scheduler.core.orders.arrival import fifo, lifo

__all__ = ["fifo", "lifo"]
