"""Share of the time in which a run trains although its processes are killed: effective training time.

A real `rft run` (PostgreSQL, Ray, explorer, pipeline worker, trainer, a tiny model with the engine transformers) runs on this machine, and its processes
are killed. Work is simulated: an advantage of the configuration sleeps for `--step-s` in every trainer step, and a workflow for half of that in every
rollout, so the share depends on neither the model nor the cores. When a failure ends `rft run`, this program calls `rft run --resume` at once, like a
shell loop or a batch system.

Effective training time is the ratio of Meta (arXiv 2410.21680) and ByteRobust (arXiv 2509.16293): the seconds of training that count, over the
wall-clock time. The trainer's seconds (`train_seconds`) of the steps in the run's final history count. Steps that were lost and repeated count once;
detecting, restarting, loading, waiting and checkpoints do not count.

`--rounds N` kills each kind of process N times and measures the cost in seconds: from the last step before the kill to a step after it, less the time of
as many undisturbed steps. `--minutes M` continues for M minutes with `--per-hour` failures, drawn from the seed, and measures the share directly.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from benchmarks.harness.arguments import argument_parser, integer, names, positive, scratch_folder
from benchmarks.harness.report import say, write
from rftdata.postgres.embedded import EmbeddedServer
from tests.crash.ray_run import FATAL, REPLACED, RayRun
from tests.support.models import make_tiny_model

KINDS = (*REPLACED, *FATAL)
_AFTER = 5  # steps after a failure at which its cost is measured
_LIMIT_S = 180.0
_SETTLE_STEPS = 3
WORK = """
import asyncio
import os
import time

from rftcore.algorithms.advantages.group import Group
from rftcore.workflows.single_turn import single_turn

STEP_S = float(os.environ["RFT_BENCH_STEP_S"])


class Work(Group):
    "The advantage of GRPO, after the time that a larger model's step would take."

    def __call__(self, batch, signals):
        time.sleep(STEP_S)
        return super().__call__(batch, signals)


async def slow(task, model, score):
    await asyncio.sleep(STEP_S / 2)
    return await single_turn(task, model, score)


def questions():
    return ({"question": f"what is {number}?", "answer": str(number)} for number in range(2000))


def score(turn, task):
    return (sum(turn.response.encode()) % 5) / 4
"""
CONFIG = """
run: {{name: crash, seed: 1}}
model: {{path: ./model}}
tasks: [{{name: numbers, source: "./work.py:questions"}}]
selector: {{type: shuffle}}
algorithm: {{name: grpo, group_size: 4, advantage: {{name: "./work.py:Work"}}}}
explorer:
  engine: transformers
  engine_args: {{dtype: float32, context_length: 64}}
  workflow: "./work.py:slow"
  reward: "./work.py:score"
  max_tokens: 8
trainer: {{batch_groups: 4, checkpoint_every: {checkpoint_every}, autocast: none, num_threads: 1}}
sync: {{offset: 1}}
sampling: {{max_staleness: 3}}
steps: 1000000
"""


@dataclass(frozen=True)
class Step:
    """Step of the run's history: when it was finished (seconds since the epoch), and for how many seconds it trained."""

    number: int
    finished: float
    trained_s: float


class Run:
    """The run, which is resumed whenever it has ended.

    Attributes:
        starts: number of calls of `rft run`.
    """

    def __init__(self, folder: Path, *, step_s: float, checkpoint_every: int) -> None:
        make_tiny_model(folder / "model", num_layers=1)
        (folder / "work.py").write_text(WORK)
        (folder / "config.yaml").write_text(CONFIG.format(checkpoint_every=checkpoint_every))
        self._run = RayRun(folder, [], environment={"RFT_BENCH_STEP_S": str(step_s), "OMP_NUM_THREADS": "1"})
        self.starts = 0
        self.start()

    def start(self) -> None:
        self._run.start()
        self.starts += 1

    def history(self) -> list[Step]:
        """Return the steps that count now; none while the database does not answer."""
        query = "SELECT trainer_step, extract(epoch FROM finished_at), train_seconds FROM rft.v_train_step ORDER BY 1"
        try:
            with psycopg.connect(
                EmbeddedServer(self._run.buffer).uri, autocommit=True, connect_timeout=5
            ) as connection:
                return [Step(int(n), float(at), float(s or 0)) for n, at, s in connection.execute(query).fetchall()]
        except (psycopg.Error, OSError):
            return []

    def keep_running(self) -> None:
        """Call `rft run --resume` if the run has ended."""
        assert self._run.process is not None
        if self._run.process.poll() is not None:
            self.start()

    def kill(self, kind: str) -> bool:
        """Kill a process; return whether there was one."""
        return self._run.kill(kind)

    def wait_for_step(self, number: int, since: float = 0.0) -> list[Step]:
        """Wait until a step was finished after a time; return the history.

        Raises:
            RuntimeError: the step was not reached in time.
        """
        deadline = time.monotonic() + _LIMIT_S
        while time.monotonic() < deadline:
            self.keep_running()
            history = self.history()
            if history and history[-1].number >= number and history[-1].finished > since:
                return history
            time.sleep(0.2)
        raise RuntimeError(f"step {number} was not reached within {_LIMIT_S:.0f} s:\n{self._run.output[-3000:]}")

    def close(self) -> None:
        self._run.close()


