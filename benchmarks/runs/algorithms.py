"""Whether algorithms learn: the sorting model with each preset, the same start, tasks and budget, and real rollouts.

The language model of benchmarks/selection/sorting.py (0.75 million parameters, sorts digits, warmed up by imitation) is trained with presets, changed
only by `CHANGES`. A step samples `group_size` rollouts of each of `batch_groups` tasks that are chosen uniformly. A rollout has reward 1 if its list is
right. Groups of equal rewards are trained on like the others; presets that drop them do so by their own parts or, like dapo, sample again. The held-out
score is the probability that a sampled answer is right, averaged over lengths, without sampling noise.

All algorithms have one learning rate, so the figures compare defaults and not the best that each could reach. `gain_of_first` is the gain in score
over that of the first algorithm of `--algorithms`.

With `--demo`, SmolLM2-135M learns sums instead, once with each algorithm, through the real processes (benchmarks/runs/demo.py).
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder, names, positive
from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.report import mean, say, write
from benchmarks.runs import demo
from benchmarks.runs.demo import DemoBudget
from rftcore.algorithms.presets import presets

ALGORITHMS = ("grpo", "ppo", "rloo", "reinforce_plus_plus", "dapo", "gspo", "cispo", "opmd", "raft", "mix")
# A critic starts untrained, so its learning rate is larger and it learns alone at first.
CHANGES: dict[str, dict[str, Any]] = {"ppo": {"critic": {"learning_rate": 1.0e-3, "warmup_steps": 5}}}
EXPERTS = {"mix": 2, "chord": 2}  # groups of a step that are right answers instead of rollouts


@dataclass(frozen=True)
class Budget:
    """Sizes of a run, the same for all algorithms.

    Attributes:
        rollouts: number after which a run ends.
        evaluate_every: steps between two evaluations.
    """

    batch_groups: int = 16
    group_size: int = 8
    rollouts: int = 25_600
    evaluate_every: int = 10
    learning_rate: float = 2.0e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("algorithms", __doc__)
    parser.add_argument(
        "--algorithms", type=names(*presets()), default=[*ALGORITHMS], help="presets, separated by commas"
    )
    parser.add_argument("--seeds", type=integers(0), default=(0, 1, 2), help="separated by commas")
    parser.add_argument("--rollouts", type=integer(), default=Budget.rollouts, help="budget of a run")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=integer(), default=cores, help="runs at a time, one thread each")
    parser.add_argument("--plot", type=Path, help="write the curves to a .png or .svg file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to look at the output")
    group = parser.add_argument_group("with --demo")
    group.add_argument("--demo", action="store_true", help="one seed of examples/grpo_reasoning, side by side")
    group.add_argument("--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a Hugging Face id")
    group.add_argument("--steps", type=integer(), default=DemoBudget.steps)
    group.add_argument("--batch-groups", type=integer(), default=DemoBudget.batch_groups)
    group.add_argument("--limit", type=positive, default=DemoBudget.limit_s, help="seconds of a run, which then fails")
    group.add_argument("--output", type=Path, help="file with the results of the runs that have ended so far")
    options = parser.parse_args(arguments)
    with kept_folder(options) as folder:
        if options.demo:
            sizes = DemoBudget(steps=options.steps, batch_groups=options.batch_groups, limit_s=options.limit)
            result = demo.measure(
                options.algorithms, options.seeds[0], sizes, options.model, folder, options.output, options.jobs
            )
        else:
            budget = Budget(rollouts=options.rollouts)
            result = measure(options.algorithms, options.seeds, budget, folder, options.jobs, quick=options.quick)
    write(options, result)
    if options.plot:
        (demo.plot if options.demo else plot)(result, options.plot)
    return 0


def measure(
    names: Sequence[str], seeds: Sequence[int], budget: Budget, folder: Path, num_jobs: int, *, quick: bool
) -> dict[str, Any]:
    """Run every algorithm with every seed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each run, set before the workers load libraries
    runs: dict[str, dict[int, Any]] = {name: {} for name in names}
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        list(pool.map(prepare_seed, [(folder / str(seed), seed, quick) for seed in seeds]))
        jobs = {
            pool.submit(run, name, seed, budget, folder / str(seed), quick): (name, seed)
            for seed in seeds
            for name in names
        }
        for number, future in enumerate(as_completed(jobs), start=1):
            name, seed = jobs[future]
            runs[name][seed] = record = future.result()
            end = record["points"][-1]["score"] if record["points"] else float("nan")
            say(f"{number} of {len(jobs)}: {name}, seed {seed}: {end:.3f} {record['error'] or ''}")
    return {"budget": asdict(budget), "runs": runs, "summary": summary(runs)}


def prepare_seed(job: tuple[Path, int, bool]) -> None:
    from benchmarks.selection import sorting

    folder, seed, quick = job
    folder.mkdir(parents=True, exist_ok=True)
    sorting.prepare(folder, course_of(quick), seed)


def course_of(quick: bool) -> Any:
    from benchmarks.selection.sorting import QUICK, Course

    return QUICK if quick else Course()


def run(name: str, seed: int, budget: Budget, folder: Path, quick: bool) -> dict[str, Any]:
    """Train once; return its points, and its error if it ended early."""
    points: list[dict[str, Any]] = []
    error = None
    try:
        points.extend(_train(name, seed, budget, folder, quick))
    except Exception as failure:  # noqa: BLE001 - a failure is a result
        error = f"{type(failure).__name__}: {failure}"
    return {"points": points, "error": error}


