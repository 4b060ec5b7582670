"""The learner on a two-layer Llama: its gradient does not depend on how the batch is cut, it continues after a restart, and it learns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor
from transformers import LlamaForCausalLM

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import Loss, TokenView
from rftcore.algorithms.losses.sft import SFT
from rftcore.algorithms.parts import AlgorithmParts
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.network.optimizers import learning_rate_at
from rftdata.errors import ConfigError, PluginError, RftError
from tests.support.learning import VOCABULARY, config, make_batch, make_learner, weights


def gradients(learner: Learner, batch: TrainBatch) -> dict[str, Tensor]:
    """Return the gradient of an update just before the optimizer uses it."""
    seen: dict[str, Tensor] = {}
    parameters = list(learner.policy.model.named_parameters())
    handle = learner.policy.optimizers.members[0].register_step_pre_hook(
        lambda *_: seen.update({name: p.grad.clone() for name, p in parameters if p.grad is not None})
    )
    learner.update(batch, 1)
    handle.remove()
    return seen


class TestGradient:
    @pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum"])
    @pytest.mark.parametrize("share_prompts", [False, True])
    @pytest.mark.parametrize("max_tokens", [1, 30])
    def test_does_not_depend_on_micro_batches(
        self, model_path: str, aggregation: Any, share_prompts: bool, max_tokens: int
    ) -> None:
        algorithm = build_algorithm("grpo", {"aggregation": aggregation})
        whole = make_learner(model_path, config(share_prompts=False, max_grad_norm=None), algorithm, 0)
        cut = make_learner(
            model_path,
            config(share_prompts=share_prompts, max_tokens_per_microbatch=max_tokens, max_grad_norm=None),
            algorithm,
            0,
        )
        expected, found = gradients(whole, make_batch(1)), gradients(cut, make_batch(1))
        assert expected.keys() == found.keys()
        for name, gradient in expected.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    @pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "seq-mean-token-sum"])
    @pytest.mark.parametrize("max_tokens", [30, 4096])
    def test_counts_a_rollout_once_however_many_branches_it_has(
        self, model_path: str, aggregation: str, max_tokens: int
    ) -> None:
        # Groups of 4 sequences: one rollout with three branches and one with one; a rollout each (the first is empty); two with two.
        batch = replace(make_batch(2), rollout_index_B=torch.tensor([0, 0, 0, 1, 0, 1, 2, 3, 0, 0, 1, 1]))
        shares = np.array([1 / 3, 1 / 3, 1 / 3, 1, 0, 1, 1, 1, 1 / 2, 1 / 2, 1 / 2, 1 / 2])
        mask = batch.loss_mask_BT.numpy()
        weights_BT = (shares / shares.sum())[:, None] * mask  # of 7 rollouts
        if aggregation == "seq-mean-token-mean":
            weights_BT = weights_BT / np.maximum(1, mask.sum(axis=1, keepdims=True))
        settings = config(max_grad_norm=None, max_tokens_per_microbatch=max_tokens)
        algorithm = build_algorithm("sft", {"aggregation": aggregation})
        found = gradients(make_learner(model_path, settings, algorithm, 0), batch)
        model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        logits = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long()).logits
        loss_BT = torch.nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), batch.token_ids_BT[:, 1:], reduction="none"
        )
        (loss_BT * torch.from_numpy(weights_BT[:, 1:]).float()).sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)

    def test_importance_weights_multiply_the_loss_of_each_experience(self, model_path: str) -> None:
        learner = make_learner(model_path, config(max_grad_norm=None, learning_rate=1e-12), build_algorithm("sft"), 0)
        batch = make_batch(4, groups=1, size=3)
        by_hand: dict[str, Tensor] = {}
        for row, weight in enumerate([1.0, 0.25, 0.5]):
            alone = torch.zeros(3)
            alone[row] = 1.0
            for name, gradient in gradients(learner, replace(batch, importance_weights_B=alone)).items():
                by_hand[name] = by_hand.get(name, torch.zeros_like(gradient)) + weight * gradient
        found = gradients(learner, replace(batch, importance_weights_B=torch.tensor([1.0, 0.25, 0.5])))
        assert found.keys() == by_hand.keys()
        for name, gradient in by_hand.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)

    def test_equals_the_plain_formula_over_all_logits(self, model_path: str) -> None:
        # SFT, written as one would by hand: all logits of the padded batch, cross-entropy where the mask says.
        batch = make_batch(2)
        learner = make_learner(model_path, config(max_grad_norm=None), build_algorithm("sft"), 0)
        found = gradients(learner, batch)
        model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        logits = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long()).logits
        mask = batch.loss_mask_BT[:, 1:]
        torch.nn.functional.cross_entropy(logits[:, :-1][mask], batch.token_ids_BT[:, 1:][mask]).backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-6, msg=name)

    def test_is_the_same_with_gradient_checkpointing(self, model_path: str) -> None:
        batch = make_batch(1)
        plain = gradients(make_learner(model_path, config(), build_algorithm("grpo"), 0), batch)
        again = gradients(
            make_learner(model_path, config(gradient_checkpointing=True), build_algorithm("grpo"), 0), batch
        )
        for name, gradient in plain.items():
            torch.testing.assert_close(again[name], gradient, rtol=1e-5, atol=1e-7, msg=name)

    def test_is_scaled_down_to_the_limit(self, model_path: str) -> None:
        learner = make_learner(model_path, config(max_grad_norm=0.01), build_algorithm("grpo"), 0)
        norms = [gradient.norm() for gradient in gradients(learner, make_batch(1)).values()]
        assert torch.stack(norms).norm().item() == pytest.approx(0.01, rel=1e-3)


class TestPairs:
    @pytest.mark.parametrize("share_prompts", [False, True])
    @pytest.mark.parametrize("max_tokens", [1, 30, 4096])
    def test_gradient_and_loss_equal_the_plain_formula(
        self, model_path: str, tmp_path: Path, share_prompts: bool, max_tokens: int
    ) -> None:
        # The policy has left the reference: one step of SFT. Then eq. 7 as one would write it, over all logits.
        batch = replace(make_batch(5), paired=True)
        settings = config(share_prompts=share_prompts, max_tokens_per_microbatch=max_tokens, max_grad_norm=None)
        learner = make_learner(model_path, settings, build_algorithm("dpo", {"loss": {"beta": 0.5}}), 0)
        before = make_learner(model_path, config(learning_rate=0.01), build_algorithm("sft"), 0)
        before.update(make_batch(6), 1)
        before.save_pretrained(tmp_path)
        learner.policy.model.load_state_dict(before.policy.model.state_dict())
        model = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
        log_ratios_B = sums(model, batch) - sums(LlamaForCausalLM.from_pretrained(model_path), batch).detach()
        margins_P = 0.5 * (log_ratios_B[0::2] - log_ratios_B[1::2])
        whole_P = batch.loss_mask_BT.any(dim=1).view(-1, 2).all(dim=1)  # a pair with an empty answer is dropped
        assert whole_P.sum() == 5
        loss = -torch.nn.functional.logsigmoid(margins_P[whole_P]).mean()
        loss.backward()
        found = gradients(learner, batch)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-3, atol=1e-5, msg=name)
        metrics = learner.update(batch, 1)
        assert metrics["num_experiences"] == 10
        second = learner.update(batch, 2)
        assert second["loss"] < metrics["loss"]

    def test_starts_at_log_two_and_learns_to_prefer_the_chosen(self, model_path: str) -> None:
        batch = replace(make_batch(5), paired=True)
        learner = make_learner(model_path, config(), build_algorithm("dpo"), 0)
        steps = [learner.update(batch, step) for step in range(1, 16)]
        assert steps[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
        assert steps[0]["pair_margin"] == pytest.approx(0.0, abs=1e-5)
        assert steps[-1]["pair_accuracy"] == 1.0
        assert steps[-1]["loss"] < steps[0]["loss"]
        assert steps[-1]["pair_margin"] == pytest.approx(
            steps[-1]["chosen_reward"] - steps[-1]["rejected_reward"], abs=1e-5
        )

    def test_the_reference_stays_the_first_model_after_a_restart(self, model_path: str, tmp_path: Path) -> None:
        batch = replace(make_batch(5), paired=True)
        straight = make_learner(model_path, config(), build_algorithm("dpo"), 0)
        straight.update(batch, 1)
        straight.save_checkpoint(tmp_path / "checkpoint")
        again = make_learner(model_path, config(), build_algorithm("dpo"), 0)
        again.load_checkpoint(tmp_path / "checkpoint")
        assert (
            again.update(batch, 2)["loss"] == straight.update(batch, 2)["loss"] != pytest.approx(math.log(2), abs=1e-4)
        )
        for name, tensor in weights(straight).items():
            assert torch.equal(weights(again)[name], tensor), name


def sums(model: LlamaForCausalLM, batch: TrainBatch) -> Tensor:
    """Return Σ log π over the tokens of each experience that count."""
    logprobs = model(input_ids=batch.token_ids_BT).logits[:, :-1].log_softmax(-1)
    taken = logprobs.gather(2, batch.token_ids_BT[:, 1:, None])[..., 0]
    return (taken * batch.loss_mask_BT[:, 1:]).sum(dim=1)


class TestMetrics:
    def test_describe_the_policy_before_the_step(self, model_path: str) -> None:
        batch = make_batch(3)
        model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        with torch.no_grad():
            logprobs = model(input_ids=batch.token_ids_BT).logits[:, :-1].log_softmax(-1)
        mask = batch.loss_mask_BT[:, 1:]
        rows = logprobs[mask]
        taken = rows.gather(1, batch.token_ids_BT[:, 1:][mask][:, None])[:, 0]
        behavior = batch.behavior_logprobs_BT[:, 1:][mask]
        metrics = make_learner(model_path, config(), build_algorithm("grpo"), 0).update(batch, 1)
        assert metrics["logprob_diff"] == pytest.approx((taken - behavior).abs().mean().item(), rel=1e-4)
        assert metrics["ratio_mean"] == pytest.approx((taken - behavior).exp().mean().item(), rel=1e-3)
        assert metrics["entropy"] == pytest.approx(-(rows.exp() * rows).sum(-1).mean().item(), rel=1e-4)
        difference = taken - behavior
        assert metrics["kl_behavior"] == pytest.approx((difference.exp() - 1 - difference).mean().item(), rel=1e-3)
        assert metrics["num_tokens"] == batch.num_loss_tokens
        assert metrics["num_experiences"] == 12
        assert metrics["skipped"] == 0
        assert metrics["grad_norm"] > 0

    @pytest.mark.parametrize("algorithm", ["grpo", "reinforce", "opmd", "asymre"])
    def test_use_the_distribution_that_was_sampled_from(self, model_path: str, algorithm: str) -> None:
        batch = make_batch(3)
        model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
        with torch.no_grad():
            logprobs = (model(input_ids=batch.token_ids_BT).logits[:, :-1] / 0.7).log_softmax(-1)
        rows = logprobs[batch.loss_mask_BT[:, 1:]]
        metrics = make_learner(model_path, config(), build_algorithm(algorithm), 0, temperature=0.7).update(batch, 1)
        assert metrics["entropy"] == pytest.approx(-(rows.exp() * rows).sum(-1).mean().item(), rel=1e-4)

    def test_a_shared_prompt_saves_tokens(self, model_path: str) -> None:
        batch = make_batch(3)
        shared = make_learner(model_path, config(), build_algorithm("grpo"), 0).update(batch, 1)
        apart = make_learner(model_path, config(share_prompts=False), build_algorithm("grpo"), 0).update(batch, 1)
        assert shared["computed_tokens"] < 0.8 * apart["computed_tokens"]
        assert shared["loss"] == pytest.approx(apart["loss"], rel=1e-4)

    def test_the_reference_model_is_the_model_at_the_start(self, model_path: str) -> None:
        assert make_learner(model_path, config(), build_algorithm("grpo"), 0).models.reference is None
        learner = make_learner(model_path, config(), build_algorithm("grpo", {"kl": {"type": "k3", "coef": 0.1}}), 0)
        first, second = (learner.update(make_batch(3), step)["kl_reference"] for step in (1, 2))
        assert first == pytest.approx(0.0, abs=1e-6)
        assert second > 1e-5

    def test_bfloat16_autocast_stays_close(self, model_path: str) -> None:
        exact = make_learner(model_path, config(), build_algorithm("grpo"), 0).update(make_batch(3), 1)
        rounded = make_learner(model_path, config(autocast="bfloat16"), build_algorithm("grpo"), 0).update(
            make_batch(3), 1
        )
        assert rounded["logprob_diff"] == pytest.approx(exact["logprob_diff"], rel=0.05)

    @pytest.mark.parametrize(
        ("instructions", "same_as"), [({"avx512_bf16": True}, "bfloat16"), ({"avx2": True}, "none")]
    )
    def test_a_cpu_multiplies_bfloat16_where_it_has_instructions_for_it(
        self, model_path: str, monkeypatch: pytest.MonkeyPatch, instructions: dict[str, bool], same_as: str
    ) -> None:
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: instructions)
        chosen, expected = (
            gradients(make_learner(model_path, config(autocast=autocast), build_algorithm("grpo"), 0), make_batch(3))
            for autocast in ("auto", same_as)
        )
        assert all(torch.equal(gradient, expected[name]) for name, gradient in chosen.items())


class TestSkippedSteps:
    def test_a_batch_without_a_token_that_counts_changes_nothing(self, model_path: str) -> None:
        batch = make_batch(1)
        batch.loss_mask_BT.zero_()
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        before = weights(learner)
        metrics = learner.update(batch, 1)
        assert (metrics["skipped"], metrics["num_tokens"]) == (1.0, 0.0)
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())

    def test_a_gradient_that_is_not_finite_changes_nothing_and_the_fifth_in_a_row_is_an_error(
        self, model_path: str
    ) -> None:
        class Broken(SFT):
            def __call__(self, view: TokenView) -> Loss:
                return Loss(super().__call__(view).loss_U * float("inf"))

        sft = build_algorithm("sft")
        broken = Algorithm("broken", sft.config, AlgorithmParts(loss=Broken(), aggregation=sft.aggregation))
        learner = make_learner(model_path, config(), broken, 0)
        before = weights(learner)
        for step in range(1, 5):
            assert learner.update(make_batch(1), step)["skipped"] == 1.0
        with pytest.raises(RftError, match="diverged"):
            learner.update(make_batch(1), 5)
        assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
        assert not learner.policy.optimizers.members[0].state

    def test_a_reward_that_is_not_a_number_is_refused_before_anything_is_computed(self, model_path: str) -> None:
        learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
        with pytest.raises(RftError, match="row 5"):
            learner.update(make_batch(1, rewards=[0.0] * 5 + [float("nan")] * 7), 1)


def test_an_algorithm_with_ratios_refuses_sequences_without_behaviour_logprobs(model_path: str) -> None:
    batch = make_batch(5)
    batch.behavior_logprobs_BT[6][batch.loss_mask_BT[6]] = torch.nan
    learner = make_learner(model_path, config(), build_algorithm("grpo"), 0)
    before = weights(learner)
    with pytest.raises(RftError, match=r"1 of 12 experiences .* no behaviour log-probabilities.* experience 6"):
        learner.update(batch, 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
    metrics = make_learner(model_path, config(), build_algorithm("sft"), 0).update(batch, 1)
    assert all(np.isfinite(value) for value in metrics.values())


@pytest.mark.parametrize("algorithm", ["sft", "raft"])
def test_imitation_does_not_depend_on_the_temperature_of_rollouts(model_path: str, algorithm: str) -> None:
    losses = [
        make_learner(model_path, config(), build_algorithm(algorithm), 0, temperature=temperature).update(
            make_batch(6), 1
        )["loss"]
        for temperature in (1.0, 0.3, 0.0)
    ]
    assert losses[0] == losses[1] == losses[2]


class TestLearningRate:
    def test_rises_linearly_then_stays(self, model_path: str) -> None:
        settings = config(learning_rate=0.5, warmup_steps=4)
        assert [learning_rate_at(settings, step, None) for step in (1, 2, 4, 5, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
        learner = make_learner(model_path, settings, build_algorithm("grpo"), 0)
        assert learner.update(make_batch(1), 2)["learning_rate"] == 0.25

    def test_without_warm_up_starts_at_the_peak(self) -> None:
        assert learning_rate_at(config(), 1, None) == 1.0

    def test_cosine_ends_at_its_share_of_the_peak(self) -> None:
        settings = config(warmup_steps=2, lr_schedule="cosine", min_lr_ratio=0.2)
        # Half way between steps 2 and 12 the cosine is 0.5: 0.2 + 0.8 × 0.5 = 0.6.
        assert [learning_rate_at(settings, step, 12) for step in (1, 2, 7, 12)] == pytest.approx([0.5, 1.0, 0.6, 0.2])

    def test_cosine_needs_the_length_of_the_run(self, model_path: str) -> None:
        with pytest.raises(ConfigError, match="cosine"):
            make_learner(model_path, config(lr_schedule="cosine"), build_algorithm("grpo"), 0)


def sample(learner: Learner, prompts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Continue each prompt by `length` sampled tokens; return them and their log-probabilities."""
    tokens, logprobs = prompts, []
    for _ in range(length):
        with torch.no_grad(), learner.policy.unpacked() as model:
            rows = model(input_ids=tokens).logits[:, -1].float().log_softmax(-1)
        drawn = torch.multinomial(rows.exp(), 1)
        logprobs.append(rows.gather(1, drawn))
        tokens = torch.cat([tokens, drawn], dim=1)
    return tokens[:, -length:], torch.cat(logprobs, dim=1)


