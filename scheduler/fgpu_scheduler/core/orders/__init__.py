"""The ways to order a queue. Each is a function of a line; a resource group's policy names one."""

from fgpu_scheduler.core.orders.arrival import fifo, lifo
from fgpu_scheduler.core.orders.default import usage_size_age
from fgpu_scheduler.core.orders.drf import drf
from fgpu_scheduler.core.orders.fair import fair_share
