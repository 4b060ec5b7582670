"""Which step is best: one rule for the trainer, which keeps that step's checkpoint, and the report, which names it.

A step has a score when every validation taskset of the run was answered at it, in the decoding that decides (the first of
`eval.decodings`): the mean over the tasksets. A step with some of its tasksets answered has none, however well it did on
those: tasksets differ in difficulty. Only the run's present history counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rftdata.postgres.database import Database


def validation_scores(database: Database, run_id: int, tasksets: Sequence[str], decoding: str) -> dict[int, float]:
    """Score of every step that has one, the initial weights (step 0) included."""
    if not tasksets:
        return {}
    rows = database.fetch("validation_scores", run_id=run_id, tasksets=sorted(set(tasksets)), decoding=decoding)
    return {row["trainer_step"]: row["score"] for row in rows}


def best_step(scores: Mapping[int, float]) -> int | None:
    """The trained step with the highest score, the earliest of equals; None without one."""
    trained = [step for step in scores if step > 0]
    return min(trained, key=lambda step: (-scores[step], step)) if trained else None
