"""Losses of preference, imitation and distillation against TRL's own code: the same tensors, values and gradients to 1e-5 in float32."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import HeadTerm, Signals, StepBatch
from rftcore.trainer.batches.forms import paired
from rftcore.trainer.batches.padding import PackedColumns, pad_batch
from tests.support.algorithms import loss_in_parts, outputs_of, step_batch
from tests.support.trl_trainers import bare, gives_logits, gives_logprobs

VOCABULARY = 11
LENGTHS = [4, 2, 1, 5, 3, 3, 6, 1]
"""Tokens of each response; chosen and rejected in turn where they are pairs."""

CHOSEN_FIRST = [0, 2, 4, 6, 1, 3, 5, 7]
"""TRL stacks all chosen over all rejected responses."""


@dataclass(frozen=True)
class Responses:
    """Random responses padded to [B, T].

    Attributes:
        leaf_BT: log-probabilities; both sides take their gradient here.
        logprobs_BT: the same with 0 in the padding, as TRL's models give them.
        reference_BT: of the reference, 0 in the padding.
    """

    mask_BT: Tensor
    leaf_BT: Tensor
    logprobs_BT: Tensor
    reference_BT: Tensor

    @classmethod
    def make(cls, seed: int, lengths: list[int]) -> Responses:
        random = torch.Generator().manual_seed(seed)
        mask_BT = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
        leaf_BT, reference_BT = (-3.0 * torch.rand(mask_BT.shape, generator=random) - 0.01 for _ in range(2))
        leaf_BT.requires_grad_()
        return cls(mask_BT, leaf_BT, leaf_BT * mask_BT, reference_BT * mask_BT)

    @property
    def logprobs_N(self) -> Tensor:
        return self.leaf_BT[self.mask_BT]

    @property
    def signals(self) -> Signals:
        return Signals(old_N=self.logprobs_N.detach(), reference_N=self.reference_BT[self.mask_BT])

    def batch(self, rewards: list[float] | None = None) -> StepBatch:
        lengths = self.mask_BT.sum(1).tolist()
        return step_batch(rewards or [0.0] * len(lengths), list(range(len(lengths))), tokens=lengths)

    def with_prompt(self) -> dict[str, Tensor]:
        """TRL's inputs: one prompt token before each response."""
        ids = torch.zeros(len(self.mask_BT), self.mask_BT.shape[1] + 1, dtype=torch.int64)
        mask = torch.nn.functional.pad(self.mask_BT, (1, 0)).long()
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "completion_mask": mask}


def same(ours: Tensor, theirs: Tensor, leaf: Tensor) -> None:
    """Values and gradients at the leaf are equal, and not all 0."""
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    (found,) = torch.autograd.grad(ours, leaf)
    (expected,) = torch.autograd.grad(theirs, leaf)
    assert expected.abs().max() > 1e-3
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("preset", "changes", "loss_type", "theirs"),
    [
        ("dpo", {"beta": 0.1}, "sigmoid", {"beta": 0.1}),
        ("dpo", {"beta": 1.5}, "sigmoid", {"beta": 1.5}),
        ("ipo", {"beta": 0.2}, "ipo", {"beta": 0.2}),
        ("dpo_hinge", {"beta": 0.3}, "hinge", {"beta": 0.3}),
        ("robust_dpo", {"beta": 0.4, "label_smoothing": 0.2}, "robust", {"beta": 0.4, "label_smoothing": 0.2}),
        ("dpo_norm", {"beta": 2.0}, "sigmoid_norm", {"beta": 2.0}),
        ("exo_pair", {"beta": 0.4, "label_smoothing": 0.05}, "exo_pair", {"beta": 0.4, "label_smoothing": 0.05}),
        ("nca_pair", {"beta": 0.4}, "nca_pair", {"beta": 0.4}),
        ("bco_pair", {"beta": 0.4}, "bco_pair", {"beta": 0.4}),
        ("sppo_hard", {"beta": 0.4}, "sppo_hard", {"beta": 0.4}),
        ("apo_zero", {"beta": 0.4}, "apo_zero", {"beta": 0.4}),
        ("apo_down", {"beta": 0.4}, "apo_down", {"beta": 0.4}),
        ("discopop", {"beta": 0.4}, "discopop", {"beta": 0.4}),
        ("aot", {"beta": 0.4}, "aot", {"beta": 0.4}),
        ("aot", {"beta": 0.4, "label_smoothing": 0.2}, "aot", {"beta": 0.4, "label_smoothing": 0.2}),
    ],
)
def test_the_dpo_family_is_that_of_the_dpo_trainer(
    preset: str, changes: dict[str, Any], loss_type: str, theirs: dict[str, Any]
) -> None:
    compare_with_dpo_trainer(preset, changes, {loss_type: 1.0}, LENGTHS, theirs)


