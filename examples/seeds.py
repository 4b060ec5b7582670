"""Run an example of this folder with several seeds and variants, and compare them on its test tasks.

Usage: python examples/seeds.py EXAMPLE FOLDER [--seeds 1,2,3] [--variant NAME [KEY=VALUE ...]]... [--by FEATURE] [--plot FILE]

For each seed it makes a model with the words of EXAMPLE/words.txt, runs EXAMPLE/sft.yaml, and then the example's other configuration from its
checkpoint, once for each variant, with the variant's settings. FOLDER keeps models and buffers. Runs that have finished there are not repeated, so an
interrupted call continues.

JSON on stdout, all of it from the buffers: the test tasks answered before training and after (by the step that is best on the validation tasks), and the
validation tasks over the steps. Errors of a run are over its tasks, those of a variant over its seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from math import sqrt
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import rftdata
from rftcore.reporting.files import new_figure, write_whole
from rftdata.buffer import Buffer
from rftdata.reports.results import RunResults

HERE = Path(__file__).resolve().parent
COLOURS = ("#1b6ca8", "#c8553d", "#2a9d6f", "#8f5bb5")
# A seed's test answers, with the mean over tasks of each value of a feature.
BY_FEATURE = """
SELECT t.features ->> %s AS value, count(*)::int AS num_tasks, avg(a.reward)::float8 AS mean,
       (stddev_samp(a.reward) / sqrt(count(*)))::float8 AS standard_error
