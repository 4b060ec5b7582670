"""Whether algorithms learn: the sorting model, the same start, tasks and budget for each, real rollouts.

`rft bench algorithms [--algorithms grpo,ppo] [--seeds 0,1,2] [--plot FILE]` trains the language model of benchmarks/selection/sorting.py
(0.75 million parameters, sorts digits, warmed up by imitation) with presets as they are, but for the changes in `CHANGES`. A step
samples `group_size` rollouts of each of `batch_groups` tasks that are chosen uniformly; a rollout is rewarded 1 if its list is right.
Groups of equal rewards are trained on like the others: presets that drop them do so by their own parts or, as dapo, sample again.
The held-out score is the probability that a sampled answer is right, averaged over lengths; no sampling noise is in it. JSON on stdout.

All algorithms have one learning rate, so the figures compare defaults and not the best that each could reach.

`--demo` trains SmolLM2-135M on sums instead, once with each algorithm, through the real processes: see benchmarks/demo.py.
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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import demo
from benchmarks.demo import DemoBudget

ALGORITHMS = (
    "grpo",
    "ppo",
    "rloo",
    "reinforce_plus_plus",
    "dapo",
    "gspo",
    "cispo",
    "opmd",
    "raft",
    "mix",
)
# A critic has more to learn than a policy that imitates already, so its learning rate is larger; and it learns alone at first.
CHANGES: dict[str, dict[str, Any]] = {"ppo": {"critic": {"learning_rate": 1.0e-3, "warmup_steps": 5}}}
EXPERTS = {"mix": 2, "chord": 2}  # groups of a step that are right answers in place of rollouts


@dataclass(frozen=True)
class Budget:
    """The same for all algorithms.

    Attributes:
        rollouts: after which a run ends.
        evaluate_every: steps between two evaluations.
    """

    batch_groups: int = 16
    group_size: int = 8
    rollouts: int = 25_600
    evaluate_every: int = 10
    learning_rate: float = 2.0e-4


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="rft bench algorithms", description=__doc__.partition("\n")[0])
    parser.add_argument("--algorithms", default=",".join(ALGORITHMS), help="presets, separated by commas")
    parser.add_argument("--seeds", default="0,1,2", help="separated by commas")
    parser.add_argument("--rollouts", type=int, default=Budget.rollouts, help="budget of a run")
    parser.add_argument(
        "--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time, one thread each"
    )
    parser.add_argument("--folder", type=Path, help="keeps the warmed-up models, and finds them there")
    parser.add_argument("--plot", type=Path, help="writes the curves to a .png or .svg file")
    parser.add_argument("--quick", action="store_true", help="a tiny course, to see that it runs")
    demo_options = parser.add_argument_group("with --demo")
    demo_options.add_argument(
        "--demo", action="store_true", help="one seed of examples/grpo_reasoning, all algorithms side by side"
    )
    demo_options.add_argument(
        "--model", default="HuggingFaceTB/SmolLM2-135M-Instruct", help="a folder, or a Hugging Face id"
    )
    demo_options.add_argument("--steps", type=int, default=DemoBudget.steps)
    demo_options.add_argument("--batch-groups", type=int, default=DemoBudget.batch_groups)
    demo_options.add_argument(
        "--limit", type=float, default=DemoBudget.limit_s, help="seconds after which a run is stopped"
    )
    demo_options.add_argument("--output", type=Path, help="file with the result of the runs that have ended so far")
    options = parser.parse_args(arguments)
    names = options.algorithms.split(",")
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if options.demo:
        return _demo(options, names, seeds[0])
    budget = Budget(rollouts=options.rollouts)
    with tempfile.TemporaryDirectory() as temporary:
        result = measure(names, seeds, budget, options.folder or Path(temporary), options.jobs, quick=options.quick)
    print(json.dumps(result, indent=1))
    if options.plot:
        draw(result, options.plot)
    return 0


def _demo(options: argparse.Namespace, names: Sequence[str], seed: int) -> int:
    budget = DemoBudget(steps=options.steps, batch_groups=options.batch_groups, limit_s=options.limit)
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        result = demo.measure(names, seed, budget, options.model, folder, options.output, options.jobs)
    print(json.dumps(result, indent=1))
    if options.plot:
        demo.draw(result, options.plot)
    return 0


def measure(
    names: Sequence[str], seeds: Sequence[int], budget: Budget, folder: Path, num_jobs: int, *, quick: bool
) -> dict[str, Any]:
    """Every algorithm with every seed."""
    os.environ["OMP_NUM_THREADS"] = "1"  # a thread for each run, set before the workers load what reads it
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
            print(f"{number} of {len(jobs)}: {name}, seed {seed}: {end:.3f} {record['error'] or ''}", file=sys.stderr)
    return {"budget": asdict(budget), "runs": runs, "summary": summary(runs)}


def prepare_seed(job: tuple[Path, int, bool]) -> None:
    from benchmarks.selection import sorting

    folder, seed, quick = job
    folder.mkdir(parents=True, exist_ok=True)
    sorting.prepare(folder, course_of(quick), seed)


def course_of(quick: bool) -> Any:
    from benchmarks.selection.sorting import Course

    return Course(tasks_per_level=8, held_out_per_level=8, warm_up_steps=4, strong_steps=2) if quick else Course()


def run(name: str, seed: int, budget: Budget, folder: Path, quick: bool) -> dict[str, Any]:
    """One run: its points, and its error where it ended early."""
    points: list[dict[str, Any]] = []
    error = None
    try:
        points.extend(_train(name, seed, budget, folder, quick))
    except Exception as failure:  # noqa: BLE001 - a failure is a result of the comparison
        error = f"{type(failure).__name__}: {failure}"
    return {"points": points, "error": error}


def _train(name: str, seed: int, budget: Budget, folder: Path, quick: bool) -> Any:
    from benchmarks.selection import sorting
    from rftcore.algorithms import build_algorithm

    tasks, held_out = sorting.make_tasks(course_of(quick), seed)
    tokens = sorting.Tokens(folder / "start")
    algorithm = build_algorithm(name, CHANGES.get(name, {}), group_size=budget.group_size)
    learner = sorting.open_learner(folder / "start", algorithm, budget.learning_rate, seed, warmup_steps=10)
    generator = np.random.default_rng((seed, 7))
    used, step, started = 0, 0, time.perf_counter()
    while True:
        if step % budget.evaluate_every == 0 or used >= budget.rollouts:
            with learner.policy.unpacked() as model:
                score, _ = sorting.scores(model, held_out, tokens)
            yield {
                "rollouts": used,
                "step": step,
                "score": round(score, 5),
                "seconds": round(time.perf_counter() - started, 2),
            }
        if used >= budget.rollouts:
            return
        step += 1
        rows: list[Any] = []
        rewards: list[float] = []
        groups: list[int] = []
        experts = EXPERTS.get(name, 0)
        for group in range(experts):
            task = tasks[generator.integers(len(tasks))]
            rows.append((tokens.prompt(task.question), tokens.response(task.answer), None))
            rewards.append(1.0)
            groups.append(group)
        wanted = budget.batch_groups - experts
        while wanted and used < budget.rollouts:
            chosen = [tasks[i] for i in generator.integers(len(tasks), size=wanted)]
            with learner.policy.unpacked() as model:
                sampled = list(
                    sorting.rollouts_of(model, [t for t in chosen for _ in range(budget.group_size)], tokens)
                )
            used += len(sampled)
            for place, task in enumerate(chosen):
                own = sampled[place * budget.group_size : (place + 1) * budget.group_size]
                right = tokens.response(task.answer)
                own_rewards = [float(response == right) for _, response, _ in own]
                if name == "dapo" and len(set(own_rewards)) == 1:
                    continue  # dynamic sampling: another group in its place
                groups += [experts + len(groups)] * len(own)
                rows += own
                rewards += own_rewards
                wanted -= 1
            if name != "dapo":
                break
        if rows:
            learner.update(sorting.train_batch(rows, rewards, np.unique(groups, return_inverse=True)[1]), step)


def summary(runs: dict[str, dict[int, Any]]) -> list[dict[str, Any]]:
    """Start, end and best of each algorithm, as means over seeds; the best at the end first."""
    rows = []
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
    return sorted(rows, key=lambda row: -(row["end"] or 0.0))


def mean(values: Sequence[float]) -> float | None:
    return round(float(np.mean(values)), 4) if values else None


def draw(result: dict[str, Any], file: Path) -> None:
    """The mean held-out score of each algorithm over rollouts."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, row in enumerate(result["summary"]):
        finished = [record["points"] for record in result["runs"][row["algorithm"]].values() if not record["error"]]
        if not finished:
            continue
        grid = [point["rollouts"] for point in finished[0]]
        curves = [np.interp(grid, [p["rollouts"] for p in points], [p["score"] for p in points]) for points in finished]
        style = "-" if number < 10 else "--"
        axes.plot(grid, np.mean(curves, axis=0), style, label=f"{row['algorithm']} ({row['end']:.2f})")
    axes.set_xlabel("rollouts")
    axes.set_ylabel("probability of a right answer, held out")
    axes.set_title(
        f"Sorting digits, {result['budget']['batch_groups']} groups of {result['budget']['group_size']} a step"
    )
    axes.legend(fontsize=8)
    axes.grid(alpha=0.3)
    figure.savefig(file, dpi=120)


if __name__ == "__main__":
    sys.exit(main())
