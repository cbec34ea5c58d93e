# The public names: `lazy_loader` loads each when it is first used.
from .core.accounts import (
    Account as Account,
    Accounts as Accounts,
    AccountShare as AccountShare,
    account_names as account_names,
)
from .core.admission import (
    MIN_CPU_MILLI as MIN_CPU_MILLI,
    MIN_MEMORY_MIB as MIN_MEMORY_MIB,
    MIN_TIME_LIMIT_S as MIN_TIME_LIMIT_S,
    Caps as Caps,
    Refusal as Refusal,
    admit as admit,
    amounts_that_fit as amounts_that_fit,
    pending_refusals as pending_refusals,
)
from .core.expected_starts import BASIS_LIMITS as BASIS_LIMITS, BlockingSessions as BlockingSessions
from .core.extending import Extension as Extension, NotExtended as NotExtended, not_extended as not_extended
from .core.forecast import Forecast as Forecast, Outlook as Outlook, forecast as forecast, outlook as outlook
from .core.forecast_accuracy import (
    NEWEST_OUTCOMES as NEWEST_OUTCOMES,
    ForecastAccuracy as ForecastAccuracy,
    ForecastHistory as ForecastHistory,
    ForecastOutcome as ForecastOutcome,
    calibrated as calibrated,
    forecast_accuracy as forecast_accuracy,
)
from .core.guarantees import beyond_capacity as beyond_capacity
from .core.lifecycle import (
    ENDED as ENDED,
    FAILURES as FAILURES,
    HOLDING as HOLDING,
    LAUNCHING as LAUNCHING,
    LEGAL as LEGAL,
    LIVE as LIVE,
    MOVED_BY as MOVED_BY,
    SERVING as SERVING,
    UP as UP,
    holds_shares as holds_shares,
    wants_shares as wants_shares,
)
from .core.model import (
    MAX_SHARES as MAX_SHARES,
    Device as Device,
    EndCause as EndCause,
    Node as Node,
    NodeState as NodeState,
    Placement as Placement,
    Quota as Quota,
    QuotaScope as QuotaScope,
    Request as Request,
    Session as Session,
    SessionState as SessionState,
    Share as Share,
    ShareMode as ShareMode,
    Size as Size,
    Snapshot as Snapshot,
    Usage as Usage,
    WaitReason as WaitReason,
    compute_of as compute_of,
)
from .core.parking import (
    ASKED_FOR_S as ASKED_FOR_S,
    is_asked_for as is_asked_for,
    plan_parking as plan_parking,
)
from .core.placement import (
    DeviceFree as DeviceFree,
    Free as Free,
    NodeFree as NodeFree,
    Score as Score,
    claimed as claimed,
    could_ever_fit as could_ever_fit,
    free as free,
    placements as placements,
    released as released,
    untouched as untouched,
)
from .core.placer import Placer as Placer
from .core.planner import Plan as Plan, plan as plan
from .core.policies import GroupPolicy as GroupPolicy, Policy as Policy, group_policy as group_policy
from .core.quota import (
    Ledger as Ledger,
    QuotaRemaining as QuotaRemaining,
    QuotaUsage as QuotaUsage,
    counted_names as counted_names,
    least_milli as least_milli,
    quota_words as quota_words,
    usage_of_quotas as usage_of_quotas,
)
from .core.reclaim import (
    FOR_GOOD_S as FOR_GOOD_S,
    AllRules as AllRules,
    Rules as Rules,
    lifetime_s as lifetime_s,
    preemptible_from_s as preemptible_from_s,
)
from .core.reconcile import Observed as Observed
from .core.records import (
    Event as Event,
    HeldShares as HeldShares,
    PastSession as PastSession,
    SessionMeasurements as SessionMeasurements,
)
from .core.replay import (
    Job as Job,
    Outcome as Outcome,
    Summary as Summary,
    replay as replay,
    summary as summary,
)
from .core.request_forecast import RequestForecast as RequestForecast, forecast_request as forecast_request
from .core.resizing import (
    Amount as Amount,
    NotResized as NotResized,
    available_to as available_to,
    grows as grows,
    resized as resized,
    why_not_resizable as why_not_resizable,
)
from .core.returning import parked_mib as parked_mib
from .core.run_lengths import NEWEST_RUNS as NEWEST_RUNS, PastRun as PastRun, RunLengths as RunLengths
from .core.shares import accepts_model as accepts_model
from .core.unblocking import Unblocking as Unblocking
from .core.units import (
    LARGEST_MILLI as LARGEST_MILLI,
    MEMORY_GRAIN_MIB as MEMORY_GRAIN_MIB,
    duration as duration,
    format_milli as format_milli,
    memory_words as memory_words,
    parse_milli as parse_milli,
    share_compute_percent as share_compute_percent,
    share_memory_mib as share_memory_mib,
)
from .core.usage import account_shares as account_shares
from .errors import (
    BadAmount as BadAmount,
    BadSettings as BadSettings,
    FGPUError as FGPUError,
    InvalidTransition as InvalidTransition,
    ProbeFailed as ProbeFailed,
    SessionExists as SessionExists,
    StaleVersion as StaleVersion,
    StoreUnavailable as StoreUnavailable,
    TooManyPending as TooManyPending,
    UnknownSession as UnknownSession,
)
from .ports import (
    Clock as Clock,
    FoundDevice as FoundDevice,
    Launcher as Launcher,
    Seen as Seen,
    SystemClock as SystemClock,
)
from .probes.nvml import NvmlProbe as NvmlProbe
from .probes.simulated import SimulatedProbe as SimulatedProbe
from .queue import Queue as Queue, Requeued as Requeued, SessionEnded as SessionEnded
from .service.healing import filled_from_store as filled_from_store
from .service.reader import QueueReader as QueueReader
from .service.scheduler import Deadlines as Deadlines, Scheduler as Scheduler
from .store.administration import (
    MOST_BANNER_TEXT as MOST_BANNER_TEXT,
    Audit as Audit,
    AuditLine as AuditLine,
    Banner as Banner,
    BannerLevel as BannerLevel,
    ImageEdit as ImageEdit,
    ImageEdits as ImageEdits,
    Notice as Notice,
    value_words as value_words,
)
from .store.claim import Claim as Claim, lock_file as lock_file
from .store.history import FirstForecasts as FirstForecasts, History as History, Meters as Meters
from .store.hub_requests import (
    MOST_MESSAGE_TEXT as MOST_MESSAGE_TEXT,
    EndMessages as EndMessages,
    Resize as Resize,
    Resizes as Resizes,
    ResizeState as ResizeState,
)
from .store.migrations import schema_revision as schema_revision
from .store.node_actions import (
    MOST_REASON as MOST_REASON,
    NodeAction as NodeAction,
    act_on_gpu as act_on_gpu,
    act_on_node as act_on_node,
    gpu_action_of as gpu_action_of,
    node_actions_of as node_actions_of,
)
from .store.private_image import (
    HELD_IMAGES as HELD_IMAGES,
    MIB as MIB,
    ImageInUse as ImageInUse,
    ImageQuota as ImageQuota,
    ImageState as ImageState,
    PrivateImage as PrivateImage,
    check_size as check_size,
    image_prefix_of as image_prefix_of,
    in_use_words as in_use_words,
    shown_mib as shown_mib,
)
from .store.private_images import PrivateImages as PrivateImages
from .store.quotas import (
    MOST_EDITS as MOST_EDITS,
    ListedQuota as ListedQuota,
    QuotaEdit as QuotaEdit,
    QuotaEdits as QuotaEdits,
    QuotaSource as QuotaSource,
    in_force as in_force,
    limits_words as limits_words,
    listed_quotas as listed_quotas,
)
from .store.retention import Retention as Retention
from .store.setups import (
    LOGS_KEPT_S as LOGS_KEPT_S,
    MOST_PRESETS as MOST_PRESETS,
    OwnPresets as OwnPresets,
    SavedSetup as SavedSetup,
    Setups as Setups,
)
from .store.store import Store as Store
