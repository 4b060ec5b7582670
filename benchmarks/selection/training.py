"""One training run with one selector in one process: plan, sample, observe and train like the planner and the trainer of a real run.

The selector is the production class; its five methods are called in production's order. A step wants `batch_groups` groups whose rewards differ. A
group of equal rewards is dropped and planned again, at most `max_refill` times a step (DAPO's dynamic sampling, arXiv 2503.14476, and the refill rule
of `rftdata.planning.planner`). Outcomes are observed as soon as they are sampled. Every rollout counts, of dropped groups and of screening too.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from rftdata.selectors import Observation, Selector

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, equal for all selectors.

    Attributes:
        batch_groups: groups of differing rewards that a step wants.
        group_size: rollouts of a group.
        max_refill: groups planned again in a step, at most.
        budget: rollouts after which a run ends.
        evaluate_every: steps between two evaluations.
        gap: a run ends when this share of the distance between the score at the start and a perfect one is made up.
    """

    batch_groups: int
    group_size: int
    max_refill: int
    budget: int
    evaluate_every: int
    gap: float


@dataclass
class Group:
    """Rollouts of one task: rewards, and the data that its learner trains on."""

    task_id: int
    rewards: Floats
    rollouts: list[Any] = field(default_factory=list)
    screened_out: bool = False

    @property
    def trains(self) -> bool:
        """Whether the group is kept: not screened out, and with rewards that differ."""
        return not self.screened_out and bool(self.rewards.max() > self.rewards.min())


class Learner(ABC):
    """Model that is trained.

    Attributes:
        task_ids: training tasks, ascending.
        levels: level of difficulty of each task, for reports; selectors do not see it unless it is a feature.
        features: numbers of each task that selectors may use: `grade`, its estimated difficulty; `weak` and `strong`, pass rates of
            two other policies.
        anchor_rollouts: rollouts that these two measurements needed.
        num_sampled: rollouts sampled so far.
    """

    task_ids: list[int]
    levels: list[int]
    features: dict[str, list[float]]
    anchor_rollouts: int
    num_sampled: int = 0

    @abstractmethod
    def sample(self, task_ids: Sequence[int], sizes: Sequence[int]) -> list[Group]:
        """Sample so many rollouts of each task."""

    @abstractmethod
    def update(self, groups: Sequence[Group]) -> None:
        """Train one step on one or more groups whose rewards differ."""

    @abstractmethod
    def score(self) -> tuple[float, list[float]]:
        """Return the probability of success at the held-out tasks: the mean, and that of each level."""


def train(selector: Selector, learner: Learner, plan: Plan) -> dict[str, Any]:
    """Train until the target is reached or the budget is spent; return the record.

    Returns:
        target: the score to reach; points: after each evaluation rollouts, steps, seconds, score and score of each level; the first is before any training.
        rollouts; screening_rollouts, those of groups that were screened out; groups and trained_groups; chosen, groups of each level;
        seconds by what they were spent on; metrics, the selector's own at the end.
    """
    run = _Run(selector, learner, plan)
    run.evaluate()
    start = run.points[0]["score"]
    target = start + plan.gap * (1 - start)
    while run.points[-1]["score"] < target and run.rollouts < plan.budget:
        for _ in range(plan.evaluate_every):
            run.step()
            if run.rollouts >= plan.budget:
                break
        run.evaluate()
    return {"target": target, **run.report()}


class _Run:
    def __init__(self, selector: Selector, learner: Learner, plan: Plan) -> None:
        self.selector, self.learner, self.plan = selector, learner, plan
        selector.groups_per_step = plan.batch_groups
        self.points: list[dict[str, Any]] = []
        self.rollouts = self.screening_rollouts = self.steps = self.groups = self.trained_groups = 0
        self.seconds = dict.fromkeys(("selector", "sampling", "training"), 0.0)
        self.cpu_seconds = 0.0
        self._level = dict(zip(learner.task_ids, learner.levels, strict=True))
        self._chosen: Counter[int] = Counter()
        self._plans = 0

    def step(self) -> None:
        cpu = time.process_time()
        kept: list[Group] = []
        places = self.plan.batch_groups + self.plan.max_refill
        while len(kept) < self.plan.batch_groups and places > 0 and self.rollouts < self.plan.budget:
            count = min(self.plan.batch_groups - len(kept), places)
            places -= count
            kept += [group for group in self._try(count) if group.trains]
        if kept:
            with _Timed(self.seconds, "training"):
                self.learner.update(kept)
        self.trained_groups += len(kept)
        self.steps += 1
        self.cpu_seconds += time.process_time() - cpu

    def evaluate(self) -> None:
        score, by_level = self.learner.score()
        self.points.append(
            {
                "rollouts": self.rollouts,
                "steps": self.steps,
                "seconds": round(sum(self.seconds.values()), 4),
                "cpu_seconds": round(self.cpu_seconds, 4),
                "score": round(score, 5),
                "by_level": [round(value, 4) for value in by_level],
            }
        )

    def report(self) -> dict[str, Any]:
        return {
            "points": self.points,
            "rollouts": self.rollouts,
            "screening_rollouts": self.screening_rollouts,
            "steps": self.steps,
            "groups": self.groups,
            "trained_groups": self.trained_groups,
            "chosen": [self._chosen[level] for level in range(max(self.learner.levels) + 1)],
            "seconds": {name: round(value, 4) for name, value in self.seconds.items()},
            "metrics": self.selector.metrics(),
        }

    def _try(self, count: int) -> list[Group]:
        """Sample groups of tasks that the selector chooses, and observe them."""
        with _Timed(self.seconds, "selector"):
            task_ids = self.selector.select(count)
        with _Timed(self.seconds, "sampling"):
            groups = self._sampled(task_ids)
        self.rollouts += sum(len(group.rewards) for group in groups)
        self._chosen.update(self._level[group.task_id] for group in groups)
        self._plans += 1
        observations = [
            Observation(
                group.task_id,
                float(group.rewards.sum()),
                float(len(group.rewards)),
                group=self.groups + i,
                seq=self._plans,
            )
            for i, group in enumerate(groups)
        ]
        self.groups += len(groups)
        if self.selector.learns:
            with _Timed(self.seconds, "selector"):
                self.selector.observe(observations)
        return groups

    def _sampled(self, task_ids: Sequence[int]) -> list[Group]:
        """Sample groups like explorers: if the selector screens, some rollouts first, and the others unless these refuse the group."""
        size, screening = self.plan.group_size, self.selector.screening
        if screening is None:
            return self.learner.sample(task_ids, [size] * len(task_ids))
        groups = self.learner.sample(task_ids, [screening.rollouts] * len(task_ids))
        going_on = []
        for group in groups:
            if screening.refusal(group.rewards.sum(), len(group.rewards)) is None:
                going_on.append(group)
            else:
                self.screening_rollouts += len(group.rewards)
                group.screened_out = True
        if going_on:
            rest = self.learner.sample(
                [group.task_id for group in going_on], [size - screening.rollouts] * len(going_on)
            )
            for group, others in zip(going_on, rest, strict=True):
                group.rewards = np.concatenate([group.rewards, others.rewards])
                group.rollouts += others.rollouts
        return groups


class _Timed:
    """Adds the seconds of the block to `seconds[name]`."""

    def __init__(self, seconds: dict[str, float], name: str) -> None:
        self.seconds, self.name = seconds, name

    def __enter__(self) -> None:
        self.started = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        self.seconds[self.name] += time.perf_counter() - self.started
