"""Rows of `rft bench weights`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.weights.case import Case

Line = dict[str, Any]


def medians(lines: Sequence[Line]) -> Line:
    """Return the median of every time over the transfers after the first."""
    names = ("seconds", "send_seconds", "trainer_seconds", "pause_seconds")
    found = {name: [line[name] for line in lines[1:] if line[name] is not None] for name in names}
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def row_of(case: Case, lines: Sequence[Line]) -> Line:
    """Return the row of a case. Figures are None where too few transfers ended, and where `complete` sets them."""
    setting = {name: value for name, value in asdict(case).items() if name not in ("threads", "on_gpu")}
    first = lines[0] if lines else {}
    middle = medians(lines)
    known = ("num_bytes", "num_tensors", "dtype", "backend", "backend_reason")
    return (
        setting
        | {name: first.get(name) for name in known}
        | {
            "first_seconds": first.get("seconds"),
            "first_join_seconds": first.get("join_seconds"),
            "first_pause_seconds": first.get("pause_seconds"),
            "seconds": middle["seconds"],
            "send_seconds": middle["send_seconds"],
            "trainer_seconds": middle["trainer_seconds"],
            "pause_seconds": middle["pause_seconds"],
            "transfer_seconds": None,
            "gb_per_s": None,
            "of_broadcast": None,
            "landing_seconds": None,
            "of_first": None,
            "hashes_agree": all(line["hashes_agree"] for line in lines) if lines else None,
            "probes_differ": lines[-1].get("probes_differ") if lines else None,
            "weights_agree": lines[-1].get("weights_agree") if lines else None,
            "transfers": list(lines),
        }
    )


def is_wrong(row: Line) -> bool:
    """Return whether a case failed, bytes changed on the way, or an engine does not compute with the weights."""
    checks = ["hashes_agree"] if row["receivers"] == "plain" else ["hashes_agree", "probes_differ", "weights_agree"]
    return row["status"] != "ok" or any(row[check] is not True for check in checks)


def complete(rows: Sequence[Line], limits: Sequence[Line]) -> None:
    """Set the figures that follow from other rows.

    They are the time of the transfer alone (measured by plain receivers), its ratio to the limit, the further time of engines, and the ratio to the
    first layout.
    """
    same = ("shape", "ranks", "engines", "tensor_parallel", "bucket_mib")
    plain = {tuple(row[name] for name in same): row["seconds"] for row in rows if row["receivers"] == "plain"}
    first: dict[tuple[str, str], float | None] = {}
    for row in rows:
        base = first.setdefault((row["shape"], row["receivers"]), row["seconds"])
        row["of_first"] = row["seconds"] / base if row["seconds"] and base else None
        seconds, limit = plain.get(tuple(row[name] for name in same)), limit_of(row, limits)
        if seconds is None or row["seconds"] is None:
            continue
        row["transfer_seconds"] = seconds
        row["gb_per_s"] = row["num_bytes"] / seconds / 1e9
        row["of_broadcast"] = row["gb_per_s"] / limit["broadcast_gb_per_s"] if limit else None
        if row["receivers"] == "engines":
            row["landing_seconds"] = row["seconds"] - seconds


def limit_of(row: Line, limits: Sequence[Line]) -> Line | None:
    """Return the limit that was measured with as many bytes and ranks."""
    num_ranks = 1 + row["engines"] * row["tensor_parallel"]
    return next((each for each in limits if (each["shape"], each["num_ranks"]) == (row["shape"], num_ranks)), None)