def _train(name: str, seed: int, budget: Budget, folder: Path, quick: bool) -> Iterator[dict[str, Any]]:
    from benchmarks.selection import sorting
    from rftcore.algorithms import build_algorithm

    tasks, held_out = sorting.make_tasks(course_of(quick), seed)
    tokens = sorting.Tokens(folder / "start")
    algorithm = build_algorithm(name, CHANGES.get(name, {}), group_size=budget.group_size)
    learner = sorting.open_learner(folder / "start", algorithm, budget.learning_rate, seed, warmup_steps=10)
    steps = StepSampler(name, budget, tasks, tokens, np.random.default_rng((seed, 7)))
    step, started = 0, time.perf_counter()
    while True:
        if step % budget.evaluate_every == 0 or steps.rollouts >= budget.rollouts:
            with learner.policy.unpacked() as model:
                score, _ = sorting.scores(model, held_out, tokens)
            seconds = round(time.perf_counter() - started, 2)
            yield {"rollouts": steps.rollouts, "step": step, "score": round(score, 5), "seconds": seconds}
        if steps.rollouts >= budget.rollouts:
            return
        step += 1
        rows, rewards, groups = steps.sample(learner)
        if rows:
            learner.update(sorting.train_batch(rows, rewards, np.unique(groups, return_inverse=True)[1]), step)


class StepSampler:
    """Samples the groups of a step.

    Attributes:
        rollouts: rollouts sampled so far.
    """

    def __init__(
        self, name: str, budget: Budget, tasks: Sequence[Any], tokens: Any, generator: np.random.Generator
    ) -> None:
        self._name, self._budget, self._tasks, self._tokens, self._generator = name, budget, tasks, tokens, generator
        self.rollouts = 0

    def sample(self, learner: Any) -> tuple[list[Any], list[float], list[int]]:
        """Return rollouts, rewards and group numbers. For dapo, groups of equal rewards are replaced."""
        from benchmarks.selection import sorting

        size, experts = self._budget.group_size, EXPERTS.get(self._name, 0)
        shown = [self._tasks[int(self._generator.integers(len(self._tasks)))] for _ in range(experts)]
        rows: list[Any] = [
            (self._tokens.prompt(task.question), self._tokens.response(task.answer), None) for task in shown
        ]
        rewards, groups = [1.0] * experts, list(range(experts))
        wanted = self._budget.batch_groups - experts
        while wanted and self.rollouts < self._budget.rollouts:
            chosen = [self._tasks[i] for i in self._generator.integers(len(self._tasks), size=wanted)]
            with learner.policy.unpacked() as model:
                sampled = list(sorting.rollouts_of(model, [t for t in chosen for _ in range(size)], self._tokens))
            self.rollouts += len(sampled)
            for place, task in enumerate(chosen):
                own = sampled[place * size : (place + 1) * size]
                right = self._tokens.response(task.answer)
                own_rewards = [float(response == right) for _, response, _ in own]
                if self._name == "dapo" and len(set(own_rewards)) == 1:
                    continue
                groups += [experts + len(groups)] * len(own)
                rows += own
                rewards += own_rewards
                wanted -= 1
            if self._name != "dapo":
                break
        return rows, rewards, groups


def summary(runs: dict[str, dict[int, Any]]) -> list[dict[str, Any]]:
    """Return start, end and best score of each algorithm, as means over seeds, in order of the end."""
    rows: list[dict[str, Any]] = []
    for name, by_seed in runs.items():
        finished = [record["points"] for record in by_seed.values() if not record["error"]]
        failed = [f"seed {seed}: {record['error']}" for seed, record in sorted(by_seed.items()) if record["error"]]
        ends = [points[-1]["score"] for points in finished]
        rows.append(
            {
                "algorithm": name,
                "seeds": len(by_seed),
                "failed": failed,
                "start": mean([points[0]["score"] for points in finished]),
                "end": mean(ends),
                "lowest_end": min(ends, default=None),
                "best": mean([max(p["score"] for p in points) for points in finished]),
                "seconds": mean([points[-1]["seconds"] for points in finished]),
            }
        )
    first = rows[0]["end"] - rows[0]["start"] if rows and rows[0]["end"] is not None else None
    for row in rows:
        gain = row["end"] - row["start"] if first and row["end"] is not None else None
        row["gain_of_first"] = None if first is None or gain is None else round(gain / first, 3)
    return sorted(rows, key=lambda row: -(row["end"] or 0.0))


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw the mean held-out score of each algorithm over rollouts."""
    curves = []
    for number, row in enumerate(result["summary"]):
        finished = [record["points"] for record in result["runs"][row["algorithm"]].values() if not record["error"]]
        if not finished:
            continue
        grid = [point["rollouts"] for point in finished[0]]
        scores = [np.interp(grid, [p["rollouts"] for p in points], [p["score"] for p in points]) for points in finished]
        label = f"{row['algorithm']} ({row['end']:.2f})"
        curves.append(Curve(label, grid, np.mean(scores, axis=0), "-" if number < 10 else "--"))
    budget = result["budget"]
    title = f"Sorting digits, {budget['batch_groups']} groups of {budget['group_size']} a step"
    draw(file, curves, title=title, scores="probability of a right answer, held out")
