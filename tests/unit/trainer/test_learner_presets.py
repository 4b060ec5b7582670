"""Every preset trains a model, and a critic is warmed up alone, saved and continued."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.presets import presets
from rftdata.errors import ConfigError, ModelError, RftError
from tests.support.learning import VOCABULARY, batch_with_everything, config, make_learner, weights


@pytest.mark.parametrize("name", sorted(presets()))
def test_every_preset_trains(name: str, model_path: str) -> None:
    needs_model = "teacher_logits" in build_algorithm(name, {"teacher": model_path}).signals
    algorithm = build_algorithm(name, {"teacher": model_path} if needs_model else {})
    learner = make_learner(model_path, config(), algorithm, 0)
    batch = batch_with_everything(paired=algorithm.draws_pairs)
    before = weights(learner)
    for step in (1, 2):
        assert learner.update(batch, step)["skipped"] == 0.0
    changed = [name for name, tensor in weights(learner).items() if not torch.equal(tensor, before[name])]
    # With a teacher that is the policy there is nothing to learn but rounding.
    assert changed or needs_model


def test_a_critic_is_warmed_up_alone(model_path: str) -> None:
    algorithm = build_algorithm("ppo", {"critic": {"warmup_steps": 1}})
    learner = make_learner(model_path, config(), algorithm, 0)
    assert learner.models.critic is not None
    before = weights(learner)
    value_before = learner.models.critic.model.state_dict()["score.weight"].clone()
    first = learner.update(batch_with_everything(), 1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(learner).items())
    assert "grad_norm" not in first and first["critic_grad_norm"] > 0
    assert not torch.equal(learner.models.critic.model.state_dict()["score.weight"], value_before)
    assert learner.update(batch_with_everything(), 2)["grad_norm"] > 0


def test_a_critic_learns_to_predict_rewards(model_path: str) -> None:
    algorithm = build_algorithm("ppo", {"critic": {"warmup_steps": 100, "learning_rate": 0.001}})
    learner = make_learner(model_path, config(), algorithm, 0)
    losses = [learner.update(batch_with_everything(), step)["value_loss"] for step in range(1, 21)]
    assert losses[-1] < 0.6 * losses[0]  # rollouts of one prompt differ, so some loss stays


def test_a_critic_continues_from_a_checkpoint(model_path: str, tmp_path: Path) -> None:
    through = make_learner(model_path, config(), build_algorithm("ppo"), 3)
    through.update(batch_with_everything(1), 1)
    through.save_checkpoint(tmp_path / "one")
    through.update(batch_with_everything(2), 2)
    again = make_learner(model_path, config(), build_algorithm("ppo"), 4)
    again.load_checkpoint(tmp_path / "one")
    again.update(batch_with_everything(2), 2)
    assert through.models.critic is not None and again.models.critic is not None
    for one, other in ((through.policy, again.policy), (through.models.critic, again.models.critic)):
        other_weights = dict(other.model.named_parameters())
        assert all(torch.equal(tensor, other_weights[name]) for name, tensor in one.model.named_parameters())


def test_a_critic_starts_from_the_configured_model(model_path: str, tmp_path: Path) -> None:
    scorer = make_learner(model_path, config(), build_algorithm("reward_model"), 0)
    scorer.update(batch_with_everything(paired=True), 1)
    scorer.save_checkpoint(tmp_path / "scorer")
    learner = make_learner(model_path, config(), build_algorithm("ppo"), 0, critic_path=str(tmp_path / "scorer"))
    assert learner.models.critic is not None
    values = learner.models.critic.model.state_dict()
    assert all(torch.equal(tensor, values[name]) for name, tensor in scorer.policy.model.state_dict().items())


def test_a_critic_that_lacks_tokens_of_the_policy_is_refused(model_path: str, tmp_path: Path) -> None:
    small = AutoModelForCausalLM.from_pretrained(model_path)
    small.resize_token_embeddings(VOCABULARY - 1)
    small.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=f"fewer tokens than the policy.*got '{VOCABULARY - 1} tokens'"):
        make_learner(model_path, config(), build_algorithm("ppo"), 0, critic_path=str(tmp_path))


def test_a_checkpoint_without_a_critic_is_refused_by_an_algorithm_with_one(model_path: str, tmp_path: Path) -> None:
    make_learner(model_path, config(), build_algorithm("grpo"), 0).save_checkpoint(tmp_path / "one")
    with pytest.raises(ModelError, match="has no critic, and ppo trains one"):
        make_learner(model_path, config(), build_algorithm("ppo"), 0).load_checkpoint(tmp_path / "one")


def test_a_gradient_of_the_critic_that_is_not_finite_counts_in_the_warm_up_too(model_path: str) -> None:
    algorithm = build_algorithm("ppo", {"critic": {"warmup_steps": 100}})
    learner = make_learner(model_path, config(), algorithm, 0)
    batch = replace(batch_with_everything(), rewards_B=torch.full((12,), 1e38))
    for step in range(1, 5):
        assert learner.update(batch, step)["skipped"] == 1.0
    with pytest.raises(RftError, match=r"diverged.*critic_grad_norm"):
        learner.update(batch, 5)
