"""Turns of a chat with a real model: what the engine recorded is what the model computes of the joined sequence, also over new weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.workflows.task import Model
from rftdata.experience import TURNS, Sequence
from tests.support.models import make_tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def engine(folder: Path) -> Iterator[TransformersEngine]:
    opened = TransformersEngine(folder, EngineConfig(dtype="float32", num_threads=1, seed=5), 1)
    yield opened
    opened.close()


def converse(engine: TransformersEngine, num_turns: int) -> tuple[Sequence, list[Sequence]]:
    """The stored sequence of a chat, and the sequences of its turns. Each turn has a policy version of its own."""
    model = Model(engine, Decoding(max_tokens=12))

    async def run() -> None:
        chat = [{"role": "user", "content": "1+2="}]
        for number in range(num_turns):
            engine.set_policy_version(number + 1)
            turn = await model.chat(chat)
            chat = [*chat, {"role": "assistant", "content": turn.response}, {"role": "user", "content": "and 3?"}]

    asyncio.run(run())
    [sequence] = model.sequences()
    return sequence, [turn.sequence for turn in model.turns]


def logprobs(folder: Path, token_ids: list[int]) -> np.ndarray:
    """The log-probability of each token but the first, by the model alone."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([token_ids])).logits[0, :-1].double()
    found = logits.log_softmax(-1).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0]
    return np.concatenate([[np.nan], found.numpy()])


def test_the_model_finds_the_recorded_log_probabilities_in_the_joined_sequence_and_in_its_turns(
    folder: Path, engine: TransformersEngine
) -> None:
    sequence, turns = converse(engine, 4)
    joined = logprobs(folder, list(sequence.token_ids))
    recorded = np.array(sequence.behavior_logprobs)
    sampled = ~np.isnan(recorded)
    assert recorded[sampled] == pytest.approx(joined[sequence.num_prompt_tokens :][sampled], abs=1e-3)
    assert sequence.loss_mask is not None and sampled.tolist() == list(sequence.loss_mask)
    for (start, end, _), turn in zip(sequence.arrays[TURNS].tolist(), turns, strict=True):
        alone = logprobs(folder, list(turn.token_ids))
        assert joined[start:end] == pytest.approx(alone[turn.num_prompt_tokens :], abs=1e-4)


def test_each_turn_has_the_policy_version_that_sampled_it(engine: TransformersEngine) -> None:
    sequence, _ = converse(engine, 3)
    starts = sequence.arrays[TURNS][:, 0].tolist()
    assert sequence.policy_spans == [(start, version) for version, start in enumerate(starts, start=1)]
