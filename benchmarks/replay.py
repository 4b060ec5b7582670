"""What the buffer is for: rollouts to a target when stored experiences are used again, in one run and in the next one.

`rft bench replay [--variants once,twice] [--seeds 0,1,2] [--jobs N] [--plot FILE]` trains the sorting model as `rft bench algorithms` does,
with rollouts that are written to a buffer and batches that are drawn from it. All variants make the same number of trainer steps on
batches of the same size, with GRPO and one learning rate; they differ in the number of rollouts that a step samples:

    once                  every group is drawn once, in the step after which it was sampled
    twice, four_times     a step samples a half, or a quarter, of a batch, and draws from all groups of the last `window` steps alike
    *_prioritized         the same, with a probability proportional to p (1 - p), p the group's share of right answers
    four_times_uncorrected   four_times without the correction
    stored                the run begins with the groups of the run `once` (same start, other rollouts), each with both right and wrong
                          answers drawn once; then it goes on as `once`
    stored_prioritized    the same selection, drawn in proportion to p (1 - p)

Variants that draw groups of older policies weigh tokens by `algorithm.correction` (token, truncate). Only rollouts that the run samples
count; those of the run `once` are free in `stored`. The target is reached when the mean of the last `smoothing` evaluations is at least
`target`. Seconds are processor time of the run's process (sampling, writing, drawing and training), without evaluations and without the
database server. JSON on stdout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.algorithms import course_of, mean, prepare_seed
from rftdata.files.durable import write_whole

_VALUE = "mean_reward * (1 - mean_reward)"
_CORRECTION = {"correction": {"name": "truncate", "high": 2.0}}
_DONOR = "once"
_SELECTION = "select {columns} from rft.v_group where run = 'replay' and mean_reward > 0 and mean_reward < 1"


@dataclass(frozen=True)
class Variant:
    """How a run draws.

    Attributes:
        uses: times that a group is drawn on average.
        prioritized: whether groups of mixed answers are drawn more often.
        corrected: whether tokens are weighed by importance.
        from_stored: whether the run begins with the groups of the run `once`.
    """

    uses: int = 1
    prioritized: bool = False
    corrected: bool = True
    from_stored: bool = False


VARIANTS = {
    _DONOR: Variant(corrected=False),
    "twice": Variant(2),
    "twice_prioritized": Variant(2, prioritized=True),
    "four_times": Variant(4),
    "four_times_prioritized": Variant(4, prioritized=True),
    "four_times_uncorrected": Variant(4, corrected=False),
    "stored": Variant(from_stored=True),
    "stored_prioritized": Variant(prioritized=True, from_stored=True),
}


@dataclass(frozen=True)
class ReplayBudget:
    """The same for all variants.

    Attributes:
        steps: trainer steps on rollouts of the run itself.
        window: steps for which a group may be drawn again.
        evaluate_every: steps between two evaluations.
        smoothing: evaluations whose mean is compared with the target.
    """

    batch_groups: int = 16
    group_size: int = 8
    steps: int = 160
    window: int = 8
    evaluate_every: int = 4
    smoothing: int = 5
    target: float = 0.68
    learning_rate: float = 2.0e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rft bench replay", description=__doc__.partition("\n")[0])
    parser.add_argument("--variants", default=",".join(VARIANTS), help="separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--steps", type=int, default=ReplayBudget.steps, help="trainer steps of a run")
    parser.add_argument("--learning-rate", type=float, default=ReplayBudget.learning_rate, help="of all variants")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time, one thread each"
    )
    parser.add_argument(
        "--folder", type=Path, help="keeps models and buffers; runs that it has results of are not repeated"
    )
    parser.add_argument("--output", type=Path, help="file with the result of the runs that have ended so far")
    parser.add_argument("--plot", type=Path, help="writes the curves to a .png or .svg file")
    parser.add_argument("--quick", action="store_true", help="a tiny course, to see that it runs")
    options = parser.parse_args(arguments)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    budget = ReplayBudget(steps=options.steps, learning_rate=options.learning_rate)
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        result = measure(
            options.variants.split(","), seeds, budget, folder, options.jobs, options.output, quick=options.quick
        )
    print(json.dumps(result, indent=1))
    if options.plot:
        draw(result, options.plot)
    return 0


def measure(
    names: Sequence[str],
    seeds: Sequence[int],
    budget: ReplayBudget,
    folder: Path,
    num_jobs: int,
    output: Path | None,
    *,
    quick: bool,
) -> dict[str, Any]:
    """Every variant with every seed. Variants that begin with stored groups run after `once` of their seed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each run, set before the workers load what reads it
    runs: dict[str, dict[int, Any]] = {name: {} for name in names}
    result: dict[str, Any] = {"budget": asdict(budget), "runs": runs}
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:

        def submit(name: str, seed: int) -> Future[Any]:
            return pool.submit(run, name, seed, budget, folder / str(seed), quick)

        list(pool.map(prepare_seed, [(folder / str(seed), seed, quick) for seed in seeds]))
        later = [name for name in names if VARIANTS[name].from_stored]
        first = [name for name in names if name not in later] + ([_DONOR] if later and _DONOR not in names else [])
        jobs = {submit(name, seed): (name, seed) for name in first for seed in seeds}
        while jobs:
            done = next(as_completed(jobs))
            name, seed = jobs.pop(done)
            record = done.result()
            if name == _DONOR:
                jobs |= {submit(other, seed): (other, seed) for other in later}
            runs.setdefault(name, {})[seed] = record
            result["summary"] = summary(runs, budget)
            if output is not None:
                write_whole(output, json.dumps(result, indent=1))
            print(f"{name}, seed {seed}: {record['to_target']} {record['error'] or ''}", file=sys.stderr, flush=True)
    return result


