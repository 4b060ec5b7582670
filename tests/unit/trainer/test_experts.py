"""A mixture of experts has the gradient of plain transformers, and outside the model its weights have the names of the checkpoint."""

from __future__ import annotations

import asyncio
import json
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rftcore.algorithms import build_algorithm
from rftcore.engines.base import Decoding, EngineConfig
from rftcore.engines.transformers_engine import TransformersEngine
from rftcore.sync.files.weights_file import read_shapes_of_model, write_atomically
from rftcore.trainer.batches.micro_batches import split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftdata.errors import ConfigError
from tests.support.learning import config, make_batch, make_learner
from tests.support.models import make_tiny_moe
from tests.support.weights import weights_of, write_weights

EXPERT = "model.layers.1.mlp.experts.3.up_proj.weight"


@pytest.fixture(scope="module")
def moe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def trained(moe_path: Path) -> Learner:
    """A learner after one step, so that its weights differ from the folder's."""
    learner = make_learner(str(moe_path), config(), build_algorithm("grpo"), 0)
    learner.update(make_batch(1), 1)
    return learner


def gradients(learner: Learner, batch: TrainBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradient of an update just before the optimizer uses it, and its metrics."""
    seen: dict[str, Tensor] = {}
    parameters = list(learner.policy.model.named_parameters())
    handle = learner.policy.optimizers.members[0].register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in parameters if p.grad is not None})
    )
    metrics = learner.update(batch, 1)
    handle.remove()
    return seen, metrics


def grpo_loss(model: PreTrainedModel, batch: TrainBatch) -> Tensor:
    """Compute GRPO plainly, one sequence at a time: advantages over the standard deviation of the group, a clipped ratio, mean over all tokens."""
    rewards = batch.rewards_B.view(-1, 4)
    advantages = ((rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)).flatten()
    terms = []
    for b in range(batch.num_experiences):
        mask = batch.loss_mask_BT[b, 1:]
        ids = batch.token_ids_BT[b][batch.attention_mask_BT[b]]
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
        logprobs = logprobs[mask[: len(logprobs)]]
        ratio = (logprobs - batch.behavior_logprobs_BT[b, 1:][mask]).exp()
        terms.append(-torch.minimum(ratio * advantages[b], ratio.clamp(0.8, 1.2) * advantages[b]))
    return torch.cat(terms).mean()


@pytest.mark.parametrize(
    "settings",
    [
        {"share_prompts": False},
        {"max_tokens_per_microbatch": 30},
        {"max_tokens_per_microbatch": 1, "gradient_checkpointing": True},
    ],
)
def test_loss_and_gradient_equal_those_of_plain_transformers(moe_path: Path, settings: dict[str, Any]) -> None:
    batch = make_batch(1)
    learner = make_learner(str(moe_path), config(max_grad_norm=None, **settings), build_algorithm("grpo"), 0)
    found, metrics = gradients(learner, batch)
    model = Qwen3MoeForCausalLM.from_pretrained(moe_path, dtype=torch.float32, experts_implementation="eager")
    loss = grpo_loss(model, batch)
    loss.backward()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-6, msg=name)


@pytest.mark.parametrize("tied", [False, True])
def test_exported_weights_have_the_names_of_the_checkpoint(tmp_path: Path, tied: bool) -> None:
    folder = make_tiny_moe(tmp_path, tied=tied)
    learner = make_learner(str(folder), config(), build_algorithm("sft"), 0)
    stored = load_file(folder / "model.safetensors")
    found = weights_of(learner)
    assert found.keys() == stored.keys() | {"lm_head.weight"}
    assert all(torch.equal(found[name], tensor) for name, tensor in stored.items())


def test_a_saved_folder_opens_in_plain_transformers(trained: Learner, moe_path: Path, tmp_path: Path) -> None:
    trained.save_pretrained(tmp_path / "folder")
    trained.save_checkpoint(tmp_path / "checkpoint")
    expected = dict(trained.policy.model.named_parameters())
    for folder in (tmp_path / "folder", tmp_path / "checkpoint"):
        assert read_shapes_of_model(folder) == read_shapes_of_model(moe_path)
        opened = AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in opened.named_parameters())


def test_a_resumed_learner_continues_like_the_first_one(moe_path: Path, tmp_path: Path) -> None:
    straight = make_learner(str(moe_path), config(), build_algorithm("grpo"), 0)
    straight.update(make_batch(1), 1)
    straight.save_checkpoint(tmp_path / "checkpoint")
    again = make_learner(str(moe_path), config(), build_algorithm("grpo"), 0)
    again.load_checkpoint(tmp_path / "checkpoint")
    assert again.update(make_batch(2), 2)["loss"] == straight.update(make_batch(2), 2)["loss"]
    assert all(
        torch.equal(a, b)
        for a, b in zip(again.policy.model.parameters(), straight.policy.model.parameters(), strict=True)
    )


def test_an_engine_with_the_exported_weights_samples_with_the_trainers_probabilities(
    trained: Learner, moe_path: Path, tmp_path: Path
) -> None:
    published = write_atomically(
        tmp_path / "weights.safetensors", lambda path: write_weights(weights_of(trained).items(), path)
    )
    engine = TransformersEngine(moe_path, EngineConfig(dtype="float32", num_threads=1), 1)
    try:
        prompt = engine.tokenizer.encode("u:1+2=\na:")
        assert EXPERT in engine.differing_weights(published.uri)
        engine.load_weights(published.uri, 2, published.checksum)
        assert engine.differing_weights(published.uri) == []
        found = asyncio.run(engine.generate(prompt, Decoding(max_tokens=12, seed=0)))
    finally:
        engine.close()
    ids = torch.tensor(prompt + found.token_ids)
    with torch.no_grad(), trained.policy.unpacked() as model:
        logprobs = model(input_ids=ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(torch.tensor(found.logprobs), logprobs[len(prompt) - 1 :], rtol=0, atol=1e-5)


def test_attention_has_adapters_that_are_merged(moe_path: Path, tmp_path: Path) -> None:
    learner = make_learner(str(moe_path), config(lora={"rank": 2, "alpha": 8}), build_algorithm("sft"), 0)
    losses = [learner.update(make_batch(1), step)["loss"] for step in range(1, 6)]
    assert losses[-1] < losses[0]
    learner.save_checkpoint(tmp_path / "checkpoint")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint")
    base = AutoModelForCausalLM.from_pretrained(moe_path)
    unchanged = dict(base.named_parameters())
    changed = {name for name, tensor in merged.named_parameters() if not torch.equal(tensor, unchanged[name])}
    assert changed == {f"model.layers.{layer}.self_attn.{each}_proj.weight" for layer in (0, 1) for each in "qkvo"}
    opened = PeftModel.from_pretrained(base, tmp_path / "checkpoint" / "adapters")
    ids = make_batch(1).token_ids_BT
    with torch.no_grad():
        torch.testing.assert_close(opened(ids).logits, merged(ids).logits, rtol=1e-4, atol=1e-4)


def test_adapters_of_experts_are_refused(moe_path: Path) -> None:
    modules = ["q_proj", "gate_proj", "up_proj", "mlp.experts.down_proj"]
    with pytest.raises(ConfigError, match=r"names experts.*allowed: all-linear, or a list of k_proj, o_proj, q_proj"):
        make_learner(str(moe_path), config(lora={"target_modules": modules}), build_algorithm("sft"), 0)


@pytest.mark.parametrize(("max_tokens", "checkpointing"), [(30, True), (4096, False)])
def test_the_load_balancing_loss_equals_that_of_transformers(
    moe_path: Path, max_tokens: int, checkpointing: bool
) -> None:
    batch = replace(
        make_batch(1), rewards_B=torch.zeros(12)
    )  # without advantages, so that the gradient is that of this loss
    settings = config(
        max_grad_norm=None,
        share_prompts=False,
        max_tokens_per_microbatch=max_tokens,
        router_aux_coef=0.5,
        gradient_checkpointing=checkpointing,
    )
    learner = make_learner(str(moe_path), settings, build_algorithm("grpo"), 0)
    model = Qwen3MoeForCausalLM.from_pretrained(moe_path, dtype=torch.float32)
    micro_batches = split_batch(batch, learner.policy.cutting)[0]
    assert (len(micro_batches) > 1) is (max_tokens == 30)
    total = sum(each.num_tokens for each in micro_batches)
    expected, scores = torch.zeros(()), [list[Tensor](), list[Tensor]()]
    for micro_batch in micro_batches:
        starts = [*(micro_batch.position_ids_L == 0).nonzero().flatten().tolist(), micro_batch.num_tokens]
        alone = [model(micro_batch.token_ids_L[None, a:b], output_router_logits=True) for a, b in pairwise(starts)]
        by_layer = [torch.cat([each.router_logits[layer] for each in alone]) for layer in range(2)]
        expected = expected + load_balancing_loss_func(tuple(by_layer), 4, 2) * micro_batch.num_tokens / total
        for layer in range(2):
            scores[layer].append(by_layer[layer].detach())
    (0.5 * expected).backward()
    found, metrics = gradients(learner, batch)
    assert metrics["router_aux_loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert metrics["loss"] == pytest.approx(0.5 * expected.item(), rel=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-7, msg=name)
    violations, entropies = [], []
    for layer in range(2):
        p = torch.cat(scores[layer]).softmax(-1)
        counts = [sum(expert in row for row in p.topk(2).indices.tolist()) for expert in range(4)]
        violations.append(max(counts) / (sum(counts) / 4) - 1)
        entropies.append(-(p.mean(0) * p.mean(0).log()).sum().item())
    assert metrics["router_max_violation"] == pytest.approx(sum(violations) / 2, rel=1e-5)
    assert metrics["router_entropy"] == pytest.approx(sum(entropies) / 2, rel=1e-5)


@pytest.mark.parametrize(
    ("asks", "coef", "weight"), [(False, None, 0.0), (True, None, 0.25), (True, 0.0, 0.0), (False, 0.5, 0.5)]
)
def test_the_loss_has_the_models_own_weight_only_if_the_model_asks_for_router_logits(
    moe_path: Path, tmp_path: Path, asks: bool, coef: float | None, weight: float
) -> None:
    shutil.copytree(moe_path, tmp_path, dirs_exist_ok=True)
    values = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps(values | {"output_router_logits": asks, "router_aux_loss_coef": 0.25})
    )
    learner = make_learner(str(tmp_path), config(router_aux_coef=coef), build_algorithm("grpo"), 0)
    metrics = learner.update(replace(make_batch(1), rewards_B=torch.zeros(12)), 1)
    assert metrics["loss"] == pytest.approx(weight * metrics["router_aux_loss"], abs=1e-6)


def test_a_model_without_routers_cannot_be_balanced(model_path: str) -> None:
    with pytest.raises(ConfigError, match=r"balances the routers of a mixture of experts.*\(got '0.1, llama'\)"):
        make_learner(model_path, config(router_aux_coef=0.1), build_algorithm("sft"), 0)
    assert not any(
        name.startswith("router")
        for name in make_learner(model_path, config(), build_algorithm("sft"), 0).update(make_batch(1), 1)
    )
