"""Train with DPO on a run's stored experiences, corrected by SQL and built into pairs, and compare both on the same questions.

    python examples/dpo_from_stored/run.py --buffer ./buffer

Prints every command before running it. Without --buffer it works in ./buffer, where `make demo` leaves its run.
A missing GRPO run is created; an existing one is used unchanged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
# Mean and standard error over the questions of the test sets: the first weights of the GRPO run, its best, DPO's best.
RESULTS = """
select a.decoding, a.taskset, o.name as run, a.trainer_step as step, count(*) as questions, avg(reward) as mean,
       stddev_samp(reward) / sqrt(count(*)) as standard_error
from evaluation a join run o using (run_id) join evaluation_answer using (evaluation_id)
where a.purpose = 'test' and o.name in ('{grpo}', '{dpo}') group by 1, 2, 3, 4 order by 1, 2, o.name = '{dpo}', 4"""


def rft(*arguments: str, capture: bool = False) -> str:
    """Run `rft …`, as a user would, after printing it; return its output with `capture`."""
    print(f"\n$ rft {shlex.join(arguments)}", flush=True)
    command = [sys.executable, "-c", "import sys; from rftcore.cli import main; sys.exit(main())", *arguments]
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE if capture else None).stdout or ""


def run_name(config: Path) -> str:
    return str(yaml.safe_load(config.read_text(encoding="utf-8"))["run"]["name"])


def is_finished(buffer: str, run: str) -> bool:
    if not (Path(buffer) / "postgres").is_dir():
        return False
    return bool(ask(buffer, f"select run_id from run where name = '{run}' and status = 'finished'"))


def ask(buffer: str, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    rows: list[dict[str, Any]] = json.loads(rft("sql", "--buffer", buffer, "--json", query, capture=True))
    return rows


def show(rows: list[dict[str, Any]], dpo: str) -> None:
    """Print base, GRPO and DPO side by side. The initial weights are the same in both runs and are shown once."""
    print(f"\n{'test questions':28} {'model':12} {'mean reward':>20}")
    for row in rows:
        if row["step"] == 0 and row["run"] == dpo:
            continue
        model = "base" if row["step"] == 0 else "DPO" if row["run"] == dpo else "GRPO"
        title = f"{row['questions']} of {row['taskset']}, {row['decoding']}"
        print(f"{title:28} {model:12} {row['mean']:>10.3f} ± {row['standard_error']:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", default="./buffer", help="the buffer; ./buffer by default")
    parser.add_argument("--grpo", type=Path, default=HERE.parent / "grpo_reasoning" / "config.yaml")
    parser.add_argument("--dpo", type=Path, default=HERE / "dpo.yaml")
    parser.add_argument("--corrections", type=Path, default=HERE / "corrections.sql")
    parser.add_argument("--model", help="model.path of both runs, in place of the one in their files")
    parser.add_argument("--margin", default="0.5", help="smallest difference of rewards of a pair")
    options = parser.parse_args()
    buffer, grpo = options.buffer, run_name(options.grpo)
    model = ["--set", f"model.path={options.model}"] if options.model else []

    if not is_finished(buffer, grpo):
        rft("run", str(options.grpo), "--buffer", buffer, "--plain", *model)
    rft("sql", "--buffer", buffer, "--", options.corrections.read_text(encoding="utf-8"))
    rft("pairs", "build", grpo, "--buffer", buffer, "--margin", options.margin)
    rft("run", str(options.dpo), "--buffer", buffer, "--plain", *model)
    # A second call creates another run of the same name with a number.
    dpo = ask(buffer, "select name from run order by run_id desc limit 1")[0]["name"]
    rft("report", grpo, dpo, "--buffer", buffer)
    show(ask(buffer, RESULTS.format(grpo=grpo, dpo=dpo)), dpo)


if __name__ == "__main__":
    main()