@pytest.mark.parametrize("changes", [{"beta": 0.3}, {"beta": 0.3, "form": {"hinge": 0.5, "sft": 2.0}}])
def test_several_losses_are_added_with_their_weights(changes: dict[str, Any]) -> None:
    # TRL averages the likelihood over tokens, so chosen responses have one length.
    form = {"sigmoid": 0.8, "bco_pair": 0.2, "sft": 1.0} | changes.get("form", {})
    compare_with_dpo_trainer("mpo", changes, form, [3, 2, 3, 5, 3, 1, 3, 4], {"beta": 0.3})


def compare_with_dpo_trainer(
    preset: str, changes: dict[str, Any], form: dict[str, float], lengths: list[int], theirs: dict[str, Any]
) -> None:
    from trl.trainer.dpo_trainer import DPOTrainer

    responses = Responses.make(1, lengths)
    settings = {"label_smoothing": 0.0} | theirs
    trainer = bare(
        DPOTrainer,
        loss_types=[*form],
        loss_weights=[*form.values()],
        f_divergence_type="reverse_kl",
        ld_alpha=None,
        precompute_ref_logps=True,
        use_weighting=False,
        args=SimpleNamespace(discopop_tau=0.05),
        **settings,
    )
    inputs = {name: value[CHOSEN_FIRST] for name, value in responses.with_prompt().items()}
    chosen, rejected = responses.reference_BT.sum(1)[CHOSEN_FIRST].chunk(2)
    inputs |= {"ref_chosen_logps": chosen, "ref_rejected_logps": rejected}
    logprobs_BT = responses.logprobs_BT[CHOSEN_FIRST]
    expected = trainer._compute_loss(gives_logprobs(logprobs_BT), inputs, return_outputs=False)
    found = loss_in_parts(
        build_algorithm(preset, {"loss": changes}), responses.batch(), responses.signals, responses.logprobs_N
    )
    same(found, expected, responses.leaf_BT)


def test_the_order_of_aot_is_that_of_log_ratios_per_token_where_the_loss_is() -> None:
    responses = Responses.make(5, LENGTHS)
    batch, signals = responses.batch(), responses.signals
    algorithm = build_algorithm("aot", {"loss": {"beta": 0.4, "length_normalised": True}})
    found = loss_in_parts(algorithm, batch, signals, responses.logprobs_N)
    means = [
        (values * responses.mask_BT).sum(1) / responses.mask_BT.sum(1)
        for values in (responses.leaf_BT, responses.reference_BT)
    ]
    policy, reference = (each.view(-1, 2)[:, 0] - each.view(-1, 2)[:, 1] for each in means)
    expected = -torch.nn.functional.logsigmoid(0.4 * (policy.sort().values - reference.sort().values)).mean()
    same(found, expected, responses.leaf_BT)


