"""A run of ours: `rft run` as a process, read from its buffer."""

from __future__ import annotations

import time
from pathlib import Path
from statistics import median
from typing import Any

import rftdata
from benchmarks.harness.rft import command
from benchmarks.whole_runs.case import Sizes
from benchmarks.whole_runs.moments import step_seconds
from benchmarks.whole_runs.places import Place
from benchmarks.whole_runs.processes import last_lines, run_until
from rftcore.reporting.equal_score import to_target
from rftdata.errors import RftError
from rftdata.postgres.embedded import EmbeddedServer
from rftdata.reports.results import RunResults
from rftdata.reports.timeline import Timeline, timeline_of

_INTERRUPTED = 130
_STEPS = """SELECT trainer_step, extract(epoch FROM finished_at)::float8 AS at, wait_seconds, train_seconds, publish_seconds
    FROM rft.v_train_step WHERE run_id = %s ORDER BY trainer_step"""
_SAMPLED = """SELECT coalesce(sum(num_response_tokens), 0)::bigint AS num FROM rft.experience
    WHERE run_id = %s AND source = 'explorer' AND created_at <= (SELECT max(finished_at) FROM rft.v_train_step WHERE run_id = %s)"""
_FIRST_SAMPLE = """SELECT extract(epoch FROM min(span.started_at))::float8 AS at FROM rft.worker_span span JOIN rft.worker USING (worker_id)
    WHERE run_id = %s AND role = 'explorer' AND activity = 'sampling'"""
_PARTS = ("wait_seconds", "train_seconds", "publish_seconds")
_EVALUATIONS = """SELECT trainer_step, mean_reward, seconds, extract(epoch FROM finished_at)::float8 AS at
    FROM rft.evaluation WHERE run_id = %s AND status = 'done' ORDER BY trainer_step"""


def run(file: Path, asked: list[str], sizes: Sizes, folder: Path, place: Place) -> dict[str, Any]:
    """Train until the target, the last step or the limit.

    Returns:
        a row, see `comparison`, with `error` where nothing was measured.
    """
    location, log = folder / "buffer", folder / "rft.log"
    flags = [part for setting in asked for part in ("--set", setting)]
    started = time.time()
    row: dict[str, Any] = {"started": started}
    called = place.prefix + command("run", file, "--plain", "--buffer", location, *flags)
    try:
        ended, code = run_until(
            called, log, place.environment(), sizes.limit_s, lambda: _has_reached(location, sizes.target)
        )
        row = {"ended": ended, "started": started, "exit_code": code, "finished": time.time()}
        if code not in (0, _INTERRUPTED):
            return row | {"error": last_lines(log)}
        return row | _read(location, started)
    except RftError as error:
        return row | {"error": str(error)}
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
    with rftdata.open(str(location), create=False) as buffer:
        return figures(buffer, started)


def figures(buffer: rftdata.Buffer, started: float) -> dict[str, Any]:
    """Return what the run of a buffer did until the end of its last step; seconds count from the start of the process."""
    run = buffer.find_run()
    results = RunResults(run)
    steps = results.steps()
    if not steps.trained:
        return {"error": "no step was trained"}
    made = buffer.sql(_STEPS, [run.run_id]).to_pylist()
    trained = {row["trainer_step"]: row["at"] for row in made}
    evaluations = buffer.sql(_EVALUATIONS, [run.run_id]).to_pylist()
    end = max(trained.values())
    if not any(each["trainer_step"] == 0 for each in evaluations):
        return {"error": "the initial weights were not evaluated"}
    # The evaluation of the initial weights runs beside the first rollouts where the engine does not sleep.
    first = buffer.sql(_FIRST_SAMPLE, [run.run_id])["at"][0].as_py()
    if first is None:
        return {"error": "no explorer sampled"}
    ages = buffer.sql("SELECT avg(staleness)::float8 AS mean FROM rft.v_consumption WHERE run_id = %s", [run.run_id])
    sampled = buffer.sql(_SAMPLED, [run.run_id, run.run_id])
    return {
        "first_sample_s": first - started,
        "points": [
            {
                "step": each["trainer_step"],
                "seconds": trained.get(each["trainer_step"], first) - started,
                "score": each["mean_reward"],
            }
            for each in evaluations
            if each["trainer_step"] in (0, *trained)
        ],
        "steps": steps.trained,
        "seconds": end - first,
        "step_seconds": step_seconds(first, list(trained.values())),
        **{part: _spread([row[part] for row in made]) for part in _PARTS},
        "num_sampled": sampled["num"][0].as_py(),
        "num_trained": steps.num_tokens,
        "evaluation_s": sum(each["seconds"] for each in evaluations if each["trainer_step"] and each["at"] < end),
        "mean_staleness": ages["mean"][0].as_py(),
        "step_table": _table(timeline_of(run)),
    }


def _spread(values: list[float]) -> dict[str, float]:
    return {
        name: round(each, 4)
        for name, each in zip(("first", "median", "max"), (values[0], median(values), max(values)), strict=True)
    }


def _table(timeline: Timeline) -> list[dict[str, Any]]:
    """Return the rows of `rft report --timeline`."""
    return [
        {"role": role.role, "activity": each.activity, "for": each.detail}
        | {"seconds": round(each.seconds, 3), "seconds_per_step": round(each.seconds / max(1, timeline.num_steps), 4)}
        for role in timeline.roles
        for each in role.activities
    ]
