"""The configuration of a plan: step sizes, refills and tasksets."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from rftdata.config import MixingConfig, SelectorConfig, TasksetConfig
from rftdata.planning.pacing import Pacing


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """The parts of a run's configuration that planning needs.

    Attributes:
        over_sampling: share of a step's new groups that are planned in addition.
        fresh_share: new groups per group of a batch.
        max_waiting_groups: no groups are planned while this many wait for the pipeline; None for no limit.
    """

    tasksets: tuple[TasksetConfig, ...]
    selector: SelectorConfig
    seed: int
    batch_groups: int
    group_size: int
    max_refill: int
    pacing: Pacing
    over_sampling: float = 0.0
    source: str = "explorer"
    fresh_share: float = 1.0
    base_dir: Path | None = None
    max_waiting_groups: int | None = None
    mixing: MixingConfig = field(default_factory=MixingConfig)
