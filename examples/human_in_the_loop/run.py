"""GRPO while a person corrects rewards, the person's edits and comparisons, pairs from them, DPO, and all three models on the same held-out questions.

    python examples/human_in_the_loop/run.py --buffer ./buffer

Prints every command before running it. The person is a script (expert.py) that works through the pages of the studio. Without --model, a random
model is warmed up by imitation first. Runs that the buffer already has are used unchanged.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import expert
from studio_pages import StudioPages

HERE = Path(__file__).resolve().parent
SORT = HERE.parent / "sort_from_scratch"
GRPO, DPO = "loop-grpo", "loop-dpo"
ADDRESS = "the studio is at "
# What the person is asked about, the newest first: wrong answers, and groups whose answers differ.
TO_EDIT = """
select experience_id from rft.v_experience where run = '{run}' and reward = 0 order by experience_id desc limit {count}"""
TO_RANK = """
select group_id from rft.v_experience where run = '{run}' group by group_id having count(distinct response) > 1
order by group_id desc limit {count}"""
# The first weights of GRPO are the base. DPO begins with GRPO's last weights, whose answers are those of GRPO.
RESULTS = """
select decoding, case when trainer_step > 0 then right(name, -5) when name = '{grpo}' then 'base' end as model, count(*) as questions,
       avg(reward) as mean, stddev_samp(reward) / sqrt(count(*)) as standard_error
from evaluation join run using (run_id) join evaluation_answer using (evaluation_id)
where purpose = 'test' and name in ('{grpo}', '{dpo}') and (trainer_step > 0 or name = '{grpo}')
group by decoding, name, trainer_step order by decoding desc, name desc, trainer_step"""


def command(*arguments: str) -> list[str]:
    """Print `rft …` and return the command that runs it."""
    print(f"\n$ rft {shlex.join(arguments)}", flush=True)
    return [sys.executable, "-m", "rftcore", *arguments]


def rft(*arguments: str) -> None:
    """Run `rft …` as a user would."""
    subprocess.run(command(*arguments), check=True)


def ask(buffer: str, query: str) -> list[dict[str, Any]]:
    """Return the rows of a query."""
    answer = subprocess.run(
        [sys.executable, "-m", "rftcore", "sql", "--buffer", buffer, "--json", query],
        check=True,
        text=True,
        stdout=subprocess.PIPE,
    )
    rows: list[dict[str, Any]] = json.loads(answer.stdout)
    return rows


def stored(buffer: str) -> set[str]:
    """Return the names of the runs that the buffer has."""
    if not (Path(buffer) / "postgres").is_dir():
        return set()
    return {row["name"] for row in ask(buffer, "select name from run")}


def last_weights(buffer: str, run: str) -> str:
    """Return the last checkpoint of a run."""
    query = (
        f"select uri from checkpoint join run using (run_id) where name = '{run}' order by trainer_step desc limit 1"
    )
    return str(ask(buffer, query)[0]["uri"])


def options(buffer: str, *settings: str) -> list[str]:
    return ["--buffer", buffer, "--plain", *(part for setting in settings for part in ("--set", setting))]


def warmed_up(buffer: str, seed: int) -> str:
    """Warm a random model up by imitation; return its checkpoint."""
    model = Path("models") / f"start-{seed}"
    if not model.is_dir():
        subprocess.run([sys.executable, SORT / "make_model.py", model, "128", "3", str(seed)], check=True)
    if "warm-up" not in stored(buffer):
        settings = ("run.name=warm-up", f"run.seed={seed}", f"model.path={model.resolve()}", "steps=150")
        rft("run", str(SORT / "sft.yaml"), *options(buffer, *settings, "trainer.checkpoint_every=150"))
    return last_weights(buffer, "warm-up")


@contextmanager
def watched(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield the running `rft …` and the address of its studio; print what it prints."""
    process = subprocess.Popen(
        command(*arguments), text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    address = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        address = line.partition(ADDRESS)[2].strip()
        if address:
            break
    else:
        raise SystemExit(f"rft {arguments[0]} has ended without a studio")
    rest = Thread(target=lambda lines: [print(line, end="", flush=True) for line in lines], args=(process.stdout,))
    rest.start()
    try:
        yield process, address
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait()
        rest.join()


def grpo(buffer: str, *settings: str) -> None:
    """Train with GRPO; meanwhile the person answers reviews."""
    with watched("run", str(HERE / "grpo.yaml"), "--studio", *options(buffer, *settings)) as (process, address):
        with StudioPages(address) as pages:
            counts = expert.review(pages, lambda: process.poll() is not None)
        if process.wait() != 0:
            raise SystemExit(f"rft run has ended with {process.returncode}")
    print(f"\nthe person: {counts['corrected']} rewards corrected, {counts['kept']} kept, while the run trained")


def label(buffer: str, count: int) -> None:
    """Ask the person about edits and comparisons, who answers them in the studio."""
    rft("label", "ask", "better", TO_EDIT.format(run=GRPO, count=count), "--buffer", buffer)
    rft("label", "ask", "order", TO_RANK.format(run=GRPO, count=count), "--buffer", buffer)
    with watched("studio", "--buffer", buffer) as (_, address), StudioPages(address) as pages:
        num_edits, num_rankings = expert.edit(pages, "better"), expert.rank(pages, "order")
    print(f"\nthe person: {num_edits} answers edited, {num_rankings} groups ranked")


def show(rows: list[dict[str, Any]]) -> None:
    """Print the models side by side."""
    print(f"\n{'held-out questions':24}" + "".join(f"{name:>18}" for name in ("base", "GRPO", "DPO")))
    for decoding in dict.fromkeys(row["decoding"] for row in rows):
        of_model = {row["model"]: row for row in rows if row["decoding"] == decoding}
        cells = [f"{row['mean']:.3f} ± {row['standard_error']:.3f}" for row in of_model.values()]
        print(f"{of_model['base']['questions']}, {decoding:19}" + "".join(f"{cell:>18}" for cell in cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--buffer", default="./buffer", help="the buffer; ./buffer by default")
    parser.add_argument("--model", help="a warmed-up sorting model; by default one is trained first")
    parser.add_argument("--seed", type=int, default=1, help="of all runs")
    parser.add_argument(
        "--labels",
        type=int,
        default=300,
        help="most answers that the person edits, and most groups that the person ranks",
    )
    parser.add_argument(
        "--set", dest="settings", action="append", default=[], help="setting of GRPO and DPO; may be repeated"
    )
    chosen = parser.parse_args()
    buffer, seed = chosen.buffer, f"run.seed={chosen.seed}"
    model = chosen.model or warmed_up(buffer, chosen.seed)
    if GRPO not in stored(buffer):
        grpo(buffer, seed, f"model.path={model}", *chosen.settings)
    label(buffer, chosen.labels)
    rft("label", "edits", GRPO, "--buffer", buffer)
    rft("pairs", "labels", GRPO, "--include-dropped", "--buffer", buffer)
    rft(
        "run",
        str(HERE / "dpo.yaml"),
        *options(buffer, seed, f"model.path={last_weights(buffer, GRPO)}", *chosen.settings),
    )
    rft("report", GRPO, DPO, "--buffer", buffer)
    show(ask(buffer, RESULTS.format(grpo=GRPO, dpo=DPO)))


if __name__ == "__main__":
    main()
