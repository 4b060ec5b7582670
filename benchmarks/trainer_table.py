"""The rows of `rft bench trainer` compared with each other, and as text."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from benchmarks.trainer_steps import LADDER

Row = dict[str, Any]
_OURS, _PEERS = "ours", ("trl", "trl-liger")
SETTING = ("shape", "batch", "copies", "dtype", "checkpointing", "ranks")


def compare_first_steps(rows: Sequence[Row], tolerance: Mapping[str, float]) -> None:
    """Set `agrees` and the differences of every row whose batch and weights another has taken a step with: TRL, else we on the fewest GPUs.

    The difference of losses is absolute, or relative where the loss is above 1; that of gradient norms is relative. Of the ladder
    every length is compared.
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
        # Written so that NaN disagrees.
        row["agrees"] = row["loss_difference"] <= allowed and row["grad_norm_difference"] <= allowed


def _same_weights(one: Row, other: Row) -> bool:
    return all(one[name] == other[name] for name in ("shape", "batch", "dtype"))


def fastest(rows: Sequence[Row]) -> dict[tuple[Any, ...], dict[str, Row]]:
    """The fastest row that fits of each system, by shape, batch, copies of it, dtype, checkpointing and number of GPUs."""
    found: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["status"] == "ok" and row["batch"] != LADDER and row["seconds"]:
            best = found.setdefault(tuple(row[name] for name in SETTING), {})
            if row["seconds"] < best.get(row["system"], row)["seconds"] or row["system"] not in best:
                best[row["system"]] = row
    return found


def comparisons(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Our fastest against each peer's: ratios of tokens per second (above 1: ours is faster) and of memory (below 1: ours takes less)."""
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
    """Our fastest on each number of GPUs against the fewest: `speed_up` is the ratio of tokens per second, `efficiency` that per GPU."""
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
    """The longest sequence of each system, and what ended the ladder; `ok` means that a longer one was not tried."""
    names = ("shape", "dtype", "checkpointing", "ranks", "system", "num_tokens", "peak_gib", "status")
    return [{name: row[name] for name in names} for row in rows if row["batch"] == LADDER]


def say(row: Row) -> None:
    """Report a row on stderr as soon as it is known."""
    print(" ".join(_cells(row)), file=sys.stderr, flush=True)


def text(result: dict[str, Any]) -> str:
    """The whole result as tables."""
    figures = ["s", "tok/s", "MFU", "computed", "GiB", "loss", "grad norm", ""]
    heads = ["shape", "batch", "type", "recompute", "GPUs", "system", "micro", *figures]
    tables = [aligned([heads, *(_cells(row) for row in result["rows"])])]
    if result["comparisons"]:
        cells = [("shape", "batch", "type", "recompute", "GPUs", "ours against", "speed", "memory")]
        for each in result["comparisons"]:
            cells.append(
                (*_setting(each), each["peer"], f"{each['speed_ratio']:.2f} ×", f"{each['memory_ratio']:.2f} ×")
            )
        tables.append(aligned(cells))
    if result["scaling"]:
        tables.append(aligned(list(_scaling_cells(result["scaling"]))))
    if result["not_run"]:
        skipped = [(*_setting(each), str(each["micro_batch"]), each["reason"]) for each in result["not_run"]]
        tables.append(aligned([("not run", "batch", "type", "recompute", "GPUs", "micro", "because"), *skipped]))
    device = f"{result['device']['name']}; " + ", ".join(
        f"{name} {version}" for name, version in result["versions"].items()
    )
    late = f"{result['not_started']} cases were not started: no time left" if result["not_started"] else ""
    return "\n\n".join(part for part in (device, *tables, late) if part)


def _scaling_cells(scaling: Sequence[Row]) -> Iterator[tuple[str, ...]]:
    yield "shape", "batch", "type", "recompute", "GPUs", "micro", "tok/s", "speed-up", "efficiency", "MFU", "GiB"
    for row in scaling:
        speed_up = f"{row['speed_up']:.2f} × {row['of_ranks']} GPU{'s' if row['of_ranks'] > 1 else ''}"
        yield (
            *_setting(row),
            str(row["micro_batch"]),
            f"{row['tokens_per_second']:,.0f}",
            speed_up,
            f"{row['efficiency']:.0%}",
            _number(row["mfu"], ".1%"),
            f"{row['peak_gib']:.1f}",
        )


def _cells(row: Row) -> tuple[str, ...]:
    end = "" if row["status"] == "ok" else f"{row['status']}: {row['error']}"[:100]
    if row["agrees"] is False:
        end += f" DISAGREES: loss by {row['loss_difference']:.1e}, gradient norm by {row['grad_norm_difference']:.1e}"
    size = f"{row['num_tokens'] or 0} tok" if row["batch"] == LADDER else str(row["micro_batch"])
    return (
        *_setting(row),
        row["system"],
        size,
        _number(row["seconds"], ".3f"),
        _number(row["tokens_per_second"], ",.0f"),
        _number(row["mfu"], ".1%"),
        _number(row["computed_mfu"], ".1%"),
        _number(row["peak_gib"], ".1f"),
        _number(row["loss"], ".4f"),
        _number(row["grad_norm"], ".4f"),
        end,
    )


def _setting(row: Row) -> tuple[str, ...]:
    batch = row["batch"] if row["copies"] == 1 else f"{row['copies']} × {row['batch']}"
    return row["shape"], batch, row["dtype"], "yes" if row["checkpointing"] else "no", str(row["ranks"])


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def aligned(cells: Sequence[Sequence[str]]) -> str:
    """Rows of cells in columns."""
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]

    def lines() -> Iterator[str]:
        for row in cells:
            yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()

    return "\n".join(lines())
