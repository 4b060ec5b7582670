"""Losses that need more than log-probabilities of responses: whole texts, mismatched pairs, scores, a teacher's logits."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForTokenClassification, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.trainer_pt_utils import LabelSmoother

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.losses.jsd import JSD
from rftcore.trainer.batches.micro_batches import split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.learner import Learner
from rftcore.trainer.network.head import Output, logprobs_and_entropy, read_logits
from rftcore.trainer.network.optimizers import value_head
from rftdata.errors import ConfigError, ModelError
from tests.support.learning import config, make_batch, make_learner


def gradients(learner: Learner, batch: TrainBatch) -> tuple[dict[str, Tensor], dict[str, float]]:
    """Return the gradient of an update just before the optimizer uses it, and its metrics."""
    seen: dict[str, Tensor] = {}
    handle = learner.policy.optimizers.members[0].register_step_pre_hook(
        lambda *_: seen.update(
            {name: p.grad.clone() for name, p in learner.policy.model.named_parameters() if p.grad is not None}
        )
    )
    metrics = learner.update(batch, 1)
    handle.remove()
    return seen, metrics


def same_gradients(found: dict[str, Tensor], model: torch.nn.Module) -> None:
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert expected and expected.keys() <= found.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-5, msg=name)


def sums(model: LlamaForCausalLM, token_ids: list[int], start: int) -> Tensor:
    """Return Σ log π over the tokens from `start` on."""
    logprobs = model(input_ids=torch.tensor([token_ids])).logits[0, :-1].log_softmax(-1)
    return logprobs.gather(1, torch.tensor(token_ids)[1:, None])[start - 1 :].sum()


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_microbatch": 20, "share_prompts": True}])
def test_continued_pretraining_trains_on_every_token_but_the_first(model_path: str, settings: dict[str, Any]) -> None:
    batch = make_batch(2)
    learner = make_learner(model_path, config(max_grad_norm=None, **settings), build_algorithm("cpt"), 0)
    found, metrics = gradients(learner, batch)
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    logits = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long()).logits
    mask = batch.attention_mask_BT[:, 1:]
    torch.nn.functional.cross_entropy(logits[:, :-1][mask], batch.token_ids_BT[:, 1:][mask]).backward()
    same_gradients(found, model)
    assert metrics["num_tokens"] == batch.attention_mask_BT.sum() - batch.num_experiences


@pytest.mark.parametrize("settings", [{}, {"max_tokens_per_microbatch": 20, "share_prompts": True}])
def test_label_smoothing_equals_that_of_torch_and_trl(model_path: str, settings: dict[str, Any]) -> None:
    batch = make_batch(3)
    algorithm = build_algorithm("smoothed_sft", {"loss": {"smoothing": 0.3}})
    found, metrics = gradients(make_learner(model_path, config(max_grad_norm=None, **settings), algorithm, 0), batch)
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    output = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long())
    mask = batch.loss_mask_BT[:, 1:]
    logits, targets = output.logits[:, :-1][mask], batch.token_ids_BT[:, 1:][mask]
    loss = torch.nn.functional.cross_entropy(logits, targets, label_smoothing=0.3)
    # TRL hands the logits to the smoother of transformers, which it makes from label_smoothing_factor.
    labels = batch.token_ids_BT.masked_fill(~batch.loss_mask_BT, -100)
    theirs = LabelSmoother(epsilon=0.3)({"logits": output.logits}, labels, shift_labels=True)
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5) == pytest.approx(theirs.item(), rel=1e-5)
    assert metrics["nll"] == pytest.approx(torch.nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    loss.backward()
    same_gradients(found, model)


@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_the_optimal_token_baseline_reads_the_probability_that_two_draws_are_equal(
    model_path: str, max_tokens: int
) -> None:
    batch = make_batch(6)
    learner = make_learner(model_path, config(max_tokens_per_microbatch=max_tokens), build_algorithm("otb"), 0)
    mask = batch.loss_mask_BT[:, 1:]
    signals = learner._signals.read(batch, split_batch(batch, learner.policy.cutting)[0], learner.algorithm.signals)
    model = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    with torch.no_grad():
        logits = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long()).logits
    expected = logits[:, :-1][mask].softmax(-1).square().sum(-1)
    assert signals.collision_N is not None and not signals.collision_N.requires_grad
    torch.testing.assert_close(signals.collision_N, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [20, 4096])
def test_kto_measures_the_divergence_on_mismatched_pairs(model_path: str, moved_path: str, max_tokens: int) -> None:
    batch = make_batch(5)
    settings = config(max_grad_norm=None, max_tokens_per_microbatch=max_tokens)
    learner = make_learner(model_path, settings, build_algorithm("kto", {"loss": {"beta": 0.5}}), 0)
    model = LlamaForCausalLM.from_pretrained(moved_path, dtype=torch.float32)
    reference = LlamaForCausalLM.from_pretrained(model_path, dtype=torch.float32).requires_grad_(False)
    learner.policy.model.load_state_dict(model.state_dict())
    rows = [batch.token_ids_BT[b, : int(batch.attention_mask_BT[b].sum())].tolist() for b in range(12)]
    prompts = [8] * 4 + [9] * 4 + [10] * 4  # the lengths of `make_batch`
    # One experience, of the second group, has no response. The next with another prompt is the first of the next group that has one.
    empty = next(b for b in range(12) if len(rows[b]) == prompts[b])
    partner = [5 if empty == 4 else 4] * 4 + [8] * 4 + [0] * 4
    with torch.no_grad():
        mismatched = [
            sums(model, joined, prompts[b]) - sums(reference, joined, prompts[b])
            for b in range(12)
            if b != empty and (joined := rows[b][: prompts[b]] + rows[partner[b]][prompts[partner[b]] :])
        ]
    z = torch.stack(mismatched).mean()
    losses = []
    for b in (b for b in range(12) if b != empty):
        log_ratio = sums(model, rows[b], prompts[b]) - sums(reference, rows[b], prompts[b])
        sign = 1.0 if batch.rewards_B[b] > 0 else -1.0
        losses.append(1.0 - (0.5 * sign * (log_ratio - z.clamp(min=0))).sigmoid())
    torch.stack(losses).mean().backward()
    found, metrics = gradients(learner, batch)
    assert metrics["kl_mismatched"] == pytest.approx(z.item(), rel=1e-3) and abs(z) > 0.01
    assert metrics["loss"] == pytest.approx(torch.stack(losses).mean().item(), rel=1e-4)
    same_gradients(found, model)


def test_kto_measures_no_divergence_with_a_single_prompt(model_path: str) -> None:
    metrics = make_learner(model_path, config(), build_algorithm("kto"), 0).update(make_batch(5, groups=1), 1)
    assert metrics["kl_mismatched"] == 0.0 and metrics["loss"] == pytest.approx(0.5, abs=1e-5)


class TestRewardModel:
    def test_gradient_equals_the_plain_formula_at_the_last_token(self, model_path: str, tmp_path: Path) -> None:
        batch = replace(make_batch(5), paired=True)
        learner = make_learner(
            model_path, config(max_grad_norm=None, max_tokens_per_microbatch=30), build_algorithm("reward_model"), 0
        )
        learner.save_pretrained(tmp_path)
        model = AutoModelForTokenClassification.from_pretrained(tmp_path, dtype=torch.float32)
        scores_BT = model(input_ids=batch.token_ids_BT, attention_mask=batch.attention_mask_BT.long()).logits[..., 0]
        scores_B = scores_BT.gather(1, batch.attention_mask_BT.sum(1, keepdim=True) - 1)[:, 0]
        whole_P = batch.loss_mask_BT.any(dim=1).view(-1, 2).all(dim=1)  # a pair with an empty answer is dropped
        assert whole_P.sum() == 5
        loss = -torch.nn.functional.logsigmoid(scores_B[0::2] - scores_B[1::2])[whole_P].mean()
        loss.backward()
        found, metrics = gradients(learner, batch)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-4)
        same_gradients(found, model)

    def test_learns_which_response_is_chosen_and_continues_after_a_restart(
        self, model_path: str, tmp_path: Path
    ) -> None:
        batch = replace(make_batch(5), paired=True)
        straight = make_learner(model_path, config(), build_algorithm("reward_model"), 0)
        steps = [straight.update(batch, step) for step in range(1, 21)]
        assert steps[-1]["pair_accuracy"] == 1.0 and steps[-1]["loss"] < 0.5 * steps[0]["loss"]
        straight.save_checkpoint(tmp_path / "checkpoint")
        again = make_learner(model_path, config(), build_algorithm("reward_model"), 0)
        again.load_checkpoint(tmp_path / "checkpoint")
        assert again.update(batch, 21)["loss"] == straight.update(batch, 21)["loss"]


class TestDivergenceFromATeacher:
    @pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
    def test_gradient_equals_the_plain_formula_over_all_logits(
        self, model_path: str, moved_path: str, beta: float
    ) -> None:
        batch = make_batch(2)
        changes = {"loss": {"beta": beta}, "teacher": {"path": moved_path}}
        learner = make_learner(
            model_path, config(max_grad_norm=None, max_tokens_per_microbatch=30), build_algorithm("jsd", changes), 0
        )
        model, teacher = (
            LlamaForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model_path, moved_path)
        )
        mask = batch.loss_mask_BT[:, 1:]
        s, t = (each(input_ids=batch.token_ids_BT).logits[:, :-1][mask].softmax(-1) for each in (model, teacher))
        t = t.detach()
        m = beta * t + (1 - beta) * s
        if beta in (0.0, 1.0):
            loss = (t * (t / s).log()).sum(-1).mean() if beta == 0 else (s * (s / t).log()).sum(-1).mean()
        else:
            loss = (beta * t * (t / m).log() + (1 - beta) * s * (s / m).log()).sum(-1).mean()
        loss.backward()
        found, metrics = gradients(learner, batch)
        assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-3)
        same_gradients(found, model)

    def test_falls_in_training(self, model_path: str, moved_path: str) -> None:
        learner = make_learner(model_path, config(), build_algorithm("jsd", {"teacher": {"path": moved_path}}), 0)
        losses = [learner.update(make_batch(2), step)["loss"] for step in range(1, 16)]
        assert losses[-1] < 0.3 * losses[0]

    def test_is_computed_in_pieces_for_many_rows(self) -> None:
        random = torch.Generator().manual_seed(0)
        hidden, teacher_hidden = (torch.randn(600, 3, generator=random) for _ in range(2))
        weight = torch.randn(5, 3, generator=random)
        output = Output(weight_VH=weight.requires_grad_(), chunk=256)
        hidden.requires_grad_()
        calls: list[int] = []

        def read(rows: Tensor, teacher_rows: Tensor) -> Tensor:
            calls.append(len(rows))
            return JSD().read(rows, teacher_rows @ weight.detach().T)

        found = read_logits(hidden, output, read, teacher_hidden)
        gradients = torch.autograd.grad(found.square().sum(), (hidden, weight))
        # Forwards, and again in the backward pass, where the pieces are freed one by one.
        assert max(calls) == 256 and sum(calls) == 2 * 600
        whole = JSD().read(hidden @ weight.T, teacher_hidden @ weight.detach().T)
        torch.testing.assert_close(found, whole)
        torch.testing.assert_close(
            gradients, torch.autograd.grad(whole.square().sum(), (hidden, weight)), rtol=1e-4, atol=1e-5
        )

    def test_needs_a_teacher_with_the_policy_s_vocabulary(self, model_path: str, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="which are not stored"):
            make_learner(model_path, config(), build_algorithm("jsd"), 0)
        larger = LlamaForCausalLM.from_pretrained(model_path)
        larger.resize_token_embeddings(60)
        larger.save_pretrained(tmp_path)
        with pytest.raises(ConfigError, match=r"another vocabulary.*60 tokens"):
            make_learner(model_path, config(), build_algorithm("jsd", {"teacher": {"path": str(tmp_path)}}), 0)


@pytest.mark.parametrize(
    ("preset", "changes", "paired", "metric"),
    [
        ("ipo", {}, True, "pair_accuracy"),
        ("dpo_hinge", {"beta": 1.0}, True, "pair_accuracy"),
        ("orpo", {}, True, "pair_margin"),
        ("simpo", {}, True, "pair_accuracy"),
        ("kto", {}, False, "kto_accuracy"),
    ],
)
def test_each_preference_loss_learns_its_batch(
    model_path: str, preset: str, changes: dict[str, Any], paired: bool, metric: str
) -> None:
    batch = replace(make_batch(5), paired=paired)
    learner = make_learner(model_path, config(), build_algorithm(preset, {"loss": changes}), 0)
    steps = [learner.update(batch, step) for step in range(1, 21)]
    assert steps[-1]["loss"] < steps[0]["loss"] and steps[-1][metric] > steps[0][metric]


def test_on_policy_distillation_approaches_the_teacher(model_path: str, moved_path: str) -> None:
    algorithm = build_algorithm(
        "on_policy_distillation", {"teacher": {"path": moved_path}, "old_logprobs": "recomputed"}
    )
    learner = make_learner(model_path, config(), algorithm, 0)
    batch = make_batch(2)
    first, *_, last = [learner.update(batch, step)["teacher_kl"] for step in range(1, 6)]
    # The batch stays the same: each of its tokens is pushed until the policy finds it as likely as the teacher does.
    assert abs(last) < abs(first)


def test_the_distance_from_the_behaviour_policy_stays_finite_with_responses_of_experts(model_path: str) -> None:
    batch = make_batch(1)
    behavior_BT = batch.behavior_logprobs_BT.clone()
    behavior_BT[0] = behavior_BT[0].masked_fill(batch.loss_mask_BT[0], math.nan)
    sampled = make_learner(model_path, config(), build_algorithm("mix"), 0).update(batch, 1)
    mixed = make_learner(model_path, config(), build_algorithm("mix"), 0).update(
        replace(batch, behavior_logprobs_BT=behavior_BT), 1
    )
    assert all(map(math.isfinite, mixed.values()))
    assert 0 < mixed["logprob_diff"] < sampled["logprob_diff"]


@pytest.mark.parametrize("kept_rows", [0, 10, 16, 47, 48, 1000])
def test_kept_logits_give_the_gradients_of_logits_that_are_computed_again(kept_rows: int) -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*size, generator=random).requires_grad_() for size in ((43, 8), (50, 8)))
    target = torch.randint(0, 50, (43,), generator=random)
    output = Output(weight, chunk=16, kept_bytes=4 * 50 * kept_rows)
    logprobs, entropy = logprobs_and_entropy(hidden, output, target, entropy_has_gradient=True)
    all_logprobs = (hidden @ weight.T).log_softmax(dim=-1)
    expected = all_logprobs.gather(1, target[:, None])[:, 0] - 0.3 * (all_logprobs.exp() * all_logprobs).sum(dim=-1)
    torch.testing.assert_close(logprobs + 0.3 * entropy, expected)
    scale = torch.randn(43, generator=random)
    gradients = (
        torch.autograd.grad((scale * each).sum(), (hidden, weight)) for each in (logprobs + 0.3 * entropy, expected)
    )
    for found, exact in zip(*gradients, strict=True):
        torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


def test_gradients_of_a_bfloat16_output_layer_with_a_bias_are_added_up_in_float32() -> None:
    random = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*size, generator=random) for size in ((2048, 32), (64, 32), (64,)))
    target = torch.randint(0, 64, (2048,), generator=random)

    def gradient(dtype: torch.dtype, chunk: int) -> list[Tensor]:
        leaves = [(0.3 * each).to(dtype).requires_grad_() for each in (weight, bias)]
        logprobs_and_entropy(hidden.to(dtype), Output(leaves[0], leaves[1], chunk=chunk), target)[0].sum().backward()
        return [leaf.grad.float() for leaf in leaves if leaf.grad is not None]

    exact = gradient(torch.float32, 2048)
    of_one, of_many = (gradient(torch.bfloat16, chunk) for chunk in (2048, 16))
    for i in range(2):
        errors = [((found[i] - exact[i]).norm() / exact[i].norm()).item() for found in (of_one, of_many)]
        assert errors[1] < 1.2 * errors[0] < 0.02, "128 pieces lose no more than one"


class TestCriticOfAnotherFamily:
    def test_learns_with_the_head_that_its_class_has(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2, n_positions=64))
        model.save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text("{}")
        learner = make_learner(str(tmp_path), config(), build_algorithm("ppo", {"critic": {"learning_rate": 0.01}}), 0)
        losses = [learner.update(make_batch(2), step)["value_loss"] for step in range(1, 9)]
        assert losses[-1] < 0.8 * losses[0]
        assert learner.models.critic is not None and isinstance(learner.models.critic.model.classifier, torch.nn.Linear)

    def test_without_such_a_head_is_refused(self) -> None:
        with pytest.raises(
            ModelError, match=r"no linear layer that could give values \(got 'llama'\).*algorithm\.critic\.path"
        ):
            value_head(
                LlamaForCausalLM(
                    LlamaConfig(
                        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
                    )
                )
            )
