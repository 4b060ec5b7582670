"""Wall-clock time to the same held-out score: synchronous, one step off and asynchronous, on one, four or eight GPUs.

`rft run` trains one configuration once for each combination of layout, mode and seed. A layout is explorers + GPUs of the trainer; `2x2+4` are two
explorers of two GPUs each, and `1` is one GPU that explorer and trainer share. Runs differ in layout, mode and seed only:

    on_policy       every step waits for the answers of the newest weights
    one_step_off    explorers sample one step ahead
    asynchronous    explorers sample up to two steps ahead

The stale modes weigh tokens by truncated importance sampling on the recorded log-probabilities. A run ends when it has reached the target (two successive
evaluations whose mean is at least that), at its last step, or after `--run-seconds`. Rows that have ended are kept in `--folder` and not repeated. A row
is one run, read from its buffer (`rftcore.reporting.equal_score`), with

    wall_seconds            from the call of `rft run` to its end
    seconds_per_step        seconds since the first sample / steps
    sampled_per_second      tokens that were sampled / seconds
    backends                number of weight transfers into the engines, by their way

The summary has the median of seconds to the target over the seeds; `of_on_policy` and `of_first` are the ratios of the fastest `on_policy` layout with as
many GPUs, and of the first layout in the same mode, to it. Without GPUs the layouts are processes on the CPU, which shows nothing about GPUs.

The exit code is 1 where a run failed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import signal
import statistics
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.arguments import argument_parser, integers, kept_folder, names, positive
from benchmarks.harness.layout import Layout, layouts, too_few_gpus
from benchmarks.harness.processes import append_line, read_lines
from benchmarks.harness.report import ROOT, say, write
from benchmarks.harness.rft import command, environment
from rftcore.config.run import load_config
from rftcore.reporting.equal_score import measured, to_target
from rftcore.run.gpus import local_gpus
from rftdata.errors import RftError
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.reports.results import RunResults

_CONFIG = ROOT / "examples" / "grpo_reasoning" / "gpu.yaml"
STEPS_AHEAD = {"on_policy": 0, "one_step_off": 1, "asynchronous": 2}
_CORRECTION = "{name: truncate, high: 2.0}"
_POLL_S = 2.0
_STOP_S = 90.0
_INTERRUPTED = 130

Row = dict[str, Any]


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    num_gpus = len(local_gpus())
    with kept_folder(options) as folder:
        file = folder / "rows.jsonl"
        rows = read_lines(file)
        not_run: list[Row] = []
        for seed, layout, mode in itertools.product(options.seeds, options.layouts, options.modes):
            asked = {"layout": str(layout), "mode": mode, "seed": seed}
            if any(asked.items() <= row.items() for row in rows):
                continue
            if num_gpus and (reason := too_few_gpus(layout.num_gpus, num_gpus)) is not None:
                not_run.append(asked | {"reason": reason})
                continue
            row = asked | {"num_gpus": layout.num_gpus} | _run(options, layout, mode, seed, folder)
            rows.append(row)
            append_line(file, row)
            say(json.dumps({name: row[name] for name in (*asked, "status", "to_target")}))
    write(options, {"rows": rows, "not_run": not_run, "summary": summary(rows)})
    return int(any(row["status"] == "failed" for row in rows))


def settings(config: Path, layout: Layout, mode: str, seed: int) -> list[str]:
    """Return the settings in which a run differs from the configuration."""
    batch = load_config(config).trainer.batch_groups
    ahead = STEPS_AHEAD[mode]
    found = [
        f"run.name={mode}-{layout}-{seed}".replace("+", "-"),
        f"run.seed={seed}",
        f"explorer.num_explorers={layout.engines}",
        # Each explorer claims half of its share at a time, so that the last groups of a step are divided too.
        f"explorer.claim_groups={max(1, batch // (2 * layout.engines))}",
        "sync.interval=1",
        f"sync.offset={ahead}",
        f"sampling.max_staleness={ahead}",
        # The comparison does not need what a run would do at its end.
        "eval.test=[]",
        "monitor=[]",
    ]
    if not layout.shares:
        found += [f"explorer.tensor_parallel_size={layout.tensor_parallel}", f"trainer.num_gpus={layout.ranks}"]
    return [*found, f"algorithm.correction={_CORRECTION}"] if ahead else found


def _run(options: argparse.Namespace, layout: Layout, mode: str, seed: int, folder: Path) -> Row:
    """Train until the target, the last step or the end of the time; return the result."""
    asked = [*settings(options.config, layout, mode, seed), *options.set]
    name = asked[0].removeprefix("run.name=")
    location, log = folder / name, folder / f"{name}.log"
    flags = [part for setting in asked for part in ("--set", setting)]
    run = command("run", options.config, "--plain", "--buffer", location, *flags)
    started = time.monotonic()
    try:
        with log.open("ab") as output:
            process = subprocess.Popen(run, stdout=output, stderr=subprocess.STDOUT, env=environment())
            ended = _watch(process, location, started + options.run_seconds, options.target)
        wall_seconds = time.monotonic() - started
        failed = process.returncode not in (0, _INTERRUPTED)
        found = None if failed else _read(location, options.target)
        if failed:
            say(log.read_text(errors="replace")[-3000:])
    finally:
        EmbeddedServer(location).stop()
    status = "failed" if failed else ended
    return {
        "status": status,
        "exit_code": process.returncode,
        "wall_seconds": round(wall_seconds, 1),
        "to_target": None,
        **(found or {}),
    }


def _watch(process: subprocess.Popen[bytes], location: Path, deadline: float, target: float) -> str:
    """Wait for the end of a run, or end it at its target or deadline; return how it ended."""
    ended = "trained"
    while process.poll() is None and ended == "trained":
        time.sleep(_POLL_S)
        if time.monotonic() > deadline:
            ended = "out of time"
        elif _has_reached(location, target):
            ended = "reached"
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return ended


def _has_reached(location: Path, target: float) -> bool:
    try:
        with rftdata.open(str(location), create=False, schema="check", patience_s=1.0) as buffer:
            evaluations = RunResults(buffer.find_run()).evaluations()
    except RftError:  # the buffer does not exist yet
        return False
    return to_target([{"step": 0, "seconds": 0.0, "score": each.mean} for each in evaluations], target) is not None


def _read(location: Path, target: float) -> Row | None:
    """Return the figures of the run in a buffer, None where it has not trained a step."""
    with rftdata.open(str(location)) as buffer:
        run = buffer.find_run()
        steps = RunResults(run).steps().trained
        if not steps:
            return None
        found = measured(buffer, run, target)
        query = "SELECT coalesce(backend, 'file') AS backend, count(*) AS num FROM rft.weight_transfer WHERE run_id = %s GROUP BY 1"
        backends = {row["backend"]: row["num"] for row in buffer.sql(query, [run.run_id]).to_pylist()}
    return found | {
        "steps": steps,
        "seconds_per_step": found["seconds"] / steps,
        "sampled_per_second": found["sampled_tokens"] / found["seconds"],
        "backends": backends,
    }


def summary(rows: Sequence[Row]) -> list[Row]:
    """Return a row for each layout and mode: the median of seconds to the target, None where a seed did not reach it, and ratios."""
    by_kind: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        by_kind.setdefault((row["layout"], row["mode"]), []).append(row)
    seconds = {kind: _median_to_target(runs) for kind, runs in by_kind.items()}
    found = []
    for (layout, mode), runs in by_kind.items():
        num_gpus, own = runs[0]["num_gpus"], seconds[layout, mode]
        synchronous = [
            known
            for kind, known in seconds.items()
            if kind[1] == "on_policy" and by_kind[kind][0]["num_gpus"] == num_gpus and known is not None
        ]
        first = next((known for kind, known in seconds.items() if kind[1] == mode), None)
        found.append(
            {
                "layout": layout,
                "num_gpus": num_gpus,
                "mode": mode,
                "runs": len(runs),
                "seconds_to_target": own,
                "of_on_policy": min(synchronous) / own if synchronous and own else None,
                "of_first": first / own if first and own else None,
            }
        )
    return found


def _median_to_target(runs: Sequence[Row]) -> float | None:
    reached = [run["to_target"]["seconds"] for run in runs if run["to_target"]]
    return statistics.median(reached) if len(reached) == len(runs) else None


def _places(text: str) -> tuple[Layout, ...]:
    return tuple(Layout(1, 1, 1, shares=True) if each == "1" else layouts(each)[0] for each in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argument_parser("modes", __doc__)
    parser.add_argument(
        "--config", type=Path, default=_CONFIG, help="of the runs, by default examples/grpo_reasoning/gpu.yaml"
    )
    parser.add_argument("--layouts", type=_places, default="1,1+1,3+1,6+2", help="explorers+GPUs of the trainer")
    parser.add_argument("--modes", type=names(*STEPS_AHEAD), default=[*STEPS_AHEAD])
    parser.add_argument("--seeds", type=integers(0), default=(1,), help="separated by commas")
    parser.add_argument("--target", type=positive, required=True, help="held-out score at which runs are compared")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="further settings of all runs")
    parser.add_argument("--run-seconds", type=positive, default=3600.0, help="seconds after which a run is interrupted")
    return parser
