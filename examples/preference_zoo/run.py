"""Train with DPO, IPO, KTO, ORPO and SimPO on one stored run, and compare them on the same questions.

    python examples/preference_zoo/run.py --buffer ./buffer

Prints every command before running it. Models are written to ./models. Runs that the buffer already has are used unchanged.
A method that fails has a line in the table, too.
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
# KTO learns from single responses that are right or wrong. It takes twice as many of them, so that a batch has as many responses.
UNPAIRED = "sampling.source={sql: \"select experience_id from rft.v_experience where run = 'rollouts'\"}"
METHODS: dict[str, list[str]] = {
    "dpo": ["algorithm={name: dpo}"],
    "ipo": ["algorithm={name: ipo}"],
    "kto": ["algorithm={name: kto, loss: {threshold: 0.5}}", UNPAIRED, "trainer.batch_groups=64"],
    "orpo": ["algorithm={name: orpo}"],
    "simpo": ["algorithm={name: simpo}"],
}
# Sampled test answers under the first weights and under the step that validation chose; the last step's own measures.
RESULTS = """
with test as (
    select run_id, trainer_step, avg(reward) as mean, stddev_samp(reward) / sqrt(count(*)) as standard_error
    from evaluation join evaluation_answer using (evaluation_id) where purpose = 'test' and decoding = 'sampled' group by 1, 2),
steps as (
    select run, sum(wait_seconds + train_seconds + publish_seconds) as seconds, max(trainer_step) as steps,
           (array_agg(metrics order by trainer_step desc))[1] as metrics
    from v_train_step group by 1)
select o.name as run, o.status::text as status, steps.steps, steps.seconds, steps.metrics ->> 'pair_margin' as margin,
       coalesce(steps.metrics ->> 'pair_accuracy', steps.metrics ->> 'kto_accuracy') as accuracy, before.mean as before,
       before.standard_error as before_error, after.trainer_step as best_step, after.mean as after, after.standard_error as after_error
from run o left join steps on steps.run = o.name left join test before on before.run_id = o.run_id and before.trainer_step = 0
     left join test after on after.run_id = o.run_id and after.trainer_step > 0
where o.name like 'zoo-%' order by o.run_id"""


def rft(*arguments: str, capture: bool = False, check: bool = True) -> str:
    """Run `rft …`, as a user would, after printing it; return its output with `capture`."""
    print(f"\n$ rft {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-c", "import sys; from rftcore.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, check=check, text=True, stdout=subprocess.PIPE if capture else None).stdout or ""


def ask(buffer: str, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    rows: list[dict[str, Any]] = json.loads(rft("sql", "--buffer", buffer, "--json", query, capture=True))
    return rows


def stored(buffer: str) -> set[str]:
    """Return the names of the runs that the buffer has."""
    if not (Path(buffer) / "postgres").is_dir():
        return set()
    return {row["name"] for row in ask(buffer, "select name from run")}


def train(buffer: str, run: str, config: Path, *settings: str, check: bool = True) -> None:
    """Run a configuration under a name, unless the buffer has that run."""
    if run not in stored(buffer):
        options = [part for setting in (f"run.name={run}", *settings) for part in ("--set", setting)]
        rft("run", str(config), "--buffer", buffer, "--plain", *options, check=check)


def warmed_up(buffer: str, model: Path) -> str:
    """Warm a random model up by imitation; return its checkpoint."""
    if not model.is_dir():
        subprocess.run([sys.executable, SORT / "make_model.py", model], check=True)
    train(
        buffer,
        "warm-up",
        SORT / "sft.yaml",
        f"model.path={model.resolve()}",
        "steps=150",
        "trainer.checkpoint_every=150",
    )
    query = (
        "select uri from checkpoint join run using (run_id) where name = 'warm-up' order by trainer_step desc limit 1"
    )
    return str(ask(buffer, query)[0]["uri"])


def show(rows: list[dict[str, Any]]) -> None:
    """Print one line per method."""
    print(
        f"\n{'method':8} {'before':>15} {'after':>15} {'best step':>10} {'margin':>8} {'accuracy':>9} {'seconds':>8}  status"
    )
    for row in rows:
        before, after = (
            "–" if row[key] is None else f"{row[key]:.3f} ± {row[f'{key}_error']:.3f}" for key in ("before", "after")
        )
        margin, accuracy = ("–" if row[key] is None else f"{float(row[key]):.3f}" for key in ("margin", "accuracy"))
        seconds = "–" if row["seconds"] is None else f"{row['seconds']:.1f}"
        best = "–" if row["best_step"] is None else f"{row['best_step']} of {row['steps']}"
        name = row["run"].removeprefix("zoo-")
        print(f"{name:8} {before:>15} {after:>15} {best:>10} {margin:>8} {accuracy:>9} {seconds:>8}  {row['status']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", default="./buffer", help="the buffer; ./buffer by default")
    parser.add_argument("--model", help="a warmed-up sorting model; by default one is trained first")
    parser.add_argument("--methods", nargs="+", choices=[*METHODS], default=[*METHODS], help="all by default")
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="setting of the runs of the methods"
    )
    options = parser.parse_args()
    buffer = options.buffer
    model = f"model.path={options.model or warmed_up(buffer, Path('models/start'))}"
    train(buffer, "rollouts", HERE / "rollouts.yaml", model)
    rft("pairs", "build", "rollouts", "--buffer", buffer)
    for method in options.methods:
        train(
            buffer, f"zoo-{method}", HERE / "preference.yaml", model, *METHODS[method], *options.settings, check=False
        )
    show(ask(buffer, RESULTS))


if __name__ == "__main__":
    main()
