"""A run of ours: `rft run` as a process, read from its buffer."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import rftdata
from benchmarks.harness.rft import command
from benchmarks.whole_runs.case import Sizes
from benchmarks.whole_runs.processes import last_lines, run_until
from benchmarks.whole_runs.timeline import step_table
from rftcore.reporting.equal_score import measured, to_target
from rftdata.errors import RftError
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.reports.results import RunResults

_INTERRUPTED = 130


def run(file: Path, asked: list[str], sizes: Sizes, folder: Path, environment: Mapping[str, str]) -> dict[str, Any]:
    """Train until the target, the last step or the limit.

    Returns:
        a row, see `comparison`, with `error` where nothing was measured.
    """
    location, log = folder / "buffer", folder / "rft.log"
    flags = [part for setting in asked for part in ("--set", setting)]
    started = time.time()
    called = command("run", file, "--plain", "--buffer", location, *flags)
    try:
        ended, code = run_until(called, log, environment, sizes.limit_s, lambda: _has_reached(location, sizes.target))
        row = {"ended": ended, "started": started, "exit_code": code, "finished": time.time()}
        if code not in (0, _INTERRUPTED):
            return row | {"error": last_lines(log)}
        return row | _read(location, started)
    finally:
        EmbeddedServer(location).stop()


def _has_reached(location: Path, target: float | None) -> bool:
    if target is None:
        return False
    try:
        with rftdata.open(str(location), create=False, schema="check", patience_s=1.0) as buffer:
            evaluations = RunResults(buffer.find_run()).evaluations()
    except RftError:  # the buffer does not exist yet
        return False
    points = [{"step": each.trainer_step, "seconds": 0.0, "score": each.mean} for each in evaluations]
    return to_target(points, target) is not None


def _read(location: Path, started: float) -> dict[str, Any]:
    """Return the figures of the run in a buffer; seconds count from the start of the process."""
    with rftdata.open(str(location)) as buffer:
        run = buffer.find_run()
        results = RunResults(run)
        if not results.steps().trained:
            return {"error": "no step was trained"}
        spans = results.spans()
        found = measured(buffer, run, 0.0)
        first = min(span.started for span in spans if span.activity == "sampling")
        points = [{**point, "seconds": point["seconds"] + first - started} for point in found["points"]]
        # The initial weights are there before the first sample.
        points = [{**point, "seconds": first - started} if point["step"] == 0 else point for point in points]
        return {
            "first_sample_s": first - started,
            "points": points,
            "steps": results.steps().trained,
            "seconds": found["seconds"],
            "num_sampled": found["sampled_tokens"],
            "num_trained": results.steps().num_tokens,
            "evaluation_s": sum(span.ended - span.started for span in spans if span.activity == "evaluating"),
            "mean_staleness": found["mean_staleness"],
            "step_table": step_table(spans, results.steps().trained, first, first + found["seconds"]),
        }
