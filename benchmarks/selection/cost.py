"""What choosing costs at a million tasks, beside what it saves: the figures of `benchmarks.selection_cost`, in this command's report."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from benchmarks.selection_cost import CASES, measure

_OPTIONS = argparse.Namespace(groups=64, tried=8192)


def cost_of_selecting(num_tasks: int, steps: int) -> dict[str, Any]:
    """Milliseconds of `select` and of `observe` for a step of 64 groups, after 8,192 groups, for every case there is."""
    found = {}
    for case in CASES:
        print(f"cost of {case} over {num_tasks:,} tasks", file=sys.stderr)
        found[case] = measure(case, num_tasks, argparse.Namespace(**vars(_OPTIONS), steps=steps))
    return {
        "num_tasks": num_tasks,
        "groups_per_step": _OPTIONS.groups,
        "groups_tried_before": _OPTIONS.tried,
        "selectors": found,
    }
