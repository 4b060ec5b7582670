"""What a chain decides on a batch of sealed groups."""

from __future__ import annotations

from operators.chain import isolate
from operators.chain.chain import Chain
from rftdata.pipeline.records import Known, SealedBatch, Verdicts


def decide(chain: Chain, batch: SealedBatch, known: Known | None = None, *, patient: bool = False) -> Verdicts:
    """Verdicts on every experience of a batch, those that no stage sees among them.

    Args:
        known: scores that are stored already.
        patient: raise where a stage fails on everything that is tried, rather than set everything aside.

    Raises:
        StageError: with `patient`, the stage's error.
    """
    verdicts = isolate.decide(chain, batch.table, known, patient=patient)
    verdicts.add(Verdicts(batch.failed))
    return verdicts