def test_pairs_of_other_micro_batches_are_sorted_too_and_those_of_other_updates_are_not() -> None:
    responses, algorithm = Responses.make(3, LENGTHS), build_algorithm("aot", {"loss": {"beta": 0.4}})
    batch, signals = responses.batch(), responses.signals
    whole, in_parts = (
        loss_in_parts(algorithm, batch, signals, responses.logprobs_N, parts)
        for parts in (None, [[4, 5], [0, 1, 6, 7], [2, 3]])
    )
    same(in_parts, whole, responses.leaf_BT)

    members_B = torch.arange(8) < 4
    of_update = algorithm.restrict(algorithm.plan(batch, signals), members_B)
    alone = algorithm.plan(batch.only(members_B), signals.only(members_B[batch.sequence_N]))
    index_N = members_B[batch.sequence_N].nonzero()[:, 0]
    found, expected = (
        algorithm.objective(plan, outputs_of(plan, index_N, responses.logprobs_N[index_N]))[0]
        for plan in (of_update, alone)
    )
    same(found, expected, responses.leaf_BT)
    # A pair with an empty answer is not trained, and takes no place in the order.
    tokens = [*LENGTHS]
    tokens[2] = 0
    shortened = Responses.make(3, tokens)
    kept_B = torch.tensor(tokens).view(-1, 2).all(dim=1).repeat_interleave(2)
    without = algorithm.plan(
        shortened.batch().only(kept_B), shortened.signals.only(kept_B[shortened.batch().sequence_N])
    )
    with_it = algorithm.plan(shortened.batch(), shortened.signals)
    assert with_it.over_update_B is not None and without.over_update_B is not None
    assert torch.equal(with_it.over_update_B[kept_B], without.over_update_B)
    assert not torch.equal(of_update.over_update_B, algorithm.plan(batch, signals).over_update_B)


@pytest.mark.parametrize(("preset", "loss_type"), [("online_dpo", "sigmoid"), ("ipo", "ipo")])
def test_pairs_formed_from_rewards_are_those_of_the_online_dpo_trainer(preset: str, loss_type: str) -> None:
    # Groups of two, rollout after rollout, with different rewards: TRL makes a pair of equal ones.
    rewards = [0.5, 1.5, 0.25, -1.0, 0.0, 0.1, 3.0, 2.0]
    responses = Responses.make(8, LENGTHS)
    expected = online_dpo_loss(responses, torch.tensor(rewards), loss_type)
    offsets = np.cumsum([0, *(length + 1 for length in LENGTHS)])
    is_prompt = np.isin(np.arange(offsets[-1]), offsets[:-1])
    batch = pad_batch(
        PackedColumns(
            token_ids=(np.arange(offsets[-1]) * ~is_prompt, offsets),
            loss_mask=(~is_prompt, offsets),
            behavior_logprobs=None,
            rewards=rewards,
            group_ids=np.arange(8) // 2,
            rollout_index=np.arange(8) % 2,
            state=list(np.arange(8)[:, None]),
        )
    )
    # TRL's ipo sums log-ratios, as the paper does.
    changes = {"loss": {"beta": 0.3} | ({"length_normalised": False} if preset == "ipo" else {}), "pairs": {}}
    algorithm = build_algorithm(preset, changes)
    assert algorithm.config.pairs is not None
    formed, _ = paired(batch, algorithm.config.pairs)
    assert formed.state_BA is not None and formed.state_BA[:, 0].tolist() == [1, 0, 2, 3, 5, 4, 6, 7]
    mask_BT = responses.mask_BT[formed.state_BA[:, 0]]
    signals = Signals(reference_N=responses.reference_BT[formed.state_BA[:, 0]][mask_BT])
    logprobs_N = responses.leaf_BT[formed.state_BA[:, 0]][mask_BT]
    same(loss_in_parts(algorithm, formed.for_algorithm(1), signals, logprobs_N), expected, responses.leaf_BT)


