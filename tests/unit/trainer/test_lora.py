"""Adapters: only they are trained, engines get merged weights, and peft opens what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import GPT2Config, GPT2LMHeadModel, LlamaForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.trainer.batches.micro_batches import split_batch
from rftcore.trainer.learner import Learner
from rftdata.errors import ConfigError, ModelError
from tests.support.learning import config, make_batch, make_learner, weights
from tests.support.weights import weights_of

LORA = {"rank": 4, "alpha": 8}


def learner_with(model: str, seed: int = 0, **lora: object) -> Learner:
    return make_learner(model, config(lora=LORA | lora), build_algorithm("sft"), seed)


def logprobs(model: LlamaForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(make_batch(1).token_ids_BT).logits.log_softmax(-1)
    return found


def test_only_adapters_change_and_the_loss_falls(model_path: str) -> None:
    learner = learner_with(model_path)
    before = weights(learner)
    losses = [learner.update(make_batch(1), step)["loss"] for step in range(1, 21)]
    assert losses[-1] < 0.9 * losses[0]
    changed = {name for name, tensor in weights(learner).items() if not torch.equal(tensor, before[name])}
    assert changed == {name for name in before if ".lora_" in name} and changed


def test_engines_get_merged_weights_under_the_model_s_own_names(model_path: str) -> None:
    learner = learner_with(model_path)
    plain = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    start = weights_of(learner)
    assert {*start} == {*plain.state_dict()}
    assert all(torch.equal(start[name], tensor) for name, tensor in plain.state_dict().items()), "B is 0 at first"
    for step in range(1, 6):
        learner.update(make_batch(1), step)
    plain.load_state_dict(weights_of(learner))
    with learner.policy.unpacked() as trained:
        torch.testing.assert_close(logprobs(plain), logprobs(trained), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_has_a_merged_model_and_adapters_that_peft_opens(model_path: str, tmp_path: Path) -> None:
    learner = learner_with(model_path)
    for step in (1, 2):
        learner.update(make_batch(1), step)
    learner.save_checkpoint(tmp_path / "c")
    merged = LlamaForCausalLM.from_pretrained(tmp_path / "c", dtype=torch.float32)
    base = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    opened = PeftModel.from_pretrained(base, tmp_path / "c" / "adapters")
    torch.testing.assert_close(logprobs(merged), logprobs(opened), rtol=1e-4, atol=1e-4)


def test_a_checkpoint_keeps_updates_that_bfloat16_would_round_away(model_path: str, tmp_path: Path) -> None:
    learner = make_learner(model_path, config(lora=LORA, dtype="bfloat16"), build_algorithm("sft"), 0)
    assert learner.policy.merged_update_error(torch.bfloat16) == 0.0, "there is no update yet"
    name = "model.layers.0.self_attn.q_proj"
    layer = learner.policy.model.get_submodule(name)
    weight = layer.get_parameter("base_layer.weight").detach()
    assert weight.dtype == torch.bfloat16
    with torch.no_grad():
        layer.get_parameter("lora_A.default.weight").fill_(1e-5 / 8)  # rank 4, alpha / rank 2
        layer.get_parameter("lora_B.default.weight").fill_(1.0)
    rounded = (weight.float() + 1e-5).bfloat16().float() - weight.float()
    expected = ((rounded - 1e-5).norm() / (1e-5 * weight.numel() ** 0.5)).item()
    assert expected > 0.8
    assert learner.policy.merged_update_error(torch.bfloat16) == pytest.approx(expected, rel=1e-3)
    assert learner.policy.merged_update_error(torch.float32) < 0.02
    learner.save_checkpoint(tmp_path / "c")
    opened = LlamaForCausalLM.from_pretrained(tmp_path / "c", dtype="auto")
    found = opened.get_parameter(f"{name}.weight").detach() - weight.float()
    torch.testing.assert_close(found, torch.full_like(found, 1e-5), rtol=0.02, atol=0)


def test_a_resumed_run_continues_with_its_adapters(model_path: str, tmp_path: Path) -> None:
    through, first = learner_with(model_path), learner_with(model_path)
    for step in (1, 2):
        through.update(make_batch(step), step)
        first.update(make_batch(step), step)
    first.save_checkpoint(tmp_path / "c")
    resumed = learner_with(model_path, seed=3)
    resumed.load_checkpoint(tmp_path / "c")
    for step in (3, 4):
        assert through.update(make_batch(step), step)["loss"] == resumed.update(make_batch(step), step)["loss"]
    expected, found = weights(through), weights(resumed)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_reward_model_is_refused(model_path: str) -> None:
    with pytest.raises(ConfigError, match="new head untrained"):
        make_learner(model_path, config(lora=LORA), build_algorithm("reward_model"), 0)


def test_a_checkpoint_with_other_adapters_or_none_is_refused(model_path: str, tmp_path: Path) -> None:
    learner_with(model_path).save_checkpoint(tmp_path / "adapters")
    make_learner(model_path, config(), build_algorithm("sft"), 0).save_checkpoint(tmp_path / "whole")
    with pytest.raises(ModelError, match="other adapters"):
        learner_with(model_path, rank=2).load_checkpoint(tmp_path / "adapters")
    with pytest.raises(ModelError, match="has no adapters"):
        learner_with(model_path).load_checkpoint(tmp_path / "whole")
    with pytest.raises(ConfigError, match=r"names no layer of the model.*q_proj"):
        learner_with(model_path, target_modules=["query"])


def test_the_reference_is_the_policy_without_its_adapters(model_path: str) -> None:
    algorithm = build_algorithm("grpo", {"kl": {"type": "k3", "coef": 0.1}})
    learner = make_learner(model_path, config(lora=LORA), algorithm, 0)
    first = learner.update(make_batch(1), 1)
    assert learner.models.reference is None and first["kl_reference"] == pytest.approx(0.0, abs=1e-6)
    for step in range(2, 6):
        found = learner.update(make_batch(1), step)["kl_reference"]
    merged = make_learner(model_path, config(), algorithm, 0)
    merged.policy.model.load_state_dict(weights_of(learner))
    assert found > 0
    assert learner.update(make_batch(2), 6)["kl_reference"] == pytest.approx(
        merged.update(make_batch(2), 6)["kl_reference"], rel=1e-3
    )


@pytest.mark.parametrize("name", ["lm_head", "embed_tokens", "model.embed_tokens"])
def test_adapters_outside_the_layers_are_refused_in_the_configuration(name: str) -> None:
    with pytest.raises(ValueError, match=r"embed_tokens|lm_head.*can have no adapter"):
        config(lora=LORA | {"target_modules": ["q_proj", name]})


def test_adapters_of_other_modules_than_linear_layers_are_refused(tmp_path: Path) -> None:
    GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=64)).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"can have no adapter \(got 'transformer\.h\.0\.attn\.c_attn'\)"):
        learner_with(str(tmp_path), target_modules=["c_attn"])


def test_dropout_of_adapters_is_off_for_signals_and_repeats_after_a_resume(model_path: str, tmp_path: Path) -> None:
    algorithm = build_algorithm("grpo", {"old_logprobs": "recomputed"})
    settings = config(lora=LORA | {"dropout": 0.5}, learning_rate=0.01)
    through = make_learner(model_path, settings, algorithm, 0)
    for step in (1, 2):
        through.update(make_batch(1), step)
    batch = make_batch(2)
    (micro_batches,) = split_batch(batch, through.policy.cutting)
    first, second = (through._signals.read(batch, micro_batches, {"old"}).old_N for _ in range(2))
    assert first is not None and second is not None and torch.equal(first, second)
    with torch.no_grad():
        drawn = [through.policy.logprobs(micro_batches[0], 1.0) for _ in range(2)]
    assert not torch.equal(drawn[0], drawn[1]), "an update drops inputs"
    through.save_checkpoint(tmp_path / "c")
    resumed = make_learner(model_path, settings, algorithm, 0)
    resumed.load_checkpoint(tmp_path / "c")
    torch.rand(3)
    assert through.update(make_batch(3), 3)["grad_norm"] == resumed.update(make_batch(3), 3)["grad_norm"]
