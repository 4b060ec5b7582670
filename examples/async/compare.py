"""Run the four modes to an equal held-out score, and compare what they took.

Usage: python compare.py FOLDER [--seeds 1,2] [--modes on_policy,…] [--target 0.82] [--verifier] [--learning-rate 1e-4 --steps 80] [--plot FILE]

FOLDER keeps the warmed-up model and the buffer; runs that have finished there are not repeated, so a call that was interrupted continues. All
figures come from the buffer. JSON on stdout. Seconds begin when the explorer samples for the first time, so that loading engines does not
count. A mode has reached the target with the second of two successive evaluations whose mean is at least as high.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import rftdata
from rftcore.reporting.equal_score import measured
from rftcore.reporting.files import new_figure, write_whole
from rftdata.reports.results import RunResults

HERE = Path(__file__).resolve().parent
MODES = ("on_policy", "every_four", "one_step_off", "asynchronous")
WARM_UP_STEPS = 150
COLOURS = {
    "training": "#1b6ca8",
    "publishing": "#c8553d",
    "checkpointing": "#b8860b",
    "sampling": "#2a9d6f",
    "evaluating": "#b5cf6b",
    "transferring": "#e08e45",
    "waiting": "#ececec",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path, help="keeps the model and the buffer")
    parser.add_argument("--modes", default=",".join(MODES), help="separated by commas")
    parser.add_argument("--seeds", default="1,2", help="separated by commas")
    parser.add_argument("--target", type=float, default=0.82, help="held-out score at which runs are compared")
    parser.add_argument("--verifier", action="store_true", help="rewards from verifier.py, which waits")
    parser.add_argument("--learning-rate", type=float, help="instead of that of the files")
    parser.add_argument("--steps", type=int, help="instead of those of the files")
    parser.add_argument("--plot", type=Path, help="writes the picture to a .png or .svg file")
    options = parser.parse_args()
    model, location = warmed_up(options.folder), options.folder / "buffer"
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes.split(",")}
    variant = changes(options)
    for seed in options.seeds.split(","):
        for mode in found:
            name = "-".join([mode, seed, *variant])
            if finished(location, name) is None:
                settings = [f"run.name={name}", f"run.seed={seed}", f"model.path={model}", *variant.values()]
                rft("run", HERE / f"{mode}.yaml", "--plain", "--buffer", location, *overrides(settings))
            with rftdata.open(str(location)) as buffer:
                found[mode].append(measured(buffer, buffer.find_run(finished(location, name)), options.target))
            print(f"{name}: {found[mode][-1]['to_target']}", file=sys.stderr, flush=True)
    machine = f"{platform.machine()}, {os.cpu_count()} cores"
    print(
        json.dumps({"machine": machine, "target": options.target, "modes": found, "summary": summary(found)}, indent=1)
    )
    if options.plot:
        draw(found, options.target, options.plot)


def changes(options: argparse.Namespace) -> dict[str, str]:
    """Return what all runs change in the files, by the part of the runs' names that says so."""
    found = {}
    if options.verifier:
        found["verifier"] = "explorer.reward=./verifier.py:score"
    if options.learning_rate is not None:
        found[f"lr{options.learning_rate:g}"] = f"trainer.learning_rate={options.learning_rate}"
    if options.steps is not None:
        found[f"{options.steps}steps"] = f"steps={options.steps}"
    return found


def warmed_up(folder: Path) -> str:
    """Return the checkpoint of the warm-up, which is made by the first call."""
    location = folder / "warm"
    if finished(location, "sort-sft") is None:
        example = HERE.parent / "sort_from_scratch"
        model = folder / "model"
        subprocess.run([sys.executable, example / "make_model.py", model], check=True, stdout=sys.stderr)
        settings = [f"model.path={model}", f"steps={WARM_UP_STEPS}", f"trainer.checkpoint_every={WARM_UP_STEPS}"]
        rft("run", example / "sft.yaml", "--plain", "--buffer", location, *overrides(settings))
    with rftdata.open(str(location)) as buffer:
        return RunResults(buffer.find_run("sort-sft")).checkpoints()[-1].uri


