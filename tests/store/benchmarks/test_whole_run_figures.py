"""Figures of a run of ours in `rft bench run`, read from its buffer."""

from __future__ import annotations

import rftdata
from benchmarks.whole_runs.ours import figures
from tests.support.stored_run import StoredRun


def test_tokens_sampled_after_the_last_step_do_not_count(buffer: rftdata.Buffer) -> None:
    stored = StoredRun(buffer, steps=1)
    stored.attempt()
    stored.evaluation(0, {1: 0.0})
    explorer = stored.worker("explorer")
    span = "INSERT INTO rft.worker_span VALUES (%s, 0, 'sampling', NULL, now() - interval '1 s', now())"
    buffer.sql(span, [explorer])
    stored.group(0, [1.0, 0.0])
    stored.train_step(1)
    stored.group(1, [1.0, 0.0, 1.0])
    found = figures(buffer, started=0.0)
    assert found["num_sampled"] == 2 * 5, "the second group was sampled ahead, for a step that the run does not have"
    assert found["seconds"] > 0
