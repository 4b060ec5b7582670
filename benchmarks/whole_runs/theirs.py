"""A run of TRL as a process, read from its events."""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import read_lines
from benchmarks.whole_runs.case import Sizes
from benchmarks.whole_runs.moments import step_seconds
from benchmarks.whole_runs.places import Place
from benchmarks.whole_runs.processes import last_lines, run_until
from benchmarks.whole_runs.server import ServerFailedError, vllm_server


def run(case: dict[str, Any], sizes: Sizes, folder: Path, place: Place) -> dict[str, Any]:
    """Train until the target, the last step or the limit.

    Returns:
        a row, see `comparison`, with `error` where nothing was measured.
    """
    started = time.time()
    if case["generation"] != "server":
        return _run(case, sizes, folder, place, started)
    try:
        with vllm_server(case, folder / "server.log", place.environment(), sizes.limit_s) as address:
            return _run({**case, "server": address}, sizes, folder, place, started)
    except ServerFailedError as error:
        text = f"{error}:\n{last_lines(folder / 'server.log')}"
        return {"ended": "ended", "started": started, "exit_code": None, "finished": time.time(), "error": text}


def _run(case: dict[str, Any], sizes: Sizes, folder: Path, place: Place, started: float) -> dict[str, Any]:
    file, events, log = folder / "case.json", folder / "events.jsonl", folder / "trl.log"
    file.write_text(json.dumps(case, default=str))
    called = [*place.prefix, sys.executable, "-m", "benchmarks.whole_runs.trl_program", str(file), str(events)]
    limit_s = max(1.0, sizes.limit_s - (time.time() - started))

    def has_ended() -> bool:  # a program whose engine does not end must not take the whole limit
        return events.exists() and '"event": "end"' in events.read_text()

    variables = place.environment(TRL_EXPERIMENTAL_SILENCE="1")
    ended, code = run_until(called, log, variables, limit_s, has_ended)
    found = read_lines(events)
    steps = [event for event in found if event["event"] == "step"]
    row = {"ended": ended, "started": started, "exit_code": code, "finished": time.time()}
    if not steps or (code and ended == "ended"):  # otherwise the code is that of the interruption
        return row | {"error": last_lines(log)}
    if ended == "reached" and steps[-1]["step"] == sizes.steps:
        row["ended"] = "ended"
    return row | _figures(found, steps, started)


def _figures(found: list[dict[str, Any]], steps: list[dict[str, Any]], started: float) -> dict[str, Any]:
    first = next(event["at"] for event in found if event["event"] == "first sampling")
    evaluations = [event for event in found if event["event"] == "evaluation"]
    during = [event for event in evaluations if event["step"] and event["at"] <= steps[-1]["at"]]
    seconds = steps[-1]["at"] - first
    parts: defaultdict[str, float] = defaultdict(float)
    for event in steps:
        for part, amount in event["seconds"].items():
            parts[part] += amount
    within = parts.pop("sampling and scoring", 0.0)
    evaluating = sum(event["took"] for event in during)
    parts["scoring"] = max(0.0, within - sum(parts.values()))
    parts["evaluating"] = evaluating
    parts["training"] = seconds - within - evaluating
    return {
        "first_sample_s": first - started,
        "points": [
            {
                "step": event["step"],
                "seconds": (event["trained_at"] if event["step"] else first) - started,
                "score": event["score"],
            }
            for event in evaluations
        ],
        "steps": len(steps),
        "seconds": seconds,
        "step_seconds": step_seconds(first, [event["at"] for event in steps]),
        "num_sampled": steps[-1]["num_sampled"],
        "num_trained": steps[-1]["num_trained"],
        "evaluation_s": evaluating,
        "step_table": [
            {"role": "trl", "activity": part, "for": None}
            | {"seconds": round(amount, 3), "seconds_per_step": round(amount / len(steps), 4)}
            for part, amount in sorted(parts.items(), key=lambda each: -each[1])
        ],
    }
