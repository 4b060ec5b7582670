"""The demo (examples/grpo_reasoning: SmolLM2-135M learns sums) with many algorithms on one budget, for `rft bench algorithms --demo`.

Every algorithm is a run with a buffer of its own: `rft explore`, `rft process` and `rft train`, all of them side by side on one GPU. The settings are
those of the example's config.yaml with these differences: the engine is transformers, everything is float32, batches are larger, and the pipeline drops
only aborted responses. So each step of each algorithm trains on the same number of sampled groups. `dapo` replaces groups of equal rewards and makes
half as many steps, so it samples at most as many rollouts. In `mix`, one rollout of eight is a demonstration.

`points` are mean rewards of sampled rollouts (temperature 1, training tasks that were not seen before), without demonstrations. `validation` is
the greedy score on held-out questions before and after training. The result is written whenever a run has ended, so that an interrupted call leaves
the finished runs. A run that does not end within its limit is stopped and counts as failed.
"""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

import rftdata
from benchmarks.harness.curves import Curve, draw
from benchmarks.harness.report import ROOT, say
from benchmarks.harness.rft import command, environment
from rftdata.attempts.evaluations import validation_scores
from rftdata.config import merged
from rftdata.files.durable import write_whole

_EXAMPLE = ROOT / "examples" / "grpo_reasoning"
_ROLES = ("train", "process", "explore")
_VALIDATION = "validation"
_WINDOWS = 8  # points of a curve

CHANGES: dict[str, dict[str, Any]] = {
    # The critic's head is new, so its learning rate is larger and it learns alone at first.
    "ppo": {"algorithm": {"critic": {"learning_rate": 5.0e-5, "warmup_steps": 5}}},
    "dapo": {
        "pipelines": {
            "experience": [{"drop_truncated": {"finish_reasons": ["abort"]}}, {"drop_zero_variance_groups": {}}]
        }
    },
    "mix": {
        "explorer": {
            "workflow": f"{Path(__file__).with_name('mixed_workflow.py')}:mixed",
            "workflow_args": {"sampled_tasksets": [_VALIDATION]},
        }
    },
}


@dataclass(frozen=True)
class DemoBudget:
    """Sizes of a run, the same for all algorithms.

    Attributes:
        steps: trainer steps; half as many for dapo.
        limit_s: seconds after which a run is stopped.
    """

    steps: int = 48
    batch_groups: int = 16
    group_size: int = 8
    learning_rate: float = 2.0e-5
    limit_s: float = 400.0


def measure(
    names: Sequence[str], seed: int, budget: DemoBudget, model: str, folder: Path, output: Path | None, num_jobs: int
) -> dict[str, Any]:
    """Run every algorithm once.

    Args:
        model: folder of the model, or a Hugging Face id.
        folder: parent of a folder for each algorithm with configuration, buffer and logs of the roles.
        output: file of the results so far, written whenever a run has ended.
        num_jobs: runs at a time.
    """
    result: dict[str, Any] = {"budget": asdict(budget), "seed": seed, "model": model, "runs": {}}
    with ThreadPoolExecutor(num_jobs) as pool:
        jobs = {pool.submit(run, name, seed, budget, model, folder / name): name for name in names}
        for number, future in enumerate(as_completed(jobs), start=1):
            name = jobs[future]
            result["runs"][name] = record = future.result()
            result["summary"] = summary(result["runs"])
            if output is not None:
                write_whole(output, json.dumps(result, indent=1))
            scores = list(record["validation"].values())
            shown = f"{scores[0]:.3f} → {scores[-1]:.3f}" if scores else "no validation"
            say(f"{number} of {len(names)}: {name}: {shown} {record['error'] or ''}")
    return result