FROM rft.evaluation_answer a JOIN rft.task t USING (task_id) WHERE a.evaluation_id = %s GROUP BY 1 ORDER BY 1"""

MEAN_TURNS = "SELECT avg(num_turns)::float8 AS turns FROM rft.evaluation_answer WHERE evaluation_id = %s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("example", help="folder with words.txt, sft.yaml and one more configuration")
    parser.add_argument("folder", type=Path, help="keeps models and buffers")
    parser.add_argument("--seeds", default="1,2,3", help="separated by commas")
    parser.add_argument("--variant", nargs="+", action="append", metavar=("NAME", "KEY=VALUE"), help="may be repeated")
    parser.add_argument("--hidden-size", type=int, default=128, help="of the model")
    parser.add_argument("--layers", type=int, default=4, help="of the model")
    parser.add_argument("--by", help="feature of tasks by which the results are divided")
    parser.add_argument("--line", action="append", default=[], metavar="NAME=VALUE", help="a baseline in the picture")
    parser.add_argument("--plot", type=Path, help="writes the picture to a .png or .svg file")
    options = parser.parse_args()
    example = HERE / options.example
    (config,) = (path for path in sorted(example.glob("*.yaml")) if path.name != "sft.yaml")
    variants = {name: settings for name, *settings in options.variant or [[config.stem]]}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in variants}
    for seed in map(int, options.seeds.split(",")):
        size = ["--hidden-size", str(options.hidden_size), "--layers", str(options.layers)]
        warm = warmed_up(example, options.folder / f"seed-{seed}", seed, size)
        for name, settings in variants.items():
            buffer = options.folder / f"seed-{seed}" / name
            run(config, buffer, [f"run.seed={seed}", f"model.path={warm}", *settings])
            with rftdata.open(str(buffer)) as opened:
                found[name].append({"seed": seed, **results(opened, options.by)})
            print(f"{name}, seed {seed}: {found[name][-1]['test']}", file=sys.stderr, flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(json.dumps({"machine": machine, "runs": found, "summary": summary(found)}, indent=1))
    if options.plot:
        lines = {name: float(value) for name, _, value in (each.partition("=") for each in options.line)}
        draw(found, lines, options.plot)


def warmed_up(example: Path, folder: Path, seed: int, size: list[str]) -> str:
    """Return the checkpoint of the warm-up, which is made by the first call.

    Args:
        size: further arguments of small_chat_model.py.
    """
    model = folder / "model"
    if not model.exists():
        words = (example / "words.txt").read_text().split()
        command = [sys.executable, HERE / "small_chat_model.py", model, *words, "--seed", str(seed), *size]
        subprocess.run(command, check=True, stdout=sys.stderr)
    run(example / "sft.yaml", folder / "warm-up", [f"run.seed={seed}", f"model.path={model}"])
    with rftdata.open(str(folder / "warm-up")) as buffer:
        return RunResults(buffer.find_run(finished(buffer))).checkpoints()[-1].uri


def run(config: Path, location: Path, settings: list[str]) -> None:
    """Run a configuration to its end in a buffer of its own, unless that was done before."""
    if location.exists():
        with rftdata.open(str(location)) as buffer:
            if finished(buffer) is not None:
                return
    overrides = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "rftcore", "run", str(config), "--plain", "--buffer", str(location), *overrides]
    subprocess.run(command, check=True, stdout=sys.stderr)


def finished(buffer: Buffer) -> str | None:
    """Return the name of the newest finished run."""
    names = buffer.sql("SELECT name FROM rft.run WHERE status = 'finished' ORDER BY run_id DESC LIMIT 1").to_pylist()
    return names[0]["name"] if names else None


def results(buffer: Buffer, feature: str | None) -> dict[str, Any]:
    """Return what the run of a buffer reached."""
    made = RunResults(buffer.find_run(finished(buffer)))
    evaluations = made.evaluations()
    tests = [each for each in evaluations if each.purpose == "test"]
    test = []
    for first in (each for each in tests if each.trainer_step == min(other.trainer_step for other in tests)):
        last = max(
            (each for each in tests if (each.taskset, each.decoding) == (first.taskset, first.decoding)),
            key=lambda each: each.trainer_step,
        )
        pair = made.paired(first, last)
        ends = {"before": first, "after": last}
        parts = {
            end: buffer.sql(BY_FEATURE, [feature, each.evaluation_id]).to_pylist()
            for end, each in ends.items()
            if feature is not None
        }
        turns = [buffer.sql(MEAN_TURNS, [each.evaluation_id]).to_pylist()[0]["turns"] for each in ends.values()]
        test.append(
            {
                "taskset": first.taskset,
                "decoding": first.decoding,
                "num_tasks": pair.num_questions,
                "step": last.trainer_step,
                "before": pair.before,
                "after": pair.after,
                "standard_errors": [first.standard_error, last.standard_error],
                "difference": pair.difference,
                "standard_error": pair.standard_error,
                "mean_turns": turns,
                **({"by": parts} if parts else {}),
            }
        )
    curves: dict[str, list[list[float | None]]] = {}
    for each in evaluations:
        if each.purpose == "validation":
            curve = curves.setdefault(f"{each.taskset}, {each.decoding}", [])
            curve.append([each.trainer_step, each.mean, each.standard_error])
    totals = made.totals()
    training = [[point.step + 1, round(point.mean, 4)] for point in made.train_curve()]
    return {
        "test": test,
        "validation": curves,
        "training": training,
        "seconds": round(totals.seconds, 1),
        "sampled_tokens": totals.sampled_tokens,
        "turns": totals.num_turns,
    }


def summary(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return the mean over seeds of each variant and test taskset, with its standard error over seeds."""
    rows = []
    for name, runs in found.items():
        for parts in zip(*(each["test"] for each in runs), strict=True):
            row = {"variant": name, "taskset": parts[0]["taskset"], "decoding": parts[0]["decoding"]}
            for key in ("before", "after"):
                values = [part[key] for part in parts]
                row[key] = round(mean(values), 4)
                row[f"{key}_standard_error"] = round(stdev(values) / sqrt(len(values)), 4) if len(values) > 1 else None
            rows.append(row)
    return rows


def draw(found: dict[str, list[dict[str, Any]]], lines: dict[str, float], path: Path) -> None:
    """Draw the first validation taskset over the trainer steps, a line for each run."""
    figure = new_figure(path, width=6.5, height=4)
    axes = figure.add_subplot()
    for (name, runs), colour in zip(found.items(), COLOURS, strict=False):
        for number, each in enumerate(runs):
            steps, means, errors = zip(*next(iter(each["validation"].values())), strict=True)
            label = name if number == 0 else None
            axes.errorbar(steps, means, yerr=errors, fmt="-o", color=colour, markersize=3, linewidth=1.1, label=label)
    for name, value in lines.items():
        axes.axhline(value, color="grey", linewidth=0.8, linestyle="--")
        axes.annotate(name, (0, value), fontsize=7, color="grey", va="bottom")
    axes.set_xlabel("trainer step", fontsize=8)
    axes.set_ylabel("mean reward of held-out tasks", fontsize=8)
    axes.legend(fontsize=8, frameon=False)
    axes.tick_params(labelsize=8)
    axes.spines[["top", "right"]].set_visible(False)
    write_whole(path, "picture", lambda draft: figure.savefig(draft, dpi=100))


if __name__ == "__main__":
    main()
