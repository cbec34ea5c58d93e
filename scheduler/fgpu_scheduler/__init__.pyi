# The public names: `lazy_loader` loads each when it is first used.
from .core import scores as scores
from .core.accounts import Account as Account
from .core.accounts import Accounts as Accounts
from .core.accounts import AccountShare as AccountShare
from .core.accounts import account_names as account_names
from .core.admission import (
    MIN_CPU_MILLI as MIN_CPU_MILLI,
)
from .core.admission import (
    MIN_MEMORY_MIB as MIN_MEMORY_MIB,
)
from .core.admission import (
    MIN_TIME_LIMIT_S as MIN_TIME_LIMIT_S,
)
from .core.admission import (
    Caps as Caps,
)
from .core.admission import (
    Refusal as Refusal,
)
from .core.admission import (
    admit as admit,
)
from .core.admission import (
    amounts_that_fit as amounts_that_fit,
)
from .core.admission import (
    pending_refusals as pending_refusals,
)
from .core.expected_starts import BASIS_LIMITS as BASIS_LIMITS
from .core.expected_starts import BlockingSessions as BlockingSessions
from .core.extending import Extension as Extension
from .core.extending import NotExtended as NotExtended
from .core.extending import not_extended as not_extended
from .core.forecast import Forecast as Forecast
from .core.forecast import Outlook as Outlook
from .core.forecast import forecast as forecast
from .core.forecast import outlook as outlook
from .core.forecast_accuracy import (
    NEWEST_OUTCOMES as NEWEST_OUTCOMES,
)
from .core.forecast_accuracy import (
    Calibration as Calibration,
)
from .core.forecast_accuracy import (
    ForecastAccuracy as ForecastAccuracy,
)
from .core.forecast_accuracy import (
    ForecastHistory as ForecastHistory,
)
from .core.forecast_accuracy import (
    ForecastOutcome as ForecastOutcome,
)
from .core.forecast_accuracy import (
    StartRange as StartRange,
)
from .core.forecast_accuracy import (
    calibrated as calibrated,
)
from .core.forecast_accuracy import (
    forecast_accuracy as forecast_accuracy,
)
from .core.lifecycle import (
    ENDED as ENDED,
)
from .core.lifecycle import (
    FAILURES as FAILURES,
)
from .core.lifecycle import (
    HOLDING as HOLDING,
)
from .core.lifecycle import (
    LAUNCHING as LAUNCHING,
)
from .core.lifecycle import (
    LEGAL as LEGAL,
)
from .core.lifecycle import (
    LIVE as LIVE,
)
from .core.lifecycle import (
    MOVED_BY as MOVED_BY,
)
from .core.lifecycle import (
    SERVING as SERVING,
)
from .core.lifecycle import (
    UP as UP,
)
from .core.lifecycle import (
    holds_shares as holds_shares,
)
from .core.lifecycle import (
    wants_shares as wants_shares,
)
from .core.model import (
    MAX_SHARES as MAX_SHARES,
)
from .core.model import (
    Device as Device,
)
from .core.model import (
    EndCause as EndCause,
)
from .core.model import (
    Node as Node,
)
from .core.model import (
    NodeState as NodeState,
)
from .core.model import (
    Placement as Placement,
)
from .core.model import (
    Quota as Quota,
)
from .core.model import (
    QuotaScope as QuotaScope,
)
from .core.model import (
    RefusedNode as RefusedNode,
)
from .core.model import (
    Request as Request,
)
from .core.model import (
    Session as Session,
)
from .core.model import (
    SessionState as SessionState,
)
from .core.model import (
    Share as Share,
)
from .core.model import (
    ShareMode as ShareMode,
)
from .core.model import (
    Size as Size,
)
from .core.model import (
    Snapshot as Snapshot,
)
from .core.model import (
    Usage as Usage,
)
from .core.model import (
    WaitReason as WaitReason,
)
from .core.model import (
    compute_of as compute_of,
)
from .core.parking import due_for_parking as due_for_parking
from .core.parking import no_room_to_park as no_room_to_park
from .core.placement import (
    DeviceFree as DeviceFree,
)
from .core.placement import (
    Free as Free,
)
from .core.placement import (
    NodeFree as NodeFree,
)
from .core.placement import (
    Score as Score,
)
from .core.placement import (
    claimed as claimed,
)
from .core.placement import (
    could_ever_fit as could_ever_fit,
)
from .core.placement import (
    free as free,
)
from .core.placement import (
    placements as placements,
)
from .core.placement import (
    released as released,
)
from .core.placement import (
    untouched as untouched,
)
from .core.placer import Placer as Placer
from .core.planner import Plan as Plan
from .core.planner import plan as plan
from .core.policies import GroupPolicy as GroupPolicy
from .core.policies import Policy as Policy
from .core.policies import group_policy as group_policy
from .core.quota import (
    Ledger as Ledger,
)
from .core.quota import (
    QuotaRemaining as QuotaRemaining,
)
from .core.quota import (
    QuotaUsage as QuotaUsage,
)
from .core.quota import (
    counted_names as counted_names,
)
from .core.quota import (
    least_milli as least_milli,
)
from .core.quota import (
    quota_words as quota_words,
)
from .core.quota import (
    usage_of_quotas as usage_of_quotas,
)
from .core.reclaim import AllRules as AllRules
from .core.reclaim import Rules as Rules
from .core.reclaim import lifetime_s as lifetime_s
from .core.reclaim import preemptible_from_s as preemptible_from_s
from .core.reconcile import Observed as Observed
from .core.records import Event as Event
from .core.records import HeldShares as HeldShares
from .core.records import PastSession as PastSession
from .core.records import SessionMeasurements as SessionMeasurements
from .core.records import held_between as held_between
from .core.replay import Job as Job
from .core.replay import Outcome as Outcome
from .core.replay import Summary as Summary
from .core.replay import replay as replay
from .core.replay import summary as summary
from .core.request_forecast import RequestForecast as RequestForecast
from .core.request_forecast import forecast_request as forecast_request
from .core.resizing import (
    Amount as Amount,
)
from .core.resizing import (
    NotResized as NotResized,
)
from .core.resizing import (
    available_to as available_to,
)
from .core.resizing import (
    grows as grows,
)
from .core.resizing import (
    resized as resized,
)
from .core.resizing import (
    why_not_resizable as why_not_resizable,
)
from .core.returning import ReturnDecision as ReturnDecision
from .core.returning import parked_mib as parked_mib
from .core.run_lengths import NEWEST_RUNS as NEWEST_RUNS
from .core.run_lengths import PastRun as PastRun
from .core.run_lengths import RunLengths as RunLengths
from .core.shares import accepts_model as accepts_model
from .core.unblocking import Unblocking as Unblocking
from .core.units import (
    LARGEST_MILLI as LARGEST_MILLI,
)
from .core.units import (
    MEMORY_GRAIN_MIB as MEMORY_GRAIN_MIB,
)
from .core.units import (
    duration as duration,
)
from .core.units import (
    format_milli as format_milli,
)
from .core.units import (
    memory_words as memory_words,
)
from .core.units import (
    parse_milli as parse_milli,
)
from .core.units import (
    share_compute_percent as share_compute_percent,
)
from .core.units import (
    share_memory_mib as share_memory_mib,
)
from .core.usage import account_shares as account_shares
from .errors import (
    BadAmount as BadAmount,
)
from .errors import (
    BadSettings as BadSettings,
)
from .errors import (
    FGPUError as FGPUError,
)
from .errors import (
    InvalidTransition as InvalidTransition,
)
from .errors import (
    OverQuota as OverQuota,
)
from .errors import (
    ProbeFailed as ProbeFailed,
)
from .errors import (
    SessionExists as SessionExists,
)
from .errors import (
    StaleVersion as StaleVersion,
)
from .errors import (
    StoreUnavailable as StoreUnavailable,
)
from .errors import (
    TooManyPending as TooManyPending,
)
from .errors import (
    UnknownSession as UnknownSession,
)
from .ports import Clock as Clock
from .ports import DeviceProbe as DeviceProbe
from .ports import FoundDevice as FoundDevice
from .ports import Launcher as Launcher
from .ports import Seen as Seen
from .ports import SystemClock as SystemClock
from .probes.nvml import NvmlProbe as NvmlProbe
from .probes.simulated import SimulatedProbe as SimulatedProbe
from .queue import Queue as Queue
from .queue import Requeued as Requeued
from .queue import SessionEnded as SessionEnded
from .service.healing import filled_from_store as filled_from_store
from .service.reader import QueueReader as QueueReader
from .service.scheduler import Deadlines as Deadlines
from .service.scheduler import Scheduler as Scheduler
from .store.administration import (
    MOST_BANNER_TEXT as MOST_BANNER_TEXT,
)
from .store.administration import (
    Audit as Audit,
)
from .store.administration import (
    AuditLine as AuditLine,
)
from .store.administration import (
    Banner as Banner,
)
from .store.administration import (
    BannerLevel as BannerLevel,
)
from .store.administration import (
    ImageEdit as ImageEdit,
)
from .store.administration import (
    ImageEdits as ImageEdits,
)
from .store.administration import (
    Notice as Notice,
)
from .store.administration import (
    value_words as value_words,
)
from .store.claim import Claim as Claim
from .store.claim import lock_file as lock_file
from .store.history import FirstForecasts as FirstForecasts
from .store.history import History as History
from .store.history import Meters as Meters
from .store.hub_requests import (
    MOST_MESSAGE_TEXT as MOST_MESSAGE_TEXT,
)
from .store.hub_requests import (
    EndMessages as EndMessages,
)
from .store.hub_requests import (
    Resize as Resize,
)
from .store.hub_requests import (
    Resizes as Resizes,
)
from .store.hub_requests import (
    ResizeState as ResizeState,
)
from .store.migrations import schema_revision as schema_revision
from .store.node_actions import (
    MOST_REASON as MOST_REASON,
)
from .store.node_actions import (
    NodeAction as NodeAction,
)
from .store.node_actions import (
    act_on_gpu as act_on_gpu,
)
from .store.node_actions import (
    act_on_node as act_on_node,
)
from .store.node_actions import (
    gpu_action_of as gpu_action_of,
)
from .store.node_actions import (
    node_actions_of as node_actions_of,
)
from .store.private_image import (
    HELD_IMAGES as HELD_IMAGES,
)
from .store.private_image import (
    MIB as MIB,
)
from .store.private_image import (
    ImageInUse as ImageInUse,
)
from .store.private_image import (
    ImageQuota as ImageQuota,
)
from .store.private_image import (
    ImageState as ImageState,
)
from .store.private_image import (
    PrivateImage as PrivateImage,
)
from .store.private_image import (
    check_size as check_size,
)
from .store.private_image import (
    image_prefix_of as image_prefix_of,
)
from .store.private_image import (
    in_use_words as in_use_words,
)
from .store.private_image import (
    shown_mib as shown_mib,
)
from .store.private_images import PrivateImages as PrivateImages
from .store.quotas import (
    MOST_EDITS as MOST_EDITS,
)
from .store.quotas import (
    ListedQuota as ListedQuota,
)
from .store.quotas import (
    QuotaEdit as QuotaEdit,
)
from .store.quotas import (
    QuotaEdits as QuotaEdits,
)
from .store.quotas import (
    QuotaSource as QuotaSource,
)
from .store.quotas import (
    in_force as in_force,
)
from .store.quotas import (
    limits_words as limits_words,
)
from .store.quotas import (
    listed_quotas as listed_quotas,
)
from .store.retention import Retention as Retention
from .store.setups import (
    MOST_PRESETS as MOST_PRESETS,
)
from .store.setups import (
    OwnPresets as OwnPresets,
)
from .store.setups import (
    SavedSetup as SavedSetup,
)
from .store.setups import (
    Setups as Setups,
)
from .store.store import Store as Store
