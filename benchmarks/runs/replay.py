"""Rollouts to a target when stored experiences are used again, in one run and in the next run.

The sorting model is trained as in `rft bench algorithms`, with rollouts that are written to a buffer and batches that are drawn from it. All variants
make the same number of trainer steps on batches of the same size, with GRPO and one learning rate. They differ in the rollouts that a step samples:

    once                  every group is drawn once, in the step after which it was sampled
    twice, four_times     a step samples a half, or a quarter, of a batch, and draws uniformly from all groups of the last `window` steps
    *_prioritized         the same, with a probability proportional to p (1 - p), p the group's share of right answers
    four_times_uncorrected   four_times without the correction
    stored                the run begins with the groups of the run `once` (same start, other rollouts) that have both right and wrong answers, each
                          drawn once; then it continues like `once`
    stored_prioritized    the same selection, drawn in proportion to p (1 - p)

Variants that draw groups of older policies weigh tokens by `algorithm.correction` (token, truncate). Only rollouts that the run samples count; those of
the run `once` are free in `stored`. The target is reached when the mean of the last `smoothing` evaluations is at least `target`. Seconds are processor
time of the run's process (sampling, writing, drawing and training), without evaluations and without the database server.
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder, names, positive
from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.report import mean, say, write
from benchmarks.runs.algorithms import course_of, prepare_seed
from benchmarks.runs.replay_variants import DONOR, VARIANTS, ReplayBudget, Variant
from rftdata.files.durable import write_whole


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("replay", __doc__)
    parser.add_argument("--variants", type=names(*VARIANTS), default=[*VARIANTS], help=f"some of {', '.join(VARIANTS)}")
    parser.add_argument("--seeds", type=integers(0), default=(0, 1, 2), help="separated by commas")
    parser.add_argument("--steps", type=integer(), default=ReplayBudget.steps, help="trainer steps of a run")
    parser.add_argument("--learning-rate", type=positive, default=ReplayBudget.learning_rate, help="of all variants")
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=integer(), default=cores, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, help="file with the results of the runs that have ended so far")
    parser.add_argument("--plot", type=Path, help="write the curves to a .png or .svg file")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to look at the output")
    options = parser.parse_args(arguments)
    budget = ReplayBudget(steps=options.steps, learning_rate=options.learning_rate)
    with kept_folder(options) as folder:
        result = measure(
            options.variants, options.seeds, budget, folder, options.jobs, options.output, quick=options.quick
        )
    write(options, result)
    if options.plot:
        plot(result, options.plot)
    return 0


def measure(
    variants: Sequence[str],
    seeds: Sequence[int],
    budget: ReplayBudget,
    folder: Path,
    num_jobs: int,
    output: Path | None,
    *,
    quick: bool,
) -> dict[str, Any]:
    """Run every variant with every seed. Variants that begin with stored groups run after `once` of their seed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each run, set before the workers load libraries
    runs: dict[str, dict[int, Any]] = {name: {} for name in variants}
    result: dict[str, Any] = {"budget": asdict(budget), "runs": runs}
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:

        def submit(name: str, seed: int) -> Future[Any]:
            return pool.submit(run, name, seed, budget, folder / str(seed), quick)

        list(pool.map(prepare_seed, [(folder / str(seed), seed, quick) for seed in seeds]))
        later = [name for name in variants if VARIANTS[name].from_stored]
        first = [name for name in variants if name not in later] + ([DONOR] if later and DONOR not in variants else [])
        jobs = {submit(name, seed): (name, seed) for name in first for seed in seeds}
        while jobs:
            done = next(as_completed(jobs))
            name, seed = jobs.pop(done)
            record = done.result()
            if name == DONOR:
                jobs |= {submit(other, seed): (other, seed) for other in later}
            runs.setdefault(name, {})[seed] = record
            result["summary"] = summary(runs, budget)
            if output is not None:
                write_whole(output, json.dumps(result, indent=1))
            say(f"{name}, seed {seed}: {record['to_target']} {record['error'] or ''}")
    return result


def run(name: str, seed: int, budget: ReplayBudget, folder: Path, quick: bool) -> dict[str, Any]:
    """Train once; return its points, where it reached the target, and its error if it ended early."""
    finished = folder / f"{name}.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    points: list[dict[str, Any]] = []
    error = None
    try:
        points.extend(_train(VARIANTS[name], seed, budget, folder, folder / name, quick))
    except Exception as failure:  # noqa: BLE001 - a failure is a result
        error = f"{type(failure).__name__}: {failure}"
    record = {"points": points, "to_target": to_target(points, budget), "error": error}
    if error is None:
        write_whole(finished, json.dumps(record))
    return record


