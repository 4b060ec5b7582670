"""Whether choosing tasks pays: rollouts and time to a target score with every selector, against uniform choice.

`rft bench selection [--seeds 0,1,2] [--plot FILE]` trains two kinds of learner with each selector and seed until a score on held-out
tasks is reached that was fixed before: a synthetic one with known learning curves (three settings, one in which there is nothing
to choose, one that misleads; see benchmarks/selection/synthetic.py for what it assumes), and a language model of 0.75 million
parameters that sorts digits (benchmarks/selection/sorting.py). Selectors are the production classes. Uniform choice is `shuffle`. All
selectors of a seed start from the same weights and have the same budget; every rollout counts. JSON on stdout.

`selection_cost` are the milliseconds that choosing takes with a million tasks (benchmarks/selection_cost.py says more).

With --folder, finished runs are kept there, and the same command continues where it was stopped.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.selection import experiments
from benchmarks.selection.cost import cost_of_selecting
from benchmarks.selection.experiments import COMPARED, EXPERIMENTS, Experiment, Job, quick
from benchmarks.selection.picture import draw
from benchmarks.selection.summary import UNIFORM, summarize
from benchmarks.selection.table import tables


def measure(
    chosen: dict[str, Experiment], selectors: Sequence[str], seeds: Sequence[int], folder: Path, num_jobs: int
) -> dict[str, Any]:
    """Every experiment with every selector and seed."""
    started = time.perf_counter()
    results: dict[str, Any] = {}
    # One thread a run, said before the workers load what reads it. One pool for all, since importing torch takes seconds.
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
                print(
                    f"{name}, {number} of {len(jobs)}: {job.selector}, seed {job.seed}: {last['score']:.3f} after "
                    f"{last['rollouts']:,} rollouts, {last['seconds']:.1f} s",
                    file=sys.stderr,
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
    parser = argparse.ArgumentParser(
        prog="rft bench selection", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0,1,2", help="with commas between them")
    parser.add_argument("--selectors", default=",".join(COMPARED), help="some of them, with commas between")
    parser.add_argument("--experiments", default=",".join(EXPERIMENTS), help="some of them, with commas between")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="runs at the same time, one thread each")
    parser.add_argument(
        "--cost-tasks", type=int, default=1_000_000, help="tasks at which choosing is timed; 0: not at all"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes, for a look at what is printed")
    parser.add_argument("--plot", type=Path, help="write a picture to this file")
    parser.add_argument("--table", type=Path, help="write the figures as tables in Markdown to this file")
    parser.add_argument("--folder", type=Path, help="where to keep finished runs; a temporary folder by default")
    options = parser.parse_args(arguments)
    seeds = _numbers(parser, options.seeds)
    selectors = _names(parser, "selectors", options.selectors, COMPARED)
    names = _names(parser, "experiments", options.experiments, EXPERIMENTS)
    chosen = {name: quick(EXPERIMENTS[name]) if options.quick else EXPERIMENTS[name] for name in names}
    with tempfile.TemporaryDirectory(prefix="rft-bench-") as temporary:
        folder = options.folder or Path(temporary)
        results = measure(chosen, selectors, seeds, folder.resolve(), max(1, options.jobs))
    if options.cost_tasks > 0:
        num_tasks = min(options.cost_tasks, 10_000) if options.quick else options.cost_tasks
        results["selection_cost"] = cost_of_selecting(num_tasks, 5 if options.quick else 30)
    if options.plot:
        options.plot.parent.mkdir(parents=True, exist_ok=True)
        draw(results, options.plot)
    if options.table:
        options.table.write_text(tables(results), encoding="utf-8")
    print(json.dumps(results, indent=2))
    return 0


def _numbers(parser: argparse.ArgumentParser, text: str) -> list[int]:
    try:
        return list(dict.fromkeys(int(part) for part in text.split(",")))
    except ValueError:
        parser.error(f"--seeds must be numbers with commas between them, not {text!r}")


def _names(parser: argparse.ArgumentParser, what: str, text: str, known: dict[str, Any]) -> list[str]:
    wanted = list(dict.fromkeys(text.split(",")))
    if not set(wanted) <= set(known):
        parser.error(f"--{what} must be some of {','.join(known)}")
    return wanted


if __name__ == "__main__":
    sys.exit(main())