def online_dpo_loss(responses: Responses, rewards_B: Tensor, loss_type: str) -> Tensor:
    """TRL's loss of a step on these responses, two for each prompt; it stacks the first ones over the second ones."""
    from trl.experimental.online_dpo import OnlineDPOTrainer

    order = [*range(0, 8, 2), *range(1, 8, 2)]
    ids_BT = torch.zeros(responses.mask_BT.shape, dtype=torch.int64)
    model = SimpleNamespace(train=lambda: None, logprobs=responses.logprobs_BT[order])
    losses: list[Tensor] = []
    accelerator = SimpleNamespace(gather_for_metrics=lambda x: x, backward=losses.append)
    arguments = SimpleNamespace(
        use_vllm=False,
        missing_eos_penalty=None,
        loss_type=loss_type,
        torch_empty_cache_steps=None,
        optim="adamw_torch",
        n_gpu=1,
        gradient_accumulation_steps=1,
    )
    trainer = bare(
        OnlineDPOTrainer,
        args=arguments,
        accelerator=accelerator,
        _beta=0.3,
        stats=defaultdict(list),
        eos_token_ids=[1],
        reward_funcs=None,
        ref_model=SimpleNamespace(logprobs=responses.reference_BT[order]),
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        _generate=lambda *_: (ids_BT[:, :1], ids_BT[:, :1] + 1, ids_BT, responses.mask_BT[order].long(), None),
        _forward=lambda of_model, *_: of_model.logprobs,
        _calculate_rewards_from_functions=lambda **_: rewards_B[order],
    )
    trainer.training_step(model, {"prompt": ["?"] * 4})
    return losses[0]


class TestKTO:
    # Sequences 0, 3, 4 and 7 are desirable; of the other rewards one is the threshold itself.
    rewards = (1.0, 0.5, 0.0, 2.0, 0.6, -1.0, 0.5, 0.51)
    labels = (1, 0, 0, 1, 1, 0, 0, 1)

    @pytest.mark.parametrize(("z", "wanted"), [(0.7, 0.7), (-0.4, 0.0)])
    def test_is_that_of_the_kto_trainer(self, z: float, wanted: float) -> None:
        expected, metrics, responses = self.theirs(z)
        algorithm = build_algorithm(
            "kto", {"loss": {"beta": 0.3, "threshold": 0.5, "desirable_weight": 1.2, "undesirable_weight": 0.8}}
        )
        signals = Signals(reference_N=responses.signals.reference_N, mismatched_kl=torch.tensor(z))
        batch = responses.batch(list(self.rewards))
        found = loss_in_parts(algorithm, batch, signals, responses.logprobs_N)
        same(found, expected, responses.leaf_BT)
        assert metrics["kl"] == [pytest.approx(wanted)]  # a negative estimate is 0

    def theirs(self, z: float) -> tuple[Tensor, dict[str, list[float]], Responses]:
        """TRL's loss where the mean log-ratio of its mismatched pairs is z."""
        from trl.trainer.kto_trainer import KTOTrainer

        responses = Responses.make(2, LENGTHS)
        inputs = responses.with_prompt()
        kl = {f"KL_{name}": value.clone() for name, value in inputs.items()}
        kl["KL_input_ids"][:, 0] = 1
        around = torch.tensor([3.0, -3.0, 2.0, -2.0, 0.5, -0.5, 0.0, 0.0])
        inputs |= kl | {
            "label": torch.tensor(self.labels, dtype=torch.bool),
            "ref_logps": responses.reference_BT.sum(1),
            "ref_KL_logps": responses.reference_BT.sum(1) - z - around,
        }
        trainer = bare(
            KTOTrainer,
            loss_type="kto",
            beta=0.3,
            desirable_weight=1.2,
            undesirable_weight=0.8,
            calculate_KL=True,
            precompute_ref_logps=True,
        )
        model = gives_logprobs(responses.logprobs_BT, responses.reference_BT)
        return trainer._compute_loss(model, inputs, return_outputs=False), trainer._metrics["eval"], responses


@pytest.mark.parametrize("centering", [0.0, 0.01])
@pytest.mark.parametrize("with_margin", [False, True])
def test_the_reward_model_is_that_of_the_reward_trainer(centering: float, with_margin: bool) -> None:
    from trl.trainer.reward_trainer import RewardTrainer

    scores_B1 = torch.tensor([[0.3], [-1.2], [2.0], [2.5], [0.0], [0.0]], requires_grad=True)
    rewards = [3.0, 1.0, 2.0, 1.5, 1.0, 1.0]
    order = [0, 2, 4, 1, 3, 5]
    trainer = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=centering or None))
    # Our margin: 0.1 + 0.5 · difference of rewards.
    inputs = {"margin": torch.tensor([1.1, 0.35, 0.1])} if with_margin else {}
    expected = trainer.compute_loss(gives_logits(scores_B1[order]), inputs)
    ours = {"centering": centering} | ({"margin": 0.1, "reward_margin": 0.5} if with_margin else {})
    algorithm = build_algorithm("reward_model", {"loss": ours})
    found = loss_in_parts(
        algorithm, step_batch(rewards, list(range(6))), Signals(), torch.zeros(6), values_N=scores_B1[:, 0]
    )
    same(found, expected, scores_B1)