def finished(location: Path, name: str) -> str | None:
    """Return the finished run with a configured name, by its own name, which has a number if one with that name was interrupted before."""
    if not location.exists():
        return None
    query = (
        "SELECT name FROM rft.run WHERE config -> 'run' ->> 'name' = %s AND status = 'finished' ORDER BY run_id DESC"
    )
    with rftdata.open(str(location)) as buffer:
        return next((row["name"] for row in buffer.sql(query, [name]).to_pylist()), None)


def overrides(settings: list[str]) -> list[str]:
    return [part for setting in settings for part in ("--set", setting)]


def rft(*arguments: object) -> None:
    """Run `rft …` to its end; what it prints goes to stderr."""
    command = [sys.executable, "-m", "rftcore", *map(str, arguments)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def summary(found: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return a row for each mode; ratios compare with the first mode, seed by seed."""
    first = next(iter(found.values()))
    rows = []
    for mode, runs in found.items():
        pairs = [
            (base["to_target"]["seconds"] / run["to_target"]["seconds"])
            for base, run in zip(first, runs, strict=True)
            if base["to_target"] and run["to_target"]
        ]
        rows.append(
            {
                "mode": mode,
                "reached": sum(run["to_target"] is not None for run in runs),
                "runs": len(runs),
                "seconds_to_target": [round(run["to_target"]["seconds"], 1) for run in runs if run["to_target"]],
                "steps_to_target": [run["to_target"]["step"] for run in runs if run["to_target"]],
                "times_as_fast": [round(pair, 2) for pair in pairs],
                "seconds": [round(run["seconds"], 1) for run in runs],
                "trainer_waits": [round(run["shares"]["trainer"].get("waiting", 0.0), 3) for run in runs],
                "explorer_waits": [round(run["shares"]["explorer"].get("waiting", 0.0), 3) for run in runs],
                "mean_staleness": [round(run["mean_staleness"], 2) for run in runs],
                "aged_out": [run["aged_out"] for run in runs],
                "last_scores": [round(mean(point["score"] for point in run["points"][-3:]), 3) for run in runs],
            }
        )
    return rows


def draw(found: dict[str, list[dict[str, Any]]], target: float, path: Path) -> None:
    """Draw the scores over the time, a line for each run, and what the time of trainer and explorer went into."""
    figure = new_figure(path, width=10, height=4)
    curves, bars = figure.subplots(1, 2, width_ratios=[3, 2])
    for (mode, runs), colour in zip(found.items(), ("#555555", "#b8860b", "#1b6ca8", "#2a9d6f"), strict=False):
        for number, run in enumerate(runs):
            label = mode.replace("_", " ") if number == 0 else None
            times, scores = ([point[key] for point in run["points"]] for key in ("seconds", "score"))
            curves.plot(times, scores, "-o", color=colour, markersize=3, linewidth=1.2, label=label)
    curves.axhline(target, color="grey", linewidth=0.8, linestyle="--")
    curves.set_xlabel("seconds since the first sample", fontsize=8)
    curves.set_ylabel("right answers to held-out questions, sampled", fontsize=8)
    curves.legend(fontsize=8, frameon=False)
    lanes = [(mode, role) for mode in found for role in ("trainer", "explorer")]
    for row, (mode, role) in enumerate(lanes):
        left = 0.0
        for activity, colour in COLOURS.items():
            width = mean(run["shares"][role].get(activity, 0.0) for run in found[mode])
            bars.barh(row, width, left=left, color=colour, label=activity if row == 0 else None, height=0.8)
            left += width
    bars.set_yticks(range(len(lanes)), [f"{mode.replace('_', ' ')}: {role}" for mode, role in lanes], fontsize=8)
    bars.invert_yaxis()
    bars.set_xlim(0, 1)
    bars.set_xlabel("share of the time", fontsize=8)
    figure.legend(*bars.get_legend_handles_labels(), fontsize=8, frameon=False, loc="outside lower right", ncols=8)
    for axes in (curves, bars):
        axes.tick_params(labelsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    write_whole(path, "picture", lambda draft: figure.savefig(draft, dpi=100))


if __name__ == "__main__":
    main()
