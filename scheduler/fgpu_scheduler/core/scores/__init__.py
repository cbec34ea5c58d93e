"""The placement score `worth`, made from the workload and the nodes."""

from fgpu_scheduler.core.placement import best_fit
from fgpu_scheduler.core.scores.fragments import Fragmentation
from fgpu_scheduler.core.scores.workload import ClusterTotals, TypicalRequest, Workload
from fgpu_scheduler.core.scores.worth import score_for, worth
