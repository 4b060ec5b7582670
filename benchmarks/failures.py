"""The share of the time in which a run trains although its processes are killed: effective training time.

`rft bench failures` starts a real `rft run` on this machine (PostgreSQL, Ray, explorer, pipeline worker, trainer, a tiny model with the engine
transformers) and kills its processes. Work is simulated: an advantage of the configuration sleeps for `--step-s` in every trainer step, and a
workflow for half of that in every rollout, so that the share of the time depends on neither the model nor the cores. When a failure ends `rft run`,
this script calls `rft run --resume` at once, as a shell loop or a batch system would.

Effective training time is the ratio of Meta (arXiv 2410.21680) and ByteRobust (arXiv 2509.16293): the seconds of training that count, over
the wall-clock time. Counted are the trainer's seconds (`train_seconds`) of the steps in the run's final history. Steps that were lost and
done again count once; detecting, restarting, loading, waiting and checkpoints do not count.

`--rounds N` kills each kind of process N times and reports what that costs in seconds: from the last step before the kill to a step after it, less the
time of as many steps undisturbed. `--minutes M` runs on for M minutes with `--per-hour` failures, drawn from the seed, and reports the share
directly. JSON on stdout, progress on stderr.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from rftdata.postgres.embedded import EmbeddedServer
from tests.crash.ray_run import FATAL, REPLACED, RayRun
from tests.support.models import make_tiny_model

KINDS = (*REPLACED, *FATAL)
_AFTER = 5  # steps after a failure until which its cost is taken
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
    """A step of the run's history: when it was finished (seconds since the epoch), and the seconds it trained."""

    number: int
    finished: float
    trained_s: float


class Run:
    """The run, which is resumed whenever it has ended.

    Attributes:
        starts: how often `rft run` was called.
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
        """The steps that count at present; empty while the database does not answer."""
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
            RuntimeError: it was not reached.
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
    """Seconds of a step, and the share of them that trains, without failures."""
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
    # One in each part, not at its edges: what a failure costs belongs to the time that is measured.
    moments = [(part + rng.uniform(0.1, 0.7)) * part_s for part in range(count)]
    began = run.history()[-1].finished
    for kind, moment in zip(kinds, moments, strict=True):
        while time.time() < began + moment:
            run.keep_running()
            time.sleep(0.2)
        done = run.kill(kind)
        _say(f"{kind} killed after {moment:.0f} s: {done}")
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


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2, help="how often each kind of process is killed for its cost")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"of {', '.join(KINDS)}")
    parser.add_argument("--minutes", type=float, default=0.0, help="of failures at random; 0 for none")
    parser.add_argument("--per-hour", type=float, default=10.0)
    parser.add_argument("--step-s", type=float, default=2.0, help="simulated work of a trainer step")
    parser.add_argument("--checkpoint-every", type=int, default=10, help="steps")
    parser.add_argument("--undisturbed-steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    kinds = [kind for kind in options.kinds.split(",") if kind]
    if unknown := sorted({*kinds} - {*KINDS}):
        parser.error(f"unknown kinds {', '.join(unknown)}; allowed: {', '.join(KINDS)}")
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as name:
        run = Run(Path(name), step_s=options.step_s, checkpoint_every=options.checkpoint_every)
        try:
            result = measure(run, kinds, rng, options)
        finally:
            run.close()
    print(json.dumps(result, indent=1))


def measure(run: Run, kinds: list[str], rng: random.Random, options: argparse.Namespace) -> dict[str, Any]:
    """Everything; the figures."""
    settings = {key: getattr(options, key) for key in ("step_s", "checkpoint_every", "seed", "per_hour")}
    result: dict[str, Any] = {
        "cores": os.cpu_count(),
        **settings,
        "undisturbed": undisturbed(run, options.undisturbed_steps),
    }
    step_s = result["undisturbed"]["step_s"]
    _say(f"undisturbed: {result['undisturbed']}")
    costs: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(options.rounds):
        for kind in rng.sample(kinds, len(kinds)):
            # Anywhere between two checkpoints.
            cost = cost_s(run, kind, step_s, rng.random() * options.checkpoint_every * step_s)
            costs[kind].append(round(cost, 1))
            _say(f"{kind}: {cost:.1f} s")
    if options.rounds and kinds:
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


if __name__ == "__main__":
    main()
