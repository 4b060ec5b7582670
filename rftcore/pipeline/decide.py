"""Decisions of a chain on a batch of sealed groups."""

from __future__ import annotations

from operators.chain import isolate
from operators.chain.chain import Chain
from rftdata.pipeline.records import Known, SealedBatch, Verdicts


def decide(chain: Chain, batch: SealedBatch, known: Known | None = None, *, patient: bool = False) -> Verdicts:
    """Decide on every experience of a batch, including those that no stage sees.

    Args:
        known: stored scores.
        patient: raise if a stage fails on everything that is tried, instead of setting everything aside.

    Raises:
        StageError: with `patient`, the stage's error.
    """
    verdicts = isolate.decide(chain, batch.table, known, patient=patient)
    verdicts.add(Verdicts(batch.failed))
    return verdicts