def play(learner: Learner, steps: int, score: Callable[[Tensor, Tensor], Tensor]) -> list[float]:
    """Train on-policy on random prompts of three tokens; return the mean reward of each step."""
    means = []
    for step in range(1, steps + 1):
        prompts = torch.randint(0, VOCABULARY, (8, 3)).repeat_interleave(8, dim=0)
        responses, logprobs = sample(learner, prompts, 2)
        rewards = score(prompts, responses)
        means.append(rewards.mean().item())
        batch = TrainBatch(
            token_ids_BT=torch.cat([prompts, responses], dim=1),
            attention_mask_BT=torch.ones(64, 5, dtype=torch.bool),
            loss_mask_BT=(torch.arange(5) >= 3).expand(64, 5),
            behavior_logprobs_BT=torch.cat([torch.zeros(64, 3), logprobs], dim=1),
            rewards_B=rewards,
            group_index_B=torch.arange(8).repeat_interleave(8),
            rollout_index_B=torch.arange(8).repeat(8),
            importance_weights_B=torch.ones(64),
            turn_BA=torch.zeros(64, 1, dtype=torch.int64),
            turn_start_BA=torch.full((64, 1), 3),
        )
        metrics = learner.update(batch, step)
        # On-policy: what was sampled and what is trained are the same policy, so every ratio is 1.
        assert metrics["logprob_diff"] < 1e-4
    return means


