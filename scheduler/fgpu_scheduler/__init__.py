"""A scheduler for fractions of GPUs: a pure core, a store, and the loop that joins them.

The names imported here are the public ones; everything else may change. Each is loaded on first use, so that a command
that needs an amount or an error imports neither SQLAlchemy nor NumPy.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fgpu_scheduler.core import scores
    from fgpu_scheduler.core.admission import (
        MIN_CPU_MILLI,
        MIN_MEMORY_MIB,
        MIN_TIME_LIMIT_S,
        Caps,
        Refusal,
        admit,
        amounts_that_fit,
        pending_refusals,
    )
    from fgpu_scheduler.core.expected_starts import BASIS_LIMITS, BlockingSessions
    from fgpu_scheduler.core.extending import Extension, NotExtended, not_extended
    from fgpu_scheduler.core.forecast import Forecast, Outlook, forecast, outlook
    from fgpu_scheduler.core.forecast_accuracy import (
        NEWEST_OUTCOMES,
        Calibration,
        ForecastAccuracy,
        ForecastHistory,
        ForecastOutcome,
        StartRange,
        calibrated,
        forecast_accuracy,
    )
    from fgpu_scheduler.core.lifecycle import (
        ENDED,
        FAILURES,
        HOLDING,
        LAUNCHING,
        LEGAL,
        LIVE,
        MOVED_BY,
        SERVING,
    )
    from fgpu_scheduler.core.model import (
        MAX_SHARES,
        Device,
        EndCause,
        Node,
        NodeState,
        Placement,
        Quota,
        QuotaScope,
        RefusedNode,
        Request,
        Session,
        SessionState,
        Share,
        ShareMode,
        Size,
        Snapshot,
        Usage,
        WaitReason,
        compute_of,
    )
    from fgpu_scheduler.core.placement import (
        DeviceFree,
        Free,
        NodeFree,
        Score,
        claimed,
        could_ever_fit,
        free,
        placements,
        released,
        untouched,
    )
    from fgpu_scheduler.core.placer import Placer
    from fgpu_scheduler.core.planner import Plan, plan
    from fgpu_scheduler.core.policies import GroupPolicy, Policy, group_policy
    from fgpu_scheduler.core.quota import (
        Ledger,
        QuotaRemaining,
        QuotaUsage,
        counted_names,
        least_milli,
        quota_words,
        usage_of_quotas,
    )
    from fgpu_scheduler.core.reclaim import AllRules, Rules, lifetime_s, preemptible_from_s
    from fgpu_scheduler.core.reconcile import Observed
    from fgpu_scheduler.core.records import Event, HeldShares, PastSession, SessionMeasurements, held_between
    from fgpu_scheduler.core.replay import Job, Outcome, Summary, replay, summary
    from fgpu_scheduler.core.request_forecast import RequestForecast, forecast_request
    from fgpu_scheduler.core.resizing import (
        Amount,
        NotResized,
        available_to,
        grows,
        resized,
        why_not_resizable,
    )
    from fgpu_scheduler.core.run_lengths import NEWEST_RUNS, PastRun, RunLengths
    from fgpu_scheduler.core.shares import accepts_model as accepts_model
    from fgpu_scheduler.core.unblocking import Unblocking
    from fgpu_scheduler.core.units import (
        LARGEST_MILLI,
        MEMORY_GRAIN_MIB,
        duration,
        format_milli,
        memory_words,
        parse_milli,
        share_compute_percent,
        share_memory_mib,
    )
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
    from fgpu_scheduler.queue import Queue, Requeued, SessionEnded
    from fgpu_scheduler.service.healing import filled_from_store
    from fgpu_scheduler.service.reader import QueueReader
    from fgpu_scheduler.service.scheduler import Deadlines, Scheduler
    from fgpu_scheduler.store.administration import (
        MOST_BANNER_TEXT,
        Audit,
        AuditLine,
        Banner,
        BannerLevel,
        ImageEdit,
        ImageEdits,
        Notice,
        value_words,
    )
    from fgpu_scheduler.store.claim import Claim, lock_file
    from fgpu_scheduler.store.history import FirstForecasts, History, Meters
    from fgpu_scheduler.store.hub_requests import (
        MOST_MESSAGE_TEXT,
        EndMessages,
        Resize,
        Resizes,
        ResizeState,
    )
    from fgpu_scheduler.store.migrations import schema_revision
    from fgpu_scheduler.store.node_actions import (
        MOST_REASON,
        NodeAction,
        act_on_gpu,
        act_on_node,
        gpu_action_of,
        node_actions_of,
    )
    from fgpu_scheduler.store.private_image import (
        HELD_IMAGES,
        MIB,
        ImageInUse,
        ImageQuota,
        ImageState,
        PrivateImage,
        check_size,
        image_prefix_of,
        in_use_words,
        shown_mib,
    )
    from fgpu_scheduler.store.private_images import PrivateImages
    from fgpu_scheduler.store.quotas import (
        MOST_EDITS,
        ListedQuota,
        QuotaEdit,
        QuotaEdits,
        QuotaSource,
        in_force,
        limits_words,
        listed_quotas,
    )
    from fgpu_scheduler.store.retention import Retention
    from fgpu_scheduler.store.store import Store
else:
    from fgpu_scheduler.public import lazy_names

    __getattr__ = lazy_names(__name__, __file__)