class TestFromLogits:
    """ORPO and CPO take logits: one prompt token, then the response."""

    @staticmethod
    def logits(lengths: list[int]) -> tuple[Tensor, Tensor, dict[str, Tensor], Tensor]:
        """The leaf [B, T + 1, V], in our order; its log-probabilities [N]; TRL's inputs; TRL's order."""
        random = torch.Generator().manual_seed(3)
        num, width = len(lengths), max(lengths) + 1
        logits = (2.0 * torch.randn(num, width, VOCABULARY, generator=random)).requires_grad_()
        ids = torch.randint(VOCABULARY, (num, width), generator=random)
        mask = torch.arange(width) <= torch.tensor(lengths)[:, None]
        responds = mask.clone()
        responds[:, 0] = False
        logprobs_N = logits[:, :-1].log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0][responds[:, 1:]]
        order = torch.tensor([*range(0, num, 2), *range(1, num, 2)])
        labels = ids.where(responds, -100)
        inputs = {}
        for side, rows in zip(("chosen", "rejected"), order.chunk(2), strict=True):
            inputs |= {
                f"{side}_input_ids": ids[rows],
                f"{side}_attention_mask": mask[rows].long(),
                f"{side}_labels": labels[rows],
            }
        return logits, logprobs_N, inputs, order

    def test_orpo_with_chosen_responses_of_one_length_is_that_of_the_orpo_trainer(self) -> None:
        # The stated difference: TRL's likelihood has equal weight per token of the micro-batch.
        from trl.experimental.orpo import ORPOTrainer

        lengths = [4, 2, 4, 5, 4, 1]
        logits, logprobs_N, inputs, order = self.logits(lengths)
        trainer = bare(ORPOTrainer, beta=0.25, padding_value=0)
        expected, _ = trainer.get_batch_loss_metrics(gives_logits(logits[order]), inputs)
        algorithm = build_algorithm("orpo", {"loss": {"odds_coef": 0.25}})
        found = loss_in_parts(algorithm, step_batch([0.0] * 6, list(range(6)), tokens=lengths), Signals(), logprobs_N)
        same(found, expected, logits)

    def test_orpo_s_odds_ratio_is_that_of_the_orpo_trainer_for_any_length(self) -> None:
        from trl.experimental.orpo import ORPOTrainer

        responses = Responses.make(4, LENGTHS)
        means_B = responses.logprobs_BT.sum(1) / torch.tensor(LENGTHS)
        losses, *_ = bare(ORPOTrainer, beta=0.7).odds_ratio_loss(means_B[0::2], means_B[1::2])
        expected = -means_B[0::2].mean() - losses.mean()
        algorithm = build_algorithm("orpo", {"loss": {"odds_coef": 0.7}})
        found = loss_in_parts(algorithm, responses.batch(), Signals(), responses.logprobs_N)
        same(found, expected, responses.leaf_BT)

    @pytest.mark.parametrize(("beta", "gamma"), [(2.0, 1.0), (0.1, 0.5), (2.5, 0.0)])
    def test_simpo_is_that_of_the_cpo_trainer(self, beta: float, gamma: float) -> None:
        from trl.experimental.cpo import CPOTrainer

        logits, logprobs_N, inputs, order = self.logits(LENGTHS)
        trainer = bare(
            CPOTrainer,
            loss_type="simpo",
            beta=beta,
            simpo_gamma=gamma,
            alpha=0.0,
            cpo_alpha=0.0,
            label_smoothing=0.0,
            pad_token_id=0,
        )
        expected, _ = trainer.get_batch_loss_metrics(gives_logits(logits[order]), inputs)
        algorithm = build_algorithm("simpo", {"loss": {"beta": beta, "gamma": gamma}})
        found = loss_in_parts(algorithm, step_batch([0.0] * 8, list(range(8)), tokens=LENGTHS), Signals(), logprobs_N)
        same(found, expected, logits)

    @pytest.mark.parametrize("nll_coef", [0.0, 1.0, 0.3])
    def test_cpo_is_that_of_the_cpo_trainer_and_the_likelihood_per_token(self, nll_coef: float) -> None:
        from trl.experimental.cpo import CPOTrainer

        responses = Responses.make(7, LENGTHS)
        sums_B, lengths_B = responses.logprobs_BT.sum(1), torch.tensor(LENGTHS)
        trainer = bare(CPOTrainer, loss_type="sigmoid", beta=0.3, alpha=0.0, label_smoothing=0.0)
        losses, *_ = trainer.cpo_loss(sums_B[0::2], sums_B[1::2])
        expected = losses.mean() - nll_coef * (sums_B / lengths_B)[0::2].mean()
        algorithm = build_algorithm("cpo", {"loss": {"beta": 0.3, "nll_coef": nll_coef}})
        same(loss_in_parts(algorithm, responses.batch(), Signals(), responses.logprobs_N), expected, responses.leaf_BT)

    def test_cdpo_with_a_reference_of_zero_is_the_smoothed_cpo(self) -> None:
        from trl.experimental.cpo import CPOTrainer

        logits, logprobs_N, inputs, order = self.logits(LENGTHS)
        trainer = bare(
            CPOTrainer, loss_type="sigmoid", beta=0.3, alpha=0.0, cpo_alpha=0.0, label_smoothing=0.1, pad_token_id=0
        )
        expected, _ = trainer.get_batch_loss_metrics(gives_logits(logits[order]), inputs)
        algorithm = build_algorithm("cdpo", {"loss": {"beta": 0.3}})
        signals = Signals(reference_N=torch.zeros(len(logprobs_N)))
        found = loss_in_parts(algorithm, step_batch([0.0] * 8, list(range(8)), tokens=LENGTHS), signals, logprobs_N)
        same(found, expected, logits)


