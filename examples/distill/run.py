"""Distil a sorting model into a smaller one, live and from stored log-probabilities, and compare with GRPO from the same start.

    python examples/distill/run.py --buffer ./buffer

Prints every command before running it. Models are written to ./models. Runs that the buffer already has are used unchanged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SORT = HERE.parent / "sort_from_scratch"
# The teacher's demonstrations have no wrong digits.
CLEAN = "tasks=[{name: sort-clean, source: './tasks.py:numbers', args: {size: 20000}, split: train}]"
# Means over the test questions, sampled: the first weights of each run, and the step that validation chose.
SCORES = """
select o.name as run, a.trainer_step as step, avg(reward) as mean, stddev_samp(reward) / sqrt(count(*)) as standard_error
from evaluation a join run o using (run_id) join evaluation_answer using (evaluation_id)
where a.purpose = 'test' and a.decoding = 'sampled' group by 1, 2 order by 1, 2"""
# Rollouts that each run sampled up to the first validation of at least the goal, and in all; seconds from its first to its last step.
COSTS = """
with reached as (
    select run_id, min(trainer_step) as step from evaluation where purpose = 'validation' and mean_reward >= {goal} group by 1)
select o.name as run, reached.step,
       (select count(*) from rollout r join rollout_group g using (group_id) where g.run_id = o.run_id) as rollouts,
       (select count(*) from rollout r join rollout_group g using (group_id)
        where g.run_id = o.run_id and g.explore_step < reached.step) as rollouts_to_goal,
       (select sum(wait_seconds + train_seconds + publish_seconds) from v_train_step s where s.run = o.name) as seconds
from run o left join reached using (run_id)"""


def rft(*arguments: str, capture: bool = False) -> str:
    """Run `rft …`, as a user would, after printing it; return its output with `capture`."""
    print(f"\n$ rft {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-c", "import sys; from rftcore.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None).stdout or ""


def ask(buffer: str, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    rows: list[dict[str, Any]] = json.loads(rft("sql", "--buffer", buffer, "--json", query, capture=True))
    return rows


def finished(buffer: str) -> set[str]:
    if not (Path(buffer) / "postgres").is_dir():
        return set()
    return {row["name"] for row in ask(buffer, "select name from run where status = 'finished'")}


def checkpoint(buffer: str, run: str) -> str:
    """Return the folder of a run's last checkpoint."""
    query = (
        f"select uri from checkpoint join run using (run_id) where name = '{run}' order by trainer_step desc limit 1"
    )
    return str(ask(buffer, query)[0]["uri"])


def train(buffer: str, run: str, config: Path, *settings: str) -> None:
    """Run a configuration under a name, unless that run has finished."""
    if run not in finished(buffer):
        options = [part for setting in (f"run.name={run}", *settings) for part in ("--set", setting)]
        rft("run", str(config), "--buffer", buffer, "--plain", *options)


def show(buffer: str, runs: list[str], goal: float) -> None:
    """Print one line per run."""
    scores = {(row["run"], row["step"]): row for row in ask(buffer, SCORES)}
    costs = {row["run"]: row for row in ask(buffer, COSTS.format(goal=goal))}
    print(f"\n{'run':18} {'before':>16} {'after':>16} {'rollouts':>9} {f'to {goal:g}':>9} {'seconds':>8}")
    for run in runs:
        found = [scores[key] for key in sorted(scores) if key[0] == run]
        before, after = (f"{row['mean']:.3f} ± {row['standard_error']:.3f}" for row in (found[0], found[-1]))
        cost = costs[run]
        reached = "never" if cost["step"] is None else cost["rollouts_to_goal"]
        print(f"{run:18} {before:>16} {after:>16} {cost['rollouts']:>9} {reached:>9} {cost['seconds']:>8.1f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", default="./buffer", help="the buffer; ./buffer by default")
    parser.add_argument("--goal", type=float, default=0.7, help="validation score of the column of rollouts")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="setting of every run after the warm-ups"
    )
    options = parser.parse_args()
    buffer, common = options.buffer, options.settings
    for name, size in (("teacher", (128, 3)), ("student", (64, 2))):
        folder = Path("models") / name
        if not folder.is_dir():
            subprocess.run([sys.executable, SORT / "make_model.py", folder, *map(str, size)], check=True)
    here = f"model.path={Path('models').resolve()}"
    train(buffer, "teacher", SORT / "sft.yaml", f"{here}/teacher", CLEAN)
    train(buffer, "student", HERE / "student.yaml", f"{here}/student")
    start = f"model.path={checkpoint(buffer, 'student')}"
    teacher = checkpoint(buffer, "teacher")
    train(buffer, "distill", HERE / "distill.yaml", start, f"explorer.teacher.path={teacher}", *common)
    train(
        buffer,
        "distill-jsd",
        HERE / "distill.yaml",
        start,
        "explorer.teacher=null",
        f"algorithm={{name: jsd, group_size: 1, teacher: {teacher}}}",
        *common,
    )
    train(
        buffer,
        "grpo",
        HERE / "distill.yaml",
        start,
        "explorer.teacher=null",
        "algorithm={name: grpo, group_size: 8}",
        "trainer.batch_groups=16",
        *common,
    )
    train(buffer, "distill-offline", HERE / "offline.yaml", start, *common)
    show(buffer, ["distill", "distill-jsd", "grpo", "distill-offline"], options.goal)


if __name__ == "__main__":
    main()
