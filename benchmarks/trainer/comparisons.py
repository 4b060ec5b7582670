"""Comparisons between the rows of `rft bench trainer`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.trainer.case import LADDER

Row = dict[str, Any]
_OURS, _PEERS = "ours", ("trl", "trl-liger")
SETTING = ("shape", "batch", "copies", "dtype", "checkpointing", "ranks")


def compare_first_steps(rows: Sequence[Row], tolerance: Mapping[str, float]) -> None:
    """Set `agrees` and the differences of every row for which a row of TRL, or else of ours on the fewest GPUs, has the same batch and weights.

    The difference of losses is absolute, or relative where the loss is above 1; that of gradient norms is relative. Rows compare by their first
    step, those of the ladder by every length.
    """
    known = [row for row in rows if row["step_records"]]
    in_order = sorted(known, key=lambda row: (("trl", _OURS, "trl-liger").index(row["system"]), row["ranks"]))
    for row in rows:
        reference = next((each for each in in_order if _same_weights(each, row)), None)
        if reference is None or row is reference or not row["step_records"]:
            continue
        pairs = list(zip(row["step_records"], reference["step_records"]))
        pairs = pairs if row["batch"] == LADDER else pairs[:1]
        row["loss_difference"] = max(abs(a["loss"] - b["loss"]) / max(1.0, abs(b["loss"])) for a, b in pairs)
        row["grad_norm_difference"] = max(abs(a["grad_norm"] - b["grad_norm"]) / b["grad_norm"] for a, b in pairs)
        allowed = tolerance[row["dtype"]]
        # NaN disagrees.
        row["agrees"] = row["loss_difference"] <= allowed and row["grad_norm_difference"] <= allowed


def _same_weights(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("shape", "batch", "dtype"))


def fastest(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """Return the fastest row of each system that fits in memory, by shape, batch, copies, dtype, checkpointing and number of GPUs."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok" and row["batch"] != LADDER and row["seconds"]:
            best = found.setdefault(tuple(row[name] for name in SETTING), {})
            if row["seconds"] < best.get(row["system"], row)["seconds"] or row["system"] not in best:
                best[row["system"]] = row
    return found


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare our fastest row with each peer's: ratios of tokens per second (above 1: ours is faster) and of memory (below 1: ours needs less)."""
    found = []
    for setting, best in fastest(rows).items():
        for peer in _PEERS:
            if _OURS in best and peer in best:
                ours, theirs = best[_OURS], best[peer]
                found.append(
                    dict(zip(SETTING, setting, strict=True))
                    | {
                        "peer": peer,
                        "speed_ratio": ours["tokens_per_second"] / theirs["tokens_per_second"],
                        "memory_ratio": ours["peak_gib"] / theirs["peak_gib"],
                        "our_micro_batch": ours["micro_batch"],
                        "their_micro_batch": theirs["micro_batch"],
                    }
                )
    return found


def scaling(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare our fastest row on each number of GPUs with the fewest: `speed_up` is the ratio of tokens per second, `efficiency` that per GPU."""
    ours = [best[_OURS] for best in fastest(rows).values() if _OURS in best]
    found = []
    for row in sorted(ours, key=lambda row: row["ranks"]):
        base = min((each for each in ours if _alike(each, row)), key=lambda each: each["ranks"])
        if base is row:
            continue
        speed_up = row["tokens_per_second"] / base["tokens_per_second"]
        found.append(
            {name: row[name] for name in (*SETTING, "micro_batch", "tokens_per_second", "mfu", "peak_gib")}
            | {"of_ranks": base["ranks"], "speed_up": speed_up, "efficiency": speed_up * base["ranks"] / row["ranks"]}
        )
    return found


def _alike(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in SETTING if name not in ("copies", "ranks"))


def longest(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the longest sequence of each system, and what ended the ladder; `ok` means that no longer one was tried."""
    names = ("shape", "dtype", "checkpointing", "ranks", "system", "num_tokens", "peak_gib", "status")
    return [{name: row[name] for name in names} for row in rows if row["batch"] == LADDER]