def effective(history: list[Step], began: float, ended: float) -> float:
    """Return the share of a time in which steps of the history trained. A step counts in the time in which it was finished."""
    return sum(step.trained_s for step in history if began < step.finished <= ended) / (ended - began)


def undisturbed(run: Run, steps: int) -> dict[str, float]:
    """Return the seconds of a step, and the share of them that trains, without failures."""
    first = run.wait_for_step(_SETTLE_STEPS)[-1]
    history = run.wait_for_step(first.number + steps)
    last = history[-1]
    seconds = last.finished - first.finished
    return {
        "step_s": round(seconds / (last.number - first.number), 3),
        "effective": round(effective(history, first.finished, last.finished), 3),
    }


def cost_s(run: Run, kind: str, step_s: float, wait_s: float) -> float:
    """Kill a process of a kind after `wait_s`; return the seconds by which the steps after it are late."""
    time.sleep(wait_s)
    before = run.history()[-1]
    since = time.time()
    if not run.kill(kind):
        raise RuntimeError(f"there is no process of the kind {kind}")
    history = run.wait_for_step(before.number + _AFTER, since)
    reached = next(step for step in history if step.number == before.number + _AFTER)
    cost = reached.finished - before.finished - _AFTER * step_s
    run.wait_for_step(history[-1].number + _SETTLE_STEPS)
    return cost


def disturbed(run: Run, *, minutes: float, per_hour: float, rng: random.Random) -> dict[str, Any]:
    """Run for some minutes with failures at random; return the share of the time that trained."""
    count = max(1, round(minutes / 60 * per_hour))
    part_s = minutes * 60 / count
    kinds = [kind for _ in range(count // len(KINDS) + 1) for kind in rng.sample(KINDS, len(KINDS))][:count]
    # One failure in each part, not at its edges, so that its cost falls into the measured time.
    moments = [(part + rng.uniform(0.1, 0.7)) * part_s for part in range(count)]
    began = run.history()[-1].finished
    for kind, moment in zip(kinds, moments, strict=True):
        while time.time() < began + moment:
            run.keep_running()
            time.sleep(0.2)
        done = run.kill(kind)
        say(f"{kind} killed after {moment:.0f} s: {done}")
    while time.time() < began + minutes * 60:
        run.keep_running()
        time.sleep(0.2)
    ended = time.time()
    history = run.history()
    return {
        "minutes": minutes,
        "failures_per_hour": round(count / minutes * 60, 1),
        "killed": [[kind, round(moment)] for kind, moment in zip(kinds, moments, strict=True)],
        "steps_kept": sum(began < step.finished <= ended for step in history),
        "effective": round(effective(history, began, ended), 3),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("failures", __doc__)
    parser.add_argument("--rounds", type=integer(0), default=2, help="times that each kind of process is killed")
    parser.add_argument("--kinds", type=names(*KINDS), default=[*KINDS], help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=positive, default=0.0, help="minutes of failures at random, by default none")
    parser.add_argument("--per-hour", type=positive, default=10.0, help="failures an hour")
    parser.add_argument("--step-s", type=positive, default=2.0, help="seconds of simulated work in a trainer step")
    parser.add_argument("--checkpoint-every", type=integer(), default=10, help="steps")
    parser.add_argument("--undisturbed-steps", type=integer(), default=20)
    parser.add_argument("--seed", type=integer(0), default=0)
    options = parser.parse_args(arguments)
    with scratch_folder(options) as folder:
        run = Run(folder, step_s=options.step_s, checkpoint_every=options.checkpoint_every)
        try:
            result = measure(run, random.Random(options.seed), options)
        finally:
            run.close()
    write(options, result)
    return 0


def measure(run: Run, rng: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    """Measure the undisturbed run, the cost of each kind of failure, and failures at random."""
    result: dict[str, Any] = {"undisturbed": undisturbed(run, options.undisturbed_steps)}
    step_s = result["undisturbed"]["step_s"]
    say(f"undisturbed: {result['undisturbed']}")
    costs: dict[str, list[float]] = {kind: [] for kind in options.kinds}
    for _ in range(options.rounds):
        for kind in rng.sample(options.kinds, len(options.kinds)):
            # At a random time between two checkpoints.
            cost = cost_s(run, kind, step_s, rng.random() * options.checkpoint_every * step_s)
            costs[kind].append(round(cost, 1))
            say(f"{kind}: {cost:.1f} s")
    if options.rounds:
        result["cost_s"] = {
            kind: {"mean": round(statistics.mean(each), 1), "all": each} for kind, each in costs.items()
        }
        mean = statistics.mean(each["mean"] for each in result["cost_s"].values())
        result["mean_cost_s"] = round(mean, 1)
        share = 1 - mean * options.per_hour / 3600
        result["effective_by_costs"] = round(share * result["undisturbed"]["effective"], 3)
    if options.minutes:
        result["disturbed"] = disturbed(run, minutes=options.minutes, per_hour=options.per_hour, rng=rng)
    result["starts"] = run.starts
    return result