@pytest.mark.parametrize(("preset", "loss_type"), [("sft", "nll"), ("cpt", "nll"), ("dft", "dft")])
def test_imitation_is_that_of_the_sft_trainer(preset: str, loss_type: str) -> None:
    from trl.trainer.sft_trainer import SFTTrainer

    responses = Responses.make(5, LENGTHS)
    arguments = SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False)
    trainer = bare(SFTTrainer, args=arguments, compute_loss_func=None, label_smoother=None)
    inputs = responses.with_prompt()
    expected = trainer.compute_loss(gives_logprobs(responses.logprobs_BT), inputs | {"labels": inputs["input_ids"]})
    algorithm = build_algorithm(preset)
    found = loss_in_parts(algorithm, responses.batch(), Signals(), responses.logprobs_N)
    same(found, expected, responses.leaf_BT)


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_the_divergence_over_the_vocabulary_is_that_of_the_gkd_trainer(beta: float) -> None:
    from trl.experimental.gkd import GKDTrainer

    random = torch.Generator().manual_seed(6)
    shape = (2, 3, VOCABULARY)
    student, teacher = (3.0 * torch.randn(shape, generator=random) for _ in range(2))
    student.requires_grad_()
    labels = torch.tensor([[1, 1, 1], [1, -100, -100]])
    expected = GKDTrainer.generalized_jsd_loss(student, teacher, labels=labels, beta=beta)
    algorithm = build_algorithm("jsd", {"loss": {"beta": beta}})
    assert isinstance(algorithm.loss, HeadTerm)
    counted = labels != -100
    read_N = algorithm.loss.read(student[counted], teacher[counted])
    found = loss_in_parts(algorithm, step_batch([0.0, 0.0], tokens=[3, 1]), Signals(), torch.zeros(4), read_N=read_N)
    same(found, expected, student)
