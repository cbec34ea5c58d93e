"""The placement policies: each is a score, or makes one from the workload and the nodes."""

from fgpu_scheduler.core.placement import best_fit
from fgpu_scheduler.core.scores.fgd import fgd
from fgpu_scheduler.core.scores.placements import PLACEMENTS, FixedScore, ScoreFactory, score_for
from fgpu_scheduler.core.scores.simple import first_fit, spread
from fgpu_scheduler.core.scores.workload import ClusterTotals, TypicalRequest, Workload
from fgpu_scheduler.core.scores.worth import worth
