"""Log-probabilities of a teacher that lie beside the tokens: what a selection must have, and what a batch makes of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.algorithms import build_algorithm
from rftcore.config.run import parse_config
from rftcore.launch.preparation import select_source
from rftcore.resolved import ResolvedRun
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftdata import Buffer, Group, Rollout
from rftdata.errors import ConfigError
from tests.support.store_roles import selecting, tokens

SCORED = np.array([0, 0, 0, -0.75, -1.5], np.float32)


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    """Experience 1 was scored by a teacher, and 2 was not; in one write, so that one segment has both."""
    run = buffer.create_run(name="source", config={}, seed=1, steps=1, pipeline_version="none", mode="train")
    arrays: list[dict[str, Any]] = [{"arrays": {"teacher_logprobs": SCORED}}, {}]
    with buffer.writer(run) as writer:
        writer.insert(
            *(
                Group([Rollout(0, "ok", 1.0, [tokens(**each)])], source="import", taskset="mine", task_key=str(place))
                for place, each in enumerate(arrays)
            )
        )
    return buffer


def resolved(folder: Path, where: str, **algorithm: Any) -> ResolvedRun:
    config = {
        "run": {"name": "offline"},
        "model": {"path": "nowhere"},
        "trainer": {},
        "algorithm": {"name": "on_policy_distillation", **algorithm},
        "sampling": {"source": {"sql": f"select experience_id from rft.experience where {where}"}},
    }
    return ResolvedRun(parse_config(config, folder, "test"))


def test_a_selection_without_a_teacher_s_log_probabilities_is_refused(stored: Buffer, tmp_path: Path) -> None:
    selected = select_source(resolved(tmp_path, "experience_id = 1"), stored)
    assert selected is not None and selected.item_ids == (1,)
    message = r"1 of the experiences that sampling.source selects have none; the first is experience 2 \(got 'no array teacher_logprobs'\).*explorer\.teacher"
    with pytest.raises(ConfigError, match=message):
        select_source(resolved(tmp_path, "true"), stored)
    with_model = select_source(resolved(tmp_path, "true", teacher="./teacher"), stored)
    assert with_model is not None and len(with_model.item_ids) == 2, "the trainer computes the teacher"


def test_a_batch_distinguishes_what_was_not_scored_from_what_is_certain(stored: Buffer) -> None:
    run = selecting(stored, "select experience_id from rft.experience", "both")
    with stored.attempt(run) as attempt:
        drawn = attempt.draw(1, 2, ARRAYS)
        assert drawn is not None
        batch = train_batch(drawn, build_algorithm("on_policy_distillation"))
    order = np.argsort(drawn.rows["experience_id"].to_pylist())
    assert batch.teacher_logprobs_BT is not None
    scored, unscored = batch.teacher_logprobs_BT[order]
    assert scored.tolist() == SCORED.tolist()
    assert unscored.isnan().all()
