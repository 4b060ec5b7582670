"""What a choice of tasks costs, by selector and number of tasks.

`python -m benchmarks.selection_cost [--tasks 10000,100000,1000000]` gives every selector that many tasks in this process, lets it learn
from `--tried` groups first, and then times steps of `--groups` groups: `select`, and `observe` of their outcomes. `anchored` is the
selector difficulty with two features. `set_up_ms` is what a process pays when it starts or tasks have changed: making the selector and learning
everything again.

`--store` also loads the largest number of tasks into a buffer of its own and times `Planner.plan()`, the whole transaction: outcomes
read, tasks chosen, groups and states written. Beside it the smallest durable transaction of this machine, `commit_ms`.

Milliseconds: p50, p99. JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import rftdata
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


def features_of(num_tasks: int) -> dict[str, Any]:
    """Pass rates of two reference models."""
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


def measure(case: str, num_tasks: int, options: argparse.Namespace) -> dict[str, Any]:
    """One selector in this process."""
    rng = np.random.default_rng(2)
    past = [
        outcomes(rng.choice(num_tasks, options.groups, replace=False) + 1, step, rng)
        for step in range(1, options.tried // options.groups + 1)
    ]
    started = time.perf_counter()
    selector = made(case, num_tasks)
    if selector.learns:
        for batch in past:
            selector.observe(batch)
    set_up = time.perf_counter() - started
    selector.select(options.groups)  # orders an epoch, which is done once per epoch
    select, observe = [], []
    for step in range(len(past) + 1, len(past) + 1 + options.steps):
        started = time.perf_counter()
        chosen = selector.select(options.groups)
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
    """A run whose groups are all sealed at once by SQL, with a task table of the wanted size."""

    def __init__(self, buffer: Buffer, num_tasks: int, options: argparse.Namespace) -> None:
        self.buffer, self.options = buffer, options
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
            batch_groups=self.options.groups,
            group_size=_ROLLOUTS,
            max_refill=0,
            pacing=Pacing(interval=1, offset=0, window=0),
        )
        planner = Planner(run, config)
        with self.buffer.attempt(run) as attempt:
            self._step(attempt, run, 0)
            first = timed(planner.plan)
            seconds, commits = [], []
            for step in range(1, self.options.steps + 1):
                self._step(attempt, run, step)
                seconds.append(timed(planner.plan))
                commits.append(
                    timed(lambda: self.buffer.sql("UPDATE rft.run SET seed = seed WHERE run_id = %s", [run.run_id]))
                )
        return {"plan_ms": quantiles(seconds), "first_plan_ms": 1000 * first, "commit_ms": quantiles(commits)}

    def _step(self, attempt: Attempt, run: rftdata.Run, step: int) -> None:
        """Seal what is planned, and move the policy on."""
        self.buffer.sql(
            "WITH done AS (UPDATE rft.rollout_group SET status = 'ready', sealed_at = now(), trainable = false WHERE run_id = %s AND"
            " status = 'planned' RETURNING *) INSERT INTO rft.task_observation (run_id, attempt_id, ordinal, task_id, successes, trials)"
            " SELECT run_id, attempt_id, ordinal, task_id, (task_id + ordinal) %% 9, 8 FROM done",
            [run.run_id],
        )
        attempt.publish(step, method="memory", uri="none", num_bytes=0, checksum="0")


def timed(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", default="10000,100000,1000000", help="numbers of tasks")
    parser.add_argument("--selectors", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--groups", type=int, default=64, help="groups of a step")
    parser.add_argument("--tried", type=int, default=8192, help="groups learned before")
    parser.add_argument("--steps", type=int, default=50, help="steps timed")
    parser.add_argument("--store", action="store_true", help="also the planner's transaction, in a buffer")
    options = parser.parse_args(arguments)
    sizes, cases = [int(size) for size in options.tasks.split(",")], options.selectors.split(",")
    unknown = [case for case in cases if case not in CASES]
    if unknown:
        parser.error(f"no such selector: {unknown[0]}; there are {', '.join(CASES)}")
    result: dict[str, Any] = {"groups": options.groups, "tried": options.tried, "steps": options.steps, "tasks": {}}
    for size in sizes:
        result["tasks"][str(size)] = {}
        for case in cases:
            print(f"{case} over {size:,} tasks", file=sys.stderr)
            result["tasks"][str(size)][case] = measure(case, size, options)
    if options.store:
        with tempfile.TemporaryDirectory(prefix="rft-select-") as folder:
            buffer = rftdata.open(str(Path(folder) / "b"))
            try:
                run = Run(buffer, max(sizes), options)
                result["plan"] = {"num_tasks": max(sizes)}
                for case in cases:
                    print(f"planning with {case}", file=sys.stderr)
                    result["plan"][case] = run.plan(case)
            finally:
                buffer.close()
                assert buffer.server is not None
                buffer.server.stop()
    print(json.dumps(result, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
