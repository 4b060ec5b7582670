"""Decisions of a chain on a batch of sealed groups."""

from __future__ import annotations

import json

import pyarrow as pa

from operators.chain.chain import Chain
from operators.chain.isolation import decide_despite_failures
from rftdata.pipeline.records import SealedBatch, Verdicts
from rftdata.pipeline.scores import StoredScores, remember


def decide_groups(
    chain: Chain, batch: SealedBatch, stored_scores: StoredScores | None = None, *, patient: bool = False
) -> Verdicts:
    """Decide on every experience of a batch, including those that no stage sees.

    Args:
        patient: raise if a stage fails on everything that is tried, instead of setting everything aside.

    Raises:
        StageError: with `patient`, the stage's error.
    """
    verdicts = decide_despite_failures(chain, batch.table, stored_scores, patient=patient)
    verdicts.add(Verdicts(batch.failed))
    return verdicts


def decide_groups_without_people(
    chain: Chain, batch: SealedBatch, stored_scores: StoredScores, *, patient: bool = True
) -> Verdicts:
    """Decide like `decide_groups`, with every open question answered by its `otherwise`."""
    verdicts = decide_groups(chain, batch, stored_scores, patient=patient)
    answers: dict[int, dict[str, str]] = {}
    computed, all_scores = list(verdicts.scores), {key: dict(scores) for key, scores in stored_scores.items()}
    while verdicts.questions:
        remember(all_scores, verdicts.scores)
        for question in verdicts.questions:
            answers.setdefault(question.experience_id, {})[question.review.name] = question.review.otherwise
        batch.table = _with_answers(batch.table, answers)
        verdicts = decide_groups(chain, batch, all_scores, patient=patient)
        computed += verdicts.scores
    verdicts.scores = computed
    return verdicts


def _with_answers(table: pa.Table, answers: dict[int, dict[str, str]]) -> pa.Table:
    reviews = [
        json.dumps({**json.loads(reviews or "{}"), **answers[key]}) if key in answers else reviews
        for key, reviews in zip(table["experience_id"].to_pylist(), table["reviews"].to_pylist(), strict=True)
    ]
    return table.set_column(table.column_names.index("reviews"), "reviews", pa.array(reviews, pa.string()))
