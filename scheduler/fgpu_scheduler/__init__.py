"""A scheduler for fractions of GPUs: a pure core, a store, and the loop that joins them.

These are the public names; everything else may change.
"""

from fgpu_scheduler.core.admission import Caps, Refusal, admit, amounts_that_fit, pending_refusals
from fgpu_scheduler.core.forecast import Forecast, RequestForecast, forecast, forecast_request
from fgpu_scheduler.core.groups import of_group
from fgpu_scheduler.core.lifecycle import ENDED, HOLDING, LAUNCHING, LIVE, SERVING
from fgpu_scheduler.core.model import (
    Device,
    EndCause,
    Node,
    NodeState,
    Placement,
    Quota,
    QuotaScope,
    Request,
    Session,
    SessionState,
    Share,
    ShareMode,
    Snapshot,
    WaitReason,
)
from fgpu_scheduler.core.placement import Free, free
from fgpu_scheduler.core.planner import Plan, plan
from fgpu_scheduler.core.policies import GroupPolicy, Policy, group_policy
from fgpu_scheduler.core.reconcile import Observed
from fgpu_scheduler.core.units import format_milli, parse_milli
from fgpu_scheduler.errors import (
    BadAmount,
    BadSettings,
    FGPUError,
    InvalidTransition,
    OverQuota,
    ProbeFailed,
    SessionExists,
    StaleVersion,
    StoreUnavailable,
    TooManyPending,
    UnknownSession,
)
from fgpu_scheduler.ports import Clock, DeviceProbe, FoundDevice, Launcher, Seen, SystemClock
from fgpu_scheduler.probes.nvml import NvmlProbe
from fgpu_scheduler.probes.simulated import SimulatedProbe

__all__ = [
    "ENDED",
    "HOLDING",
    "LAUNCHING",
    "LIVE",
    "SERVING",
    "BadAmount",
    "BadSettings",
    "Caps",
    "Clock",
    "Device",
    "DeviceProbe",
    "EndCause",
    "FGPUError",
    "Forecast",
    "FoundDevice",
    "Free",
    "GroupPolicy",
    "InvalidTransition",
    "Launcher",
    "Node",
    "NodeState",
    "NvmlProbe",
    "Observed",
    "OverQuota",
    "Placement",
    "Plan",
    "Policy",
    "ProbeFailed",
    "Quota",
    "QuotaScope",
    "Refusal",
    "Request",
    "RequestForecast",
    "Seen",
    "Session",
    "SessionExists",
    "SessionState",
    "Share",
    "ShareMode",
    "SimulatedProbe",
    "Snapshot",
    "StaleVersion",
    "StoreUnavailable",
    "SystemClock",
    "TooManyPending",
    "UnknownSession",
    "WaitReason",
    "admit",
    "amounts_that_fit",
    "forecast",
    "forecast_request",
    "format_milli",
    "free",
    "group_policy",
    "of_group",
    "parse_milli",
    "pending_refusals",
    "plan",
]