def run(name: str, seed: int, budget: ReplayBudget, folder: Path, quick: bool) -> dict[str, Any]:
    """One run: its points, where it reached the target, and its error where it ended early."""
    finished = folder / f"{name}.json"
    if finished.exists():
        found: dict[str, Any] = json.loads(finished.read_text(encoding="utf-8"))
        return found
    points: list[dict[str, Any]] = []
    error = None
    try:
        points.extend(_train(VARIANTS[name], seed, budget, folder, folder / name, quick))
    except Exception as failure:  # noqa: BLE001 - a failure is a result of the comparison
        error = f"{type(failure).__name__}: {failure}"
    record = {"points": points, "to_target": to_target(points, budget), "error": error}
    if error is None:
        write_whole(finished, json.dumps(record))
    return record


def _train(
    variant: Variant, seed: int, budget: ReplayBudget, folder: Path, buffer_folder: Path, quick: bool
) -> Iterator[dict[str, Any]]:
    import rftdata
    from benchmarks.replay_run import ReplayRun
    from rftdata.config import BufferConfig

    where = folder / _DONOR if variant.from_stored else buffer_folder
    with rftdata.open(BufferConfig(uri=str(where), min_free_bytes=0)) as buffer:
        replay = ReplayRun(buffer, variant, seed, budget, folder / "start", course_of(quick))
        if variant.from_stored:
            yield from replay.train_stored(_selection(variant.prioritized))
        yield from replay.train()


def _selection(prioritized: bool) -> str:
    return _SELECTION.format(columns=f"group_id, {_VALUE} as priority" if prioritized else "group_id")


def sampling_of(variant: Variant, budget: ReplayBudget) -> dict[str, Any]:
    """Return the section `sampling` of a run's own rollouts."""
    if variant.uses == 1:
        return {}
    section: dict[str, Any] = {"order": "uniform", "max_times_sampled": 0, "max_staleness": budget.window - 1}
    if variant.prioritized:
        section |= {"order": "prioritized", "priority": {"formula": _VALUE, "exponent": 1.0}}
    return section


def algorithm_keys(variant: Variant) -> dict[str, Any]:
    """Return the keys of the section `algorithm` beside the name."""
    return _CORRECTION if variant.corrected else {}


def to_target(points: Sequence[dict[str, Any]], budget: ReplayBudget) -> dict[str, Any] | None:
    """Return rollouts, steps and seconds at the first evaluation at which the target is reached; None if it is not."""
    scores = [point["score"] for point in points]
    for last in range(budget.smoothing, len(points) + 1):
        if np.mean(scores[last - budget.smoothing : last]) >= budget.target:
            return {key: points[last - 1][key] for key in ("rollouts", "step", "seconds")}
    return None


def summary(runs: dict[str, dict[int, Any]], budget: ReplayBudget) -> list[dict[str, Any]]:
    """Means over the seeds that reached the target; ratios compare each of them with `once` of the same seed."""
    rows = []
    donors = runs.get(_DONOR, {})
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


def draw(result: dict[str, Any], file: Path) -> None:
    """Draw the smoothed held-out score over the run's own rollouts, a line for each variant: the mean over seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    budget = ReplayBudget(**result["budget"])
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for name, by_seed in result["runs"].items():
        # The part of a run on stored groups samples nothing: of its points only the last is drawn.
        curves = [_at_rollouts(record["points"]) for record in by_seed.values() if not record["error"]]
        if not curves:
            continue
        grid = [point["rollouts"] for point in min(curves, key=len)]
        values = [
            np.interp(
                grid,
                [p["rollouts"] for p in points],
                np.convolve([p["score"] for p in points], _kernel(budget), "same"),
            )
            for points in curves
        ]
        half = budget.smoothing // 2  # the convolution is not a mean at the ends
        axes.plot(
            grid[half:-half], np.mean(values, axis=0)[half:-half], "--" if "prioritized" in name else "-", label=name
        )
    axes.axhline(budget.target, color="grey", linewidth=0.8)
    axes.set_xlabel("rollouts sampled by the run")
    axes.set_ylabel("probability of a right answer, held out")
    axes.set_title(
        f"Sorting digits, GRPO, {budget.batch_groups} groups of {budget.group_size} a step, {budget.steps} steps"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


def _kernel(budget: ReplayBudget) -> Any:
    return np.full(budget.smoothing, 1.0 / budget.smoothing)


def _at_rollouts(points: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the points with one for each number of rollouts, the last."""
    return list({point["rollouts"]: point for point in points}.values())


if __name__ == "__main__":
    sys.exit(main())