def run(name: str, seed: int, budget: DemoBudget, model: str, folder: Path) -> dict[str, Any]:
    """Train once; return its points, its validation scores by step, and its error if it did not reach its last step."""
    folder.mkdir(parents=True, exist_ok=True)
    config = configuration(name, seed, budget, model, folder)
    (folder / "config.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
    started = time.monotonic()
    error = _train(folder, budget.limit_s)
    seconds = time.monotonic() - started
    try:
        points, validation, finished = _read(folder, config["run"]["name"], config["steps"])
    except Exception as failure:  # noqa: BLE001 - a failure is a result
        points, validation, finished = [], {}, False
        error = error or f"{type(failure).__name__}: {failure}"
    if not finished and error is None:
        error = "it ended before its last step"
    return {"points": points, "validation": validation, "seconds": round(seconds, 1), "error": error}


def configuration(name: str, seed: int, budget: DemoBudget, model: str, folder: Path) -> dict[str, Any]:
    """Return the example's configuration, changed for an algorithm and a budget."""
    example = yaml.safe_load((_EXAMPLE / "config.yaml").read_text(encoding="utf-8"))
    steps = max(1, budget.steps // 2) if name == "dapo" else budget.steps
    evaluation = {**example["eval"], "every": steps}
    del evaluation["test"]
    changes = {
        "run": {"name": f"demo-{name}", "seed": seed},
        "buffer": {"uri": str(folder / "buffer"), "min_free_bytes": 0},
        "model": {"path": model},
        "steps": steps,
        "monitor": [],
        "pipelines": {"experience": [{"drop_truncated": {"finish_reasons": ["abort"]}}]},
        "explorer": {
            "engine": "transformers",
            "engine_args": {"dtype": "float32", "context_length": 128, "max_num_seqs": 256},
            "reward": f"{_EXAMPLE / 'reward.py'}:score",
            "reward_processes": 1,
            "claim_groups": budget.batch_groups,
            "max_refill": budget.batch_groups,
        },
        "trainer": {
            "batch_groups": budget.batch_groups,
            "learning_rate": budget.learning_rate,
            "autocast": "none",
            "checkpoint_every": steps,
        },
    }
    config = merged({**example, "eval": evaluation}, changes)
    # The example's keys of grpo do not apply to other algorithms.
    config["algorithm"] = {"name": name, "group_size": budget.group_size}
    return merged(config, CHANGES.get(name, {}))


def _train(folder: Path, limit_s: float) -> str | None:
    """Run the three roles until the trainer ends; return the error, or None."""
    called = environment(OMP_NUM_THREADS=os.environ.get("OMP_NUM_THREADS", "1"))
    processes = {}
    try:
        for role in _ROLES:
            with (folder / f"{role}.log").open("wb") as log:
                processes[role] = subprocess.Popen(
                    command(role, folder / "config.yaml"),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=called,
                    start_new_session=True,
                )
        return _wait(processes, folder, limit_s)
    finally:
        _stop(list(processes.values()))


def _wait(processes: dict[str, subprocess.Popen[bytes]], folder: Path, limit_s: float) -> str | None:
    deadline = time.monotonic() + limit_s
    while processes["train"].poll() is None:
        failed = [role for role in _ROLES if processes[role].poll() not in (None, 0)]
        if failed:
            return _end_of_log(folder, failed[0])
        if time.monotonic() > deadline:
            return f"stopped after {limit_s:g} s"
        time.sleep(0.5)
    return None if processes["train"].returncode == 0 else _end_of_log(folder, "train")


def _end_of_log(folder: Path, role: str) -> str:
    lines = (folder / f"{role}.log").read_text(encoding="utf-8", errors="replace").split("\n")
    return f"{role}: " + " ".join(line.strip() for line in lines if line.strip())[-400:]


def _stop(processes: Sequence[subprocess.Popen[bytes]], patience_s: float = 10.0) -> None:
    """End processes that still run, with their children."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    deadline = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _read(folder: Path, run_name: str, steps: int) -> tuple[list[dict[str, Any]], dict[int, float], bool]:
    """Return the curve of a stored run, its validation scores by step, and whether it reached its last step."""
    with rftdata.open(str(folder / "buffer"), create=False) as buffer:
        stored = buffer.find_run(run_name)
        sampled = buffer.sql(
            """SELECT g.explore_step, count(*) AS rollouts, sum(e.reward) AS right
               FROM rft.experience e JOIN rft.rollout_group g USING (group_id)
               WHERE e.run_id = %s AND e.policy_version_min IS NOT NULL GROUP BY 1 ORDER BY 1""",
            [stored.run_id],
        ).to_pylist()
        validation = validation_scores(stored, [_VALIDATION], "greedy", max_failed=0.0)
        done = buffer.sql("SELECT max(trainer_step) AS step FROM rft.v_train_step WHERE run_id = %s", [stored.run_id])
    return curve(sampled, steps), dict(sorted(validation.items())), done["step"][0].as_py() == steps


def curve(sampled: Sequence[dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """Return mean rewards over windows of explorer steps, each at the number of rollouts up to its end."""
    width, used, points = max(1, math.ceil(steps / _WINDOWS)), 0, []
    for first in range(0, len(sampled), width):
        window = sampled[first : first + width]
        num = sum(row["rollouts"] for row in window)
        used += num
        points.append(
            {
                "rollouts": used,
                "step": window[-1]["explore_step"] + 1,
                "score": round(sum(row["right"] for row in window) / num, 5),
            }
        )
    return points


def summary(runs: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """Return scores of each algorithm, in order of the last validation."""
    rows = []
    for name, record in runs.items():
        validation, points = list(record["validation"].values()), record["points"]
        rows.append(
            {
                "algorithm": name,
                "failed": record["error"],
                "validation_start": validation[0] if validation else None,
                "validation_end": validation[-1] if len(validation) > 1 else None,
                "reward_first": points[0]["score"] if points else None,
                "reward_last": points[-1]["score"] if points else None,
                "rollouts": points[-1]["rollouts"] if points else 0,
                "seconds": record["seconds"],
            }
        )
    return sorted(rows, key=lambda row: -(row["validation_end"] or row["reward_last"] or 0.0))


def plot(result: dict[str, Any], file: Path) -> None:
    """Draw the mean reward of sampled rollouts over rollouts, a line for each algorithm; failed runs are dashed."""
    curves = []
    for row in result["summary"]:
        points = result["runs"][row["algorithm"]]["points"]
        end = "failed" if row["failed"] else f"validation {row['validation_end'] or float('nan'):.2f}"
        rollouts, scores = ([point[name] for point in points] for name in ("rollouts", "score"))
        curves.append(Curve(f"{row['algorithm']} ({end})", rollouts, scores, ".--" if row["failed"] else ".-"))
    title = f"SmolLM2-135M learns sums, seed {result['seed']}"
    draw(file, curves, title=title, scores="mean reward of sampled rollouts")
