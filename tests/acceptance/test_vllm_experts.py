"""A vLLM engine takes the experts that a trainer has changed, and then samples with the trainer's probabilities."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from rftcore.algorithms import build_algorithm
from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.vllm_engine import VllmEngine
from rftcore.sync.base import Publication
from rftcore.sync.files.weights_file import write_atomically
from rftcore.trainer.learner import Learner
from tests.support.learning import config, make_batch, make_learner
from tests.support.models import make_tiny_moe
from tests.support.weights import weights_of, write_weights

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

CONFIG = EngineConfig(dtype="float32", context_length=128, max_num_seqs=4, kv_cache_gib=0.0625)
EXACT = 1e-3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[VllmEngine]:
    os.environ.update(VllmEngine.process_environment(CONFIG))
    engine = VllmEngine(model, CONFIG)
    yield engine
    engine.close()


def published(learner: Learner, path: Path) -> Publication:
    return write_atomically(path, lambda draft: write_weights(weights_of(learner).items(), draft))


def worst_difference(engine: VllmEngine, learner: Learner) -> float:
    """Largest |engine - trainer| over the log-probabilities of sampled tokens."""
    prompt = engine.tokenizer.encode("u:1+2=\na:")
    found = asyncio.run(engine.generate(prompt, Decoding(max_tokens=16, seed=0)))
    ids = torch.tensor(prompt + found.token_ids)
    with torch.no_grad(), learner.policy.unpacked() as model:
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return (torch.tensor(found.logprobs) - logprobs[len(prompt) - 1 :]).abs().max().item()


def test_weights_of_a_trained_mixture_of_experts_reach_the_engine(
    engine: VllmEngine, model: Path, tmp_path: Path
) -> None:
    learner = make_learner(str(model), config(learning_rate=0.01), build_algorithm("sft"), 0)
    same = published(learner, tmp_path / "same.safetensors")
    assert worst_difference(engine, learner) < EXACT
    for step in (1, 2, 3):
        learner.update(make_batch(step), step)
    changed = published(learner, tmp_path / "changed.safetensors")
    assert worst_difference(engine, learner) > 10 * EXACT
    for version, publication in enumerate((same, changed), 1):
        engine.load_weights(publication.uri, version, publication.checksum)
        assert engine.differing_weights(publication.uri) == []
    assert worst_difference(engine, learner) < EXACT
