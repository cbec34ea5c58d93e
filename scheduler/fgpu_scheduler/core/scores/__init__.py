"""The ways to choose among the places that fit: each is a score, or makes one of a workload."""

from fgpu_scheduler.core.placement import best_fit
from fgpu_scheduler.core.scores.cluster_totals import ClusterTotals
from fgpu_scheduler.core.scores.fgd import fgd
from fgpu_scheduler.core.scores.placements import PLACEMENTS, FixedScore, ScoreFactory, score_for
from fgpu_scheduler.core.scores.simple import first_fit, spread
from fgpu_scheduler.core.scores.workload import TypicalRequest, Workload
from fgpu_scheduler.core.scores.worth import worth
