"""What a choice of tasks costs, by selector and number of tasks.

Every selector gets the tasks in this process, learns from `--tried` groups, and then chooses `--groups` groups a step: `select`, and `observe` of their
outcomes are timed. `difficulty_anchored` is the selector difficulty with two features. `set_up_ms` is the time to make a selector and to learn everything
again, which a process needs when it starts or tasks have changed.

`--store` also loads the largest number of tasks into a buffer and times `Planner.plan()`, the whole transaction: outcomes read, tasks chosen, groups
and states written. `commit_ms` is the smallest durable transaction of this machine. Milliseconds: p50, p99.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rftdata
from benchmarks.harness.arguments import argument_parser, integer, integers, names, scratch_folder
from benchmarks.harness.report import say, write
from rftdata import Buffer
from rftdata.attempts.attempt import Attempt
from rftdata.config import SelectorConfig, TasksetConfig
from rftdata.planning.config import PlanConfig
from rftdata.planning.pacing import Pacing
from rftdata.planning.planner import Planner
from rftdata.selectors import Observation, Selector, build_selector

_ROLLOUTS = 8
_REFERENCES = {"features": ["weak", "strong"]}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "sequential": ("sequential", {}),
    "shuffle": ("shuffle", {}),
    "random": ("random", {}),
    "easy_to_hard": ("easy_to_hard", {"features": ["weak"]}),
    "difficulty": ("difficulty", {}),
    "difficulty_anchored": ("difficulty", _REFERENCES),
    "difficulty_temperature": ("difficulty", {**_REFERENCES, "temperature": 0.2}),
    "speed": ("speed", {}),
    "greso": ("greso", {}),
    "plr": ("plr", {"replay": 0.5}),
}


@dataclass(frozen=True)
class Sizes:
    """Groups of a step, groups learned before, and steps timed."""

    groups: int = 64
    tried: int = 8192
    steps: int = 50


def features_of(num_tasks: int) -> dict[str, Any]:
    """Return pass rates of two reference models."""
    skill = np.random.default_rng(1).random(num_tasks)
    return {"weak": skill * 0.5, "strong": skill * 0.5 + 0.4}


def outcomes(chosen: Sequence[int], step: int, rng: np.random.Generator) -> list[Observation]:
    successes = rng.binomial(_ROLLOUTS, rng.random(len(chosen)))
    return [
        Observation(task_id, float(s), _ROLLOUTS, kind="explicit", group=step * len(chosen) + i, seq=step)
        for i, (task_id, s) in enumerate(zip(chosen, successes.tolist(), strict=True))
    ]


def made(case: str, num_tasks: int) -> Selector:
    name, args = CASES[case]
    selector = build_selector(name, args, np.arange(1, num_tasks + 1), 0)
    if selector.feature_keys:
        selector.set_features(features_of(num_tasks))
    return selector


def measure(case: str, num_tasks: int, sizes: Sizes) -> dict[str, Any]:
    """Measure one selector in this process."""
    rng = np.random.default_rng(2)
    past = [
        outcomes((rng.choice(num_tasks, sizes.groups, replace=False) + 1).tolist(), step, rng)
        for step in range(1, sizes.tried // sizes.groups + 1)
    ]
    started = time.perf_counter()
    selector = made(case, num_tasks)
    if selector.learns:
        for batch in past:
            selector.observe(batch)
    set_up = time.perf_counter() - started
    selector.select(sizes.groups)  # orders an epoch, which is done once per epoch
    select, observe = [], []
    for step in range(len(past) + 1, len(past) + 1 + sizes.steps):
        started = time.perf_counter()
        chosen = selector.select(sizes.groups)
        chosen_at = time.perf_counter()
        learned = outcomes(chosen, step, rng)
        learning_at = time.perf_counter()
        selector.observe(learned)
        observe.append(time.perf_counter() - learning_at)
        select.append(chosen_at - started)
    return {"select_ms": quantiles(select), "observe_ms": quantiles(observe), "set_up_ms": 1000 * set_up}


def quantiles(seconds: Sequence[float]) -> dict[str, float]:
    return {"p50": 1000 * float(np.median(seconds)), "p99": 1000 * float(np.quantile(seconds, 0.99))}


class Run:
    """Task table of a size, and runs whose groups are sealed by SQL."""

    def __init__(self, buffer: Buffer, num_tasks: int, sizes: Sizes) -> None:
        self.buffer, self.sizes = buffer, sizes
        weak = features_of(num_tasks)
        buffer.sql(
            "INSERT INTO rft.task (taskset, task_key, payload, features)"
            " SELECT 'all', n::text, '{}', jsonb_build_object('weak', w, 'strong', s) FROM unnest(%s::float8[], %s::float8[])"
            " WITH ORDINALITY AS f (w, s, n)",
            [weak["weak"].tolist(), weak["strong"].tolist()],
        )
        buffer.sql("ANALYZE rft.task")

    def plan(self, case: str) -> dict[str, Any]:
        name, args = CASES[case]
        run = self.buffer.create_run(name=f"plan-{case}", config={}, seed=1, steps=10**6, pipeline_version="none")
        config = PlanConfig(
            tasksets=(TasksetConfig(name="all", source="none"),),
            selector=SelectorConfig.model_validate({"type": name, **args}),
            seed=1,
            batch_groups=self.sizes.groups,
            group_size=_ROLLOUTS,
            max_refill=0,
            pacing=Pacing(interval=1, offset=0, window=0),
        )
        planner = Planner(run, config)
        with self.buffer.attempt(run) as attempt:
            self._step(attempt, run, 0)
            first = timed(planner.plan)
            seconds, commits = [], []
            for step in range(1, self.sizes.steps + 1):
                self._step(attempt, run, step)
                seconds.append(timed(planner.plan))
                commits.append(
                    timed(lambda: self.buffer.sql("UPDATE rft.run SET seed = seed WHERE run_id = %s", [run.run_id]))
                )
        return {"plan_ms": quantiles(seconds), "first_plan_ms": 1000 * first, "commit_ms": quantiles(commits)}

    def _step(self, attempt: Attempt, run: rftdata.Run, step: int) -> None:
        """Seal the planned groups and publish the next policy version."""
        self.buffer.sql(
            "WITH done AS (UPDATE rft.rollout_group SET status = 'ready', decided_by = 'none', sealed_at = now(), trainable = false WHERE run_id = %s AND"
            " status = 'planned' RETURNING *) INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)"
            " SELECT run_id, attempt_id, ordinal, task_id, (task_id + ordinal) %% 9, 8 FROM done",
            [run.run_id],
        )
        attempt.publish(step, method="memory", uri="none", num_bytes=0, checksum="0")


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cost_of_selecting(num_tasks: int, steps: int) -> dict[str, Any]:
    """Measure `select` and `observe` for a step of 64 groups, after 8,192 groups, with every selector."""
    sizes, found = Sizes(steps=steps), {}
    for case in CASES:
        say(f"cost of {case} over {num_tasks:,} tasks")
        found[case] = measure(case, num_tasks, sizes)
    return {
        "num_tasks": num_tasks,
        "groups_per_step": sizes.groups,
        "groups_tried_before": sizes.tried,
        "selectors": found,
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("selection_cost", __doc__)
    parser.add_argument("--tasks", type=integers(64), default=(10_000, 100_000, 1_000_000), help="numbers of tasks")
    parser.add_argument("--selectors", type=names(*CASES), default=[*CASES], help=f"some of {', '.join(CASES)}")
    parser.add_argument("--groups", type=integer(), default=Sizes.groups, help="groups of a step")
    parser.add_argument("--tried", type=integer(0), default=Sizes.tried, help="groups learned before")
    parser.add_argument("--steps", type=integer(), default=Sizes.steps, help="steps timed")
    parser.add_argument("--store", action="store_true", help="also the planner's transaction, in a buffer")
    options = parser.parse_args(arguments)
    sizes = Sizes(options.groups, options.tried, options.steps)
    result: dict[str, Any] = {"tasks": {}}
    for num_tasks in options.tasks:
        result["tasks"][str(num_tasks)] = by_case = {}
        for case in options.selectors:
            say(f"{case} over {num_tasks:,} tasks")
            by_case[case] = measure(case, num_tasks, sizes)
    if options.store:
        result["plan"] = _planned(options, sizes)
    write(options, result)
    return 0


def _planned(options: argparse.Namespace, sizes: Sizes) -> dict[str, Any]:
    found: dict[str, Any] = {"num_tasks": max(options.tasks)}
    with scratch_folder(options) as folder:
        buffer = rftdata.open(str(folder / "b"))
        try:
            run = Run(buffer, max(options.tasks), sizes)
            for case in options.selectors:
                say(f"planning with {case}")
                found[case] = run.plan(case)
        finally:
            buffer.close()
            assert buffer.server is not None
            buffer.server.stop()
    return found
