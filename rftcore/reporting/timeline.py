"""The timeline of a run: what each process did when, as an image or as a trace that chrome://tracing and Perfetto open."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from rftcore.reporting.files import new_figure, write_whole
from rftdata.errors import QueryError
from rftdata.reports.results import WorkerSpan

_ROLES = ("explorer", "pipeline", "trainer")
_COLOURS = {
    "training": "#1b6ca8",
    "sampling": "#2a9d6f",
    "deciding": "#8f5bb5",
    "evaluating": "#b5cf6b",
    "drawing": "#7fb3d5",
    "compiling": "#5b7f95",
    "publishing": "#c8553d",
    "transferring": "#e08e45",
    "checkpointing": "#b8860b",
    "recording": "#d4b483",
    "checking": "#5fa8d3",
    "replaying": "#6d597a",
    "starting": "#a8a29e",
    "working": "#555555",
    "asleep": "#c9d6e8",
    "waiting": "#ececec",
}


def write_timeline(run: str, spans: Sequence[WorkerSpan], path: Path) -> None:
    """Write the timeline of a run.

    Args:
        run: its name.
        spans: by worker and in order.
        path: `.json` for a trace in the Trace Event Format, else an image, whose suffix is its format.

    Raises:
        QueryError: the run has no spans, the format is unknown, or the file cannot be written.
    """
    if not spans:
        raise QueryError(
            f"the run {run!r} has no timeline", todo="start it; the first rows come with the first heartbeats"
        )
    if path.suffix.lower() == ".json":
        _write_trace(run, spans, path)
    else:
        _write_image(run, spans, path)


def _lanes(spans: Sequence[WorkerSpan]) -> dict[str, list[WorkerSpan]]:
    """Return the spans of each worker, by its name, in the order in which a row passes the roles."""
    workers = [list(group) for _, group in groupby(spans, key=lambda span: span.worker_id)]
    workers.sort(key=lambda lane: _ROLES.index(lane[0].role) if lane[0].role in _ROLES else len(_ROLES))
    return {f"{lane[0].role} {lane[0].worker_id}": lane for lane in workers}


def _write_image(run: str, spans: Sequence[WorkerSpan], path: Path) -> None:
    from matplotlib.patches import Patch

    lanes = _lanes(spans)
    figure = new_figure(path, width=11, height=1.2 + 0.32 * len(lanes))
    axes = figure.add_subplot()
    start, end = min(span.started for span in spans), max(span.ended for span in spans)
    for row, lane in enumerate(lanes.values()):
        for activity in {span.activity for span in lane}:
            times = [(s.started - start, s.ended - s.started) for s in lane if s.activity == activity]
            axes.broken_barh(times, (row - 0.38, 0.76), facecolors=_COLOURS.get(activity, "#555555"), linewidth=0)
        axes.text(1.008 * (end - start), row, f"waits {100 * _waiting(lane):.0f} %", fontsize=8, va="center")
    axes.set_yticks(range(len(lanes)), list(lanes), fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.invert_yaxis()
    axes.set_xlim(0, end - start)
    axes.set_xlabel("seconds", fontsize=8)
    axes.tick_params(axis="x", labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.set_title(f"{run}: what each process did", fontsize=10, loc="left")
    seen = {span.activity for span in spans}
    patches = [Patch(color=colour, label=activity) for activity, colour in _COLOURS.items() if activity in seen]
    figure.legend(handles=patches, fontsize=8, frameon=False, ncols=len(patches), loc="outside lower center")
    write_whole(path, "image", figure.savefig)


def _waiting(lane: Sequence[WorkerSpan]) -> float:
    """Return the share of waiting in a worker's time."""
    total = sum(span.ended - span.started for span in lane)
    return sum(span.ended - span.started for span in lane if span.activity == "waiting") / total if total else 0.0


def _write_trace(run: str, spans: Sequence[WorkerSpan], path: Path) -> None:
    """Return the trace in the Trace Event Format: complete events ("X") in microseconds; a process for each machine, a thread for each worker."""
    start = min(span.started for span in spans)
    hosts = {host: number for number, host in enumerate(dict.fromkeys(span.host for span in spans), start=1)}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": number, "args": {"name": host}} for host, number in hosts.items()
    ]
    for name, lane in _lanes(spans).items():
        place = {"pid": hosts[lane[0].host], "tid": lane[0].worker_id}
        events.append({"ph": "M", "name": "thread_name", **place, "args": {"name": f"{name} (process {lane[0].pid})"}})
        for span in lane:
            events.append(
                {
                    "ph": "X",
                    "name": span.activity,
                    "cat": span.role,
                    **place,
                    "ts": round(1e6 * (span.started - start)),
                    "dur": round(1e6 * (span.ended - span.started)),
                    "args": {} if span.detail is None else {"for": span.detail},
                }
            )
    trace = {"displayTimeUnit": "ms", "otherData": {"run": run}, "traceEvents": events}
    write_whole(path, "trace", lambda draft: draft.write_text(json.dumps(trace)))