def test_grpo_raises_the_reward_of_a_policy_that_starts_at_chance(model_path: str) -> None:
    learner = make_learner(model_path, config(learning_rate=1e-3, warmup_steps=5), build_algorithm("grpo"), 0)

    def share_of_even_tokens(_: Tensor, responses: Tensor) -> Tensor:
        return (responses % 2 == 0).float().mean(dim=1)

    means = play(learner, 60, share_of_even_tokens)
    assert np.mean(means[:5]) < 0.65
    assert np.mean(means[-5:]) > np.mean(means[:5]) + 0.25


def test_sft_memorizes_a_sequence(model_path: str) -> None:
    learner = make_learner(model_path, config(learning_rate=1e-2), build_algorithm("sft"), 0)
    losses = [learner.update(make_batch(5), step)["loss"] for step in range(1, 31)]
    assert losses[0] > 3.0
    assert losses[-1] < 0.7


def test_a_user_defines_an_algorithm_in_two_small_files(model_path: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        """
from rftcore.algorithms.base import Advantage, Credit, Loss, TokenTerm

class Reward(Advantage):
    def __call__(self, batch, signals):
        return Credit(advantages_N=batch.rewards_B[batch.sequence_N])

class Reinforce(TokenTerm):
    uses_advantages = True

    def __call__(self, view):
        return Loss(-view.advantages_N * view.logprobs_N)
"""
    )
    (tmp_path / "mine.yaml").write_text("advantage: ./mine.py:Reward\nloss: ./mine.py:Reinforce\n")
    learner = make_learner(model_path, config(), build_algorithm("./mine.yaml", group_size=1, base_dir=tmp_path), 0)
    before = weights(learner)
    learner.update(make_batch(1, rewards=[0.0] * 12), 1)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())
    learner.update(make_batch(1, rewards=[1.0] * 12), 2)
    assert not all(torch.equal(before[name], tensor) for name, tensor in weights(learner).items())


