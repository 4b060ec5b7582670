#!/usr/bin/env python3
"""Run a benchmark on another checkout and on this one, alternately, to measure what a change cost.

    git worktree add /tmp/before COMMIT
    scripts/before_after.py /tmp/before --pairs 8 --lanes 2 --figures 'results.figures.*.median' -- buffer --skip-peers --rounds 3

Each pair runs `rft bench NAME ARGUMENTS` once in each checkout, one after the other, and every second pair in reverse order, so that a
machine that becomes slower is slower for both. Lanes run side by side, each on cores of its own. JSON on stdout: for each figure the ratio
after ÷ before of every pair, their median, and the standard error of their mean. `{folder}` in an argument becomes a folder of the run.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

_HERE = Path(__file__).resolve().parents[1]


def main() -> int:
    options = _parser().parse_args()
    checkouts = {"before": options.before.resolve(), "after": _HERE}
    cores = sorted(os.sched_getaffinity(0))
    width = len(cores) // options.lanes

    def lane(number: int) -> list[dict[str, dict[str, float]]]:
        own = cores[number * width : (number + 1) * width]
        return [
            _pair(checkouts, options, own, reverse=(number + pair) % 2 == 1)
            for pair in range(number, options.pairs, options.lanes)
        ]

    with ThreadPoolExecutor(options.lanes) as pool:
        pairs = [pair for of_lane in pool.map(lane, range(options.lanes)) for pair in of_lane]
    print(json.dumps({"command": options.command, "figures": _compared(pairs)}, indent=2))
    return 0


def _pair(
    checkouts: dict[str, Path], options: argparse.Namespace, cores: list[int], *, reverse: bool
) -> dict[str, dict[str, float]]:
    names = ["after", "before"] if reverse else ["before", "after"]
    pair = {name: _run(checkouts[name], options, cores) for name in names}
    ratios = {key: round(pair["after"][key] / value, 3) for key, value in pair["before"].items() if value}
    print(f"cores {cores[0]} to {cores[-1]}, after / before: {ratios}", file=sys.stderr, flush=True)
    return pair


def _run(checkout: Path, options: argparse.Namespace, cores: list[int]) -> dict[str, float]:
    """Run the benchmark once and return its figures."""
    name, *arguments = options.command
    with tempfile.TemporaryDirectory(dir=options.folder, prefix="before-after-") as folder:
        result = subprocess.run(
            [
                sys.executable,
                "-m",
                "rftcore",
                "bench",
                name,
                *(argument.format(folder=folder) for argument in arguments),
            ],
            cwd=checkout,
            stdout=subprocess.PIPE,
            stderr=None if options.verbose else subprocess.DEVNULL,
            check=True,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
    printed = json.loads(result.stdout)
    for described in ("machine", "options") if isinstance(printed, dict) else ():
        printed.pop(described, None)
    leaves = dict(_leaves(printed))
    figures = {key: value for key, value in leaves.items() if fnmatch.fnmatch(key, options.figures)}
    if not figures:
        sys.exit(f"no figure is named {options.figures!r}; there are: {', '.join(sorted(leaves))}")
    return figures


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _leaves(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            # Rows of a table have a name in their first column.
            name = next((v for v in inner.values() if isinstance(v, str)), index) if isinstance(inner, dict) else index
            yield from _leaves(inner, f"{path}.{name}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, float(value)


def _compared(pairs: list[dict[str, dict[str, float]]]) -> dict[str, Any]:
    compared = {}
    for key in pairs[0]["before"]:
        both = [(pair["before"].get(key), pair["after"].get(key)) for pair in pairs]
        ratios = [after / before for before, after in both if before and after is not None]
        if ratios:
            compared[key] = {
                "before": statistics.median(before for before, _ in both if before is not None),
                "after": statistics.median(after for _, after in both if after is not None),
                "ratios": ratios,
                "median_ratio": statistics.median(ratios),
                "standard_error": statistics.stdev(ratios) / math.sqrt(len(ratios)) if len(ratios) > 1 else None,
            }
    return compared


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=6)
    parser.add_argument("--lanes", type=int, default=1, help="pairs side by side, each on its share of the cores")
    parser.add_argument(
        "--figures", default="*", help="which numbers of the benchmark's JSON count, as a pattern of their paths"
    )
    parser.add_argument(
        "--folder", type=Path, help="where the folders of the runs are made; a temporary folder by default"
    )
    parser.add_argument("--verbose", action="store_true", help="show what the benchmark prints")
    parser.add_argument(
        "command", nargs="+", metavar="NAME ARGUMENTS", help="after --: the benchmark and its arguments"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
