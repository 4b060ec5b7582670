"""Whether a choice of tasks saves rollouts: rollouts and time to a target score with every selector, beside uniform choice.

Two kinds of learner are trained with each selector and seed until the score on held-out tasks reaches a target that was fixed before: a synthetic
learner with known learning curves (three settings: one with differences, one without any, and one that misleads; benchmarks/selection/synthetic.py lists
its assumptions), and a language model of 0.75 million parameters that sorts digits (benchmarks/selection/sorting.py). Selectors are the production
classes. Uniform choice is `shuffle`. All selectors of a seed start from the same weights and have the same budget, in which every rollout counts.

`selection_cost` are the milliseconds of a choice among a million tasks (`rft bench selection_cost` measures more).

With `--folder`, finished runs are kept there, and the same command continues where it was stopped.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness.arguments import argument_parser, integer, integers, kept_folder, names
from benchmarks.harness.report import say, write
from benchmarks.selection import experiments
from benchmarks.selection.cost import cost_of_selecting
from benchmarks.selection.experiments import COMPARED, EXPERIMENTS, Experiment, Job, quick
from benchmarks.selection.picture import draw
from benchmarks.selection.summary import UNIFORM, summarize
from benchmarks.selection.table import tables


def measure(
    chosen: dict[str, Experiment], selectors: Sequence[str], seeds: Sequence[int], folder: Path, num_jobs: int
) -> dict[str, Any]:
    """Run every experiment with every selector and seed."""
    started = time.perf_counter()
    results: dict[str, Any] = {}
    # One thread for each run, set before the workers load libraries. One pool for all, since importing torch takes seconds.
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(num_jobs, multiprocessing.get_context("spawn")) as pool:
        for name, experiment in chosen.items():
            jobs = [Job(name, experiment, selector, seed, folder) for seed in seeds for selector in selectors]
            first = {job.seed: job for job in jobs}
            start = dict(zip(first, pool.map(experiments.prepare, first.values()), strict=True))
            futures = {pool.submit(experiments.run, job): job for job in jobs}
            runs: dict[str, dict[int, Any]] = {selector: dict.fromkeys(seeds) for selector in selectors}
            for number, future in enumerate(as_completed(futures), start=1):
                job, record = futures[future], future.result()
                runs[job.selector][job.seed] = record
                last = record["points"][-1]
                say(
                    f"{name}, {number} of {len(jobs)}: {job.selector}, seed {job.seed}: {last['score']:.3f} after "
                    f"{last['rollouts']:,} rollouts, {last['seconds']:.1f} s"
                )
            results[name] = {
                "what": experiment.what,
                "plan": asdict(experiment.plan),
                "levels": experiment.level_names,
                "start": {str(seed): facts for seed, facts in start.items()},
                "target": {str(seed): record["target"] for seed, record in runs[selectors[0]].items()},
                "selectors": summarize(runs, experiment.plan.budget),
            }
    return {
        "seeds": list(seeds),
        "uniform": UNIFORM,
        "selectors": {name: asdict(COMPARED[name]) for name in selectors},
        "experiments": results,
        "jobs": num_jobs,
        "seconds": round(time.perf_counter() - started, 1),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argument_parser("selection", __doc__)
    parser.add_argument("--seeds", type=integers(0), default=(0, 1, 2), help="separated by commas")
    parser.add_argument(
        "--selectors", type=names(*COMPARED), default=[*COMPARED], help=f"some of {', '.join(COMPARED)}"
    )
    parser.add_argument(
        "--experiments", type=names(*EXPERIMENTS), default=[*EXPERIMENTS], help=f"some of {', '.join(EXPERIMENTS)}"
    )
    parser.add_argument(
        "--jobs", type=integer(), default=os.cpu_count() or 1, help="runs at the same time, one thread each"
    )
    parser.add_argument(
        "--cost-tasks", type=integer(0), default=1_000_000, help="tasks of `selection_cost`; 0 leaves it out"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to look at the output")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    parser.add_argument("--table", type=Path, help="write the figures as tables in Markdown to this file")
    options = parser.parse_args(arguments)
    chosen = {name: quick(EXPERIMENTS[name]) if options.quick else EXPERIMENTS[name] for name in options.experiments}
    with kept_folder(options) as folder:
        results = measure(chosen, options.selectors, options.seeds, folder, options.jobs)
    if options.cost_tasks:
        num_tasks = min(options.cost_tasks, 10_000) if options.quick else options.cost_tasks
        results["selection_cost"] = cost_of_selecting(num_tasks, 5 if options.quick else 30)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(results, options.plot)
    if options.table:
        options.table.write_text(tables(results), encoding="utf-8")
    write(options, results)
    return 0
