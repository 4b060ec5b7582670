"""The rows of `rft bench weights`, and as text."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.trainer_table import aligned
from benchmarks.weights_case import Case

Line = dict[str, Any]


def medians(lines: Sequence[Line]) -> Line:
    """The median of every time over the transfers after the first."""
    names = ("seconds", "send_seconds", "trainer_seconds", "pause_seconds")
    found = {name: [line[name] for line in lines[1:] if line[name] is not None] for name in names}
    return {name: statistics.median(values) if values else None for name, values in found.items()}


def row_of(case: Case, lines: Sequence[Line]) -> Line:
    """The row of a case; figures are None where too few transfers ended, and where `complete` sets them."""
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
    """Whether a case failed, other bytes arrived than were sent, or an engine does not compute with them."""
    checks = ["hashes_agree"] if row["receivers"] == "plain" else ["hashes_agree", "probes_differ", "weights_agree"]
    return row["status"] != "ok" or any(row[check] is not True for check in checks)


def complete(rows: Sequence[Line], limits: Sequence[Line]) -> None:
    """Set what follows from other rows.

    These are the time of the transfer alone, which plain receivers show, its ratio to the limit, what engines take beyond it, and the ratio to the
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
    """The limit that was measured with as many bytes and ranks."""
    num_ranks = 1 + row["engines"] * row["tensor_parallel"]
    return next((each for each in limits if (each["shape"], each["num_ranks"]) == (row["shape"], num_ranks)), None)


def cells(row: Line) -> tuple[str, ...]:
    """A row of the table."""
    end = "" if row["status"] == "ok" else f"{row['status']}: {row['error']}"[:120]
    if row["hashes_agree"] is False:
        end += " HASHES DIFFER"
    if row["weights_agree"] is False:
        end += " THE ENGINES COMPUTE WITH OTHER WEIGHTS"
    if row["probes_differ"] is False:
        end += " THE ENGINES ANSWER THE SAME WITH WEIGHTS OF ZEROS"
    return (
        *_setting(row),
        _number(row["num_bytes"], 1e-9, ".2f"),
        row["backend"] or "",
        _number(row["first_seconds"], 1e3, ",.1f"),
        _number(row["seconds"], 1e3, ",.1f"),
        _number(row["transfer_seconds"], 1e3, ",.1f"),
        _number(row["gb_per_s"], 1, ".2f"),
        _number(row["of_broadcast"], 1, ".2f"),
        _number(row["landing_seconds"], 1e3, ",.1f"),
        _number(row["first_pause_seconds"], 1e3, ",.1f"),
        _number(row["pause_seconds"], 1e3, ",.1f"),
        _number(row["of_first"], 1, ".2f"),
        end,
    )


def text(result: Line) -> str:
    """The whole result as tables."""
    heads = (
        "shape",
        "ranks",
        "engines",
        "TP",
        "receivers",
        "GB",
        "by",
        "first ms",
        "all ms",
        "transfer ms",
        "GB/s",
        "of limit",
        "landing ms",
        "first pause",
        "pause ms",
        "of first",
        "",
    )
    limits = [("shape", "GB", "processes", "by", "copy GB/s", "broadcast GB/s")]
    for each in result["limits"]:
        copy = f"{each['copy']} {_number(each['copy_gb_per_s'], 1, '.2f')}" if each["copy"] else "–"
        broadcast = _number(each["broadcast_gb_per_s"], 1, ".2f")
        limits.append(
            (each["shape"], f"{each['num_bytes'] / 1e9:.2f}", str(each["num_ranks"]), each["backend"], copy, broadcast)
        )
    tables = [aligned([heads, *map(cells, result["rows"])]), aligned(limits)]
    if result["not_run"]:
        skipped = [(*_setting(each), each["reason"]) for each in result["not_run"]]
        tables.append(aligned([("not run", "ranks", "engines", "TP", "receivers", "because"), *skipped]))
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    return "\n\n".join([f"{result['device']['name']}; {versions}", *tables])


def _setting(row: Line) -> tuple[str, ...]:
    return row["shape"], *(str(row[name]) for name in ("ranks", "engines", "tensor_parallel")), row["receivers"]


def _number(value: float | None, factor: float, form: str) -> str:
    return "–" if value is None else format(value * factor, form)
