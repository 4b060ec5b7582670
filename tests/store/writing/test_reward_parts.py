"""The rewards by name: stored with each experience, and drawn for an algorithm that compares each of them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from rftcore.algorithms import build_algorithm
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftdata import Buffer, Group, Rollout
from rftdata.errors import RftError, RoleFailedError
from tests.support.store_roles import tokens


def drawn(buffer: Buffer, algorithm: str, *parts: dict[str, float]) -> TrainBatch:
    """The batch of a group with these rewards."""
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    rollouts = [Rollout(index, "ok", 0.0, [tokens(0.0, reward_parts=own)]) for index, own in enumerate(parts)]
    with buffer.writer(run) as writer:
        writer.insert(Group(rollouts, source="import", taskset="mine", task_key="one", payload={"answer": "2"}))
    with buffer.attempt(run) as attempt:
        batch = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert batch is not None
        return train_batch(batch, build_algorithm(algorithm))


def test_are_drawn_by_name_for_gdpo(buffer: Buffer) -> None:
    batch = drawn(buffer, "gdpo", {"short": 1.0, "right": 0.0}, {"right": 1.0, "short": 0.25})
    assert batch.reward_names == ("right", "short") and batch.reward_parts_B is not None
    assert batch.reward_parts_B.tolist() == [[0.0, 1.0], [1.0, 0.25]]
    assert batch.for_algorithm(1).reward_names == ("right", "short")


def test_are_not_read_by_others(buffer: Buffer) -> None:
    batch = drawn(buffer, "grpo", {"right": 1.0}, {"short": 0.0})
    assert batch.reward_parts_B is None and batch.reward_names == ()


@pytest.mark.parametrize(("second", "missing"), [({"right": 1.0}, "1 of 2"), ({}, "1 of 2")])
def test_that_an_experience_lacks_are_named(buffer: Buffer, second: dict[str, float], missing: str) -> None:
    with pytest.raises(RoleFailedError) as raised:
        drawn(buffer, "gdpo", {"right": 0.0, "short": 1.0}, second)
    assert f"{missing} experiences of step 1 have no reward parts" in str(raised.value)
    assert "the first is experience 2" in str(raised.value) and "explorer.reward" in str(raised.value)


def test_that_json_has_as_large_integers_are_drawn(buffer: Buffer) -> None:
    batch = drawn(buffer, "gdpo", {"perplexity": math.exp(37)}, {"perplexity": -(2.0**63)})
    assert batch.reward_parts_B is not None
    assert batch.reward_parts_B.flatten().tolist() == pytest.approx([math.exp(37), -(2.0**63)])


@pytest.mark.parametrize("value", ["right", math.inf, 10**400, [1.0]])
def test_that_are_no_numbers_are_refused(buffer: Buffer, value: Any) -> None:
    with pytest.raises(RftError, match="the part 'right' of reward_parts is not a finite number") as raised:
        drawn(buffer, "grpo", {"right": 1.0}, {"right": value})
    assert "allowed: a number between -3.4e+38 and 3.4e+38, or None" in str(raised.value)
    assert buffer.sql("SELECT count(*) FROM rft.experience").column(0).to_pylist() == [0]
