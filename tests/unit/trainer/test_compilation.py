"""Compiling before the first batch: the first steps compile nothing, and everything they compute stays the same to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch._dynamo.utils import counters

from rftcore.algorithms import build_algorithm
from rftcore.trainer.learner import Learner
from tests.support.learning import config, make_batch, make_learner, weights


@pytest.fixture(autouse=True)
def _nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def num_graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def compiled_learner(model_path: str, algorithm: str = "grpo", **settings: object) -> Learner:
    parts = build_algorithm(algorithm, {"old_logprobs": "recomputed"} if algorithm == "grpo" else {})
    return make_learner(model_path, config(compile=True, **settings), parts, 0)


def compile_all(learner: Learner) -> None:
    for part in learner.compilation.parts:
        learner.compilation.compile(part)


@pytest.mark.parametrize("algorithm", ["grpo", "sft"])
def test_the_first_steps_compile_nothing_and_compute_the_same(model_path: str, algorithm: str) -> None:
    batches = [make_batch(1), make_batch(2, groups=7, size=3), make_batch(3, groups=1), make_batch(4, groups=20)]
    warm = compiled_learner(model_path, algorithm, max_tokens_per_microbatch=100)
    compile_all(warm)
    before = num_graphs()
    assert before
    metrics = [warm.update(batch, step) for step, batch in enumerate(batches, start=1)]
    assert num_graphs() == before

    cold = compiled_learner(model_path, algorithm, max_tokens_per_microbatch=100)
    for step, batch in enumerate(batches, start=1):
        expected = cold.update(batch, step)
        for name in expected.keys() - {"seconds", "tokens_per_second"}:
            assert metrics[step - 1][name] == expected[name], name
    for name, weight in weights(cold).items():
        assert torch.equal(weights(warm)[name], weight), name


def test_compiling_leaves_nothing_behind(model_path: str) -> None:
    learner = compiled_learner(model_path)
    before, random = weights(learner), torch.get_rng_state()
    compile_all(learner)
    assert all(torch.equal(weight, before[name]) for name, weight in weights(learner).items())
    assert all(parameter.grad is None for parameter in learner.policy.model.parameters())
    assert learner.policy.optimizers.state() == {}
    assert torch.equal(torch.get_rng_state(), random)
    assert learner.step == 0


def test_nothing_is_compiled_where_layers_are_not(model_path: str) -> None:
    learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
    assert learner.compilation.parts == ()


def test_parts_are_those_of_the_algorithm(model_path: str) -> None:
    assert compiled_learner(model_path).compilation.parts == ("gradients", "signals")
    assert compiled_learner(model_path, "sft").compilation.parts == ("gradients",)
