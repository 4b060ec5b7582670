"""A penalty for repeated n-grams, against loops that fill a response.

    - {name: repetition, n: 20, weight: 0.5}

−(1 − |distinct n-grams| / |n-grams|) of the answer's words, without regard to upper and lower case: 0 if no n-gram occurs twice, near −1 for a loop.
It is seq-rep-n of Welleck et al. 2019 (arXiv 1908.04319, section 6.1) as a penalty, as in arXiv 2502.03373. A response of fewer than n words is 0. The stage
`repetition_score` measures the same without a reward.
"""

from __future__ import annotations

from itertools import islice
from typing import Annotated

from pydantic import Field

from rftcore.workflows.task import Task, Turn


def repetition(turn: Turn, task: Task, *, n: Annotated[int, Field(ge=1)] = 4) -> float:
    """Return the penalty, −1 … 0.

    Args:
        n: words in an n-gram.
    """
    words = turn.response.lower().split()
    grams = list(zip(*(islice(words, start, None) for start in range(n))))
    return len(set(grams)) / len(grams) - 1.0 if grams else 0.0


repetition.runs_in_explorer = True  # type: ignore[attr-defined]  # functions declare no attributes; it returns at once