class TestBackends:
    def test_a_users_class_replaces_the_built_in_one(self, model_path: str, tmp_path: Path) -> None:
        (tmp_path / "mine.py").write_text(
            "from rftcore.trainer.network.network import Network\n\n\nclass Halved(Network):\n"
            "    def update(self, share):\n        return super().update(0.5 * share)\n"
        )
        algorithm = build_algorithm("sft")
        mine = make_learner(model_path, config(backend="./mine.py:Halved"), algorithm, 0, base_dir=tmp_path)
        slower = make_learner(model_path, config(learning_rate=0.5e-3), algorithm, 0)
        for learner in (mine, slower):
            learner.update(make_batch(1), 1)
        expected = weights(slower)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(mine).items())

    def test_an_unknown_backend_is_refused(self, model_path: str) -> None:
        with pytest.raises(PluginError, match="fsdp2"):
            make_learner(model_path, config(backend="fsdp"), build_algorithm("sft"), 0)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma2Config", "caps attention scores"),
        ("GptOssConfig", "has sinks"),
        ("BloomConfig", "computes attention itself"),
        ("Qwen3NextConfig", "carry a state"),
        ("MambaConfig", "carry a state"),
    ],
)
def test_a_model_whose_attention_cannot_be_packed_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    getattr(transformers, name)().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=reason):
        make_learner(str(tmp_path), config(), build_algorithm("sft"), 0)