def _train(
    variant: Variant, seed: int, budget: ReplayBudget, folder: Path, buffer_folder: Path, quick: bool
) -> Iterator[dict[str, Any]]:
    import rftdata
    from benchmarks.runs.replay_run import ReplayRun
    from rftdata.config import BufferConfig

    where = folder / DONOR if variant.from_stored else buffer_folder
    with rftdata.open(BufferConfig(uri=str(where), min_free_bytes=0)) as buffer:
        replay = ReplayRun(buffer, variant, seed, budget, folder / "start", course_of(quick))
        if variant.from_stored:
            yield from replay.train_stored(variant.selection())
        yield from replay.train()


def to_target(points: Sequence[dict[str, Any]], budget: ReplayBudget) -> dict[str, Any] | None:
    """Return rollouts, steps and seconds at the first evaluation at which the target is reached; None if it is not."""
    scores = [point["score"] for point in points]
    for last in range(budget.smoothing, len(points) + 1):
        if np.mean(scores[last - budget.smoothing : last]) >= budget.target:
            return {key: points[last - 1][key] for key in ("rollouts", "step", "seconds")}
    return None


def summary(runs: dict[str, dict[int, Any]], budget: ReplayBudget) -> list[dict[str, Any]]:
    """Return means over the seeds that reached the target. Ratios compare with `once` of the same seed."""
    rows = []
    donors = runs.get(DONOR, {})
    for name, by_seed in runs.items():
        reached = {seed: record["to_target"] for seed, record in by_seed.items() if record["to_target"]}
        row: dict[str, Any] = {
            "variant": name,
            "seeds": len(by_seed),
            "reached": len(reached),
            "failed": [
                f"seed {seed}: {record['error']}" for seed, record in sorted(by_seed.items()) if record["error"]
            ],
            "best": mean([max(_smoothed(record["points"], budget)) for record in by_seed.values() if record["points"]]),
        }
        for key in ("rollouts", "step", "seconds"):
            row[key] = mean([found[key] for found in reached.values()])
            pairs = [
                (found[key], donors[seed]["to_target"][key])
                for seed, found in reached.items()
                if seed in donors and donors[seed]["to_target"]
            ]
            row[f"{key}_ratios"] = [round(own / other, 3) for own, other in pairs if other]
        rows.append(row)
    return rows


def _smoothed(points: Sequence[dict[str, Any]], budget: ReplayBudget) -> list[float]:
    scores = [point["score"] for point in points]
    width = min(budget.smoothing, len(scores))
    return [float(np.mean(scores[last - width : last])) for last in range(width, len(scores) + 1)]


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw the smoothed held-out score over the run's own rollouts, a line for each variant: the mean over seeds."""
    budget = ReplayBudget(**result["budget"])
    curves = []
    for name, by_seed in result["runs"].items():
        # While a run trains on stored groups it samples nothing: of its points only the last is drawn.
        runs = [_at_rollouts(record["points"]) for record in by_seed.values() if not record["error"]]
        if not runs:
            continue
        smoothed = [_smoothed_curve(points, budget.smoothing) for points in runs]
        grid = min((rollouts for rollouts, _ in smoothed), key=len)
        scores = np.mean([np.interp(grid, *curve) for curve in smoothed], axis=0)
        curves.append(Curve(name, grid, scores, "--" if "prioritized" in name else "-"))
    title = f"Sorting digits, GRPO, {budget.batch_groups} groups of {budget.group_size} a step, {budget.steps} steps"
    draw(file, curves, title=title, scores="probability of a right answer, held out", target=budget.target)


def _smoothed_curve(points: Sequence[dict[str, Any]], width: int) -> tuple[list[int], Any]:
    """Return the mean of every `width` successive scores, at the rollouts of the one in their middle."""
    width = min(width, len(points))
    means = np.convolve([point["score"] for point in points], np.full(width, 1 / width), "valid")
    return [point["rollouts"] for point in points][width // 2 :][: len(means)], means


def _at_rollouts(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the last point of each number of rollouts."""
    return list({point["rollouts"]: point for point in points}.values())
