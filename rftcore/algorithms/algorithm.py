"""An algorithm, composed of the parts that a preset or a user chose.

`plan` looks at the whole optimizer batch once, over all ranks, and fixes every advantage and every weight. `objective` then gives what
a micro-batch adds to the batch's loss, which is

    L = (1 - μ) Σ w_u · policy_u + μ Σ w_u · expert_u + coef_kl Σ w_t · KL_t - coef_entropy Σ w_t · H_t

with units u of the loss term (tokens, sequences or pairs) and one set of weights w per term, each with its own denominator.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rftcore.algorithms.advantages.rollouts import rollouts
from rftcore.algorithms.aggregation import shares, token_weights
from rftcore.algorithms.base import (
    Column,
    Credit,
    Loss,
    Part,
    Signal,
    Signals,
    StepBatch,
    Term,
    TokenView,
)
from rftcore.algorithms.config import AlgorithmConfig
from rftcore.algorithms.correction import combined
from rftcore.algorithms.inputs import refuse_missing_columns, refuse_missing_rewards
from rftcore.algorithms.kl import adapted, with_gradient_of_k2
from rftcore.algorithms.parts import AlgorithmParts
from rftcore.algorithms.plan import Plan, TokenOutputs

if TYPE_CHECKING:
    from torch import Tensor


class Algorithm:
    """The objective of a trainer; `build_algorithm` builds it.

    Args:
        name: of the preset.
    """

    def __init__(self, name: str, config: AlgorithmConfig, parts: AlgorithmParts) -> None:
        self.name = name
        self.config = config
        self.loss = parts.loss
        self.aggregation = parts.aggregation
        self.advantage = parts.advantage
        self.mask = parts.mask
        self.kl = parts.kl if config.kl.is_on else None
        self.corrections = parts.corrections
        self.expert = parts.expert
        self.value = parts.value
        self._kl_coef = config.kl.coef

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that the parts need for each token before the step."""
        needed: set[Signal] = set()
        for part in self._parts:
            needed |= part.signals
        if self.kl is not None:
            needed.add("reference")
        if self.config.old_logprobs == "recomputed":
            needed.add("old")
        if self._compares and ("old" not in needed or self.config.old_logprobs == "behavior"):
            needed.add("behavior")
        return frozenset(needed)

    @property
    def columns(self) -> frozenset[Column]:
        """The entries per sequence that a batch must have in addition to those of every batch."""
        return frozenset[Column]().union(*(part.columns for part in self._parts))

    @property
    def optional_columns(self) -> frozenset[Column]:
        """The entries per sequence that the parts read if a batch has them."""
        return frozenset[Column]().union(*(part.optional_columns for part in self._parts)) - self.columns

    @property
    def uses_behavior_logprobs(self) -> bool:
        """Whether each token needs the log-probability under the policy that sampled it."""
        return "behavior" in self.signals

    @property
    def learns_from_samples(self) -> bool:
        """Whether log-probabilities are those of the distribution that was sampled from, whose logits are divided by the temperature.

        The gradient Σ A ∇log π has the mean 0 for a constant A only under the distribution of the samples. Under another one, equal
        rewards would change the policy.
        """
        if self.uses_behavior_logprobs:
            return True
        return self.loss.uses_advantages and self.advantage is not None and not self.advantage.imitates

    @property
    def reads_stored_teacher(self) -> bool:
        """Whether it reads a teacher's log-probabilities that are stored with the tokens, instead of those of its own teacher."""
        return "teacher" in self.signals and self.config.teacher is None

    @property
    def uses_rewards(self) -> bool:
        if self.forms_pairs:
            return True
        return any(part is not None and part.uses_rewards for part in (self.loss, self.advantage))

    @property
    def min_group_size(self) -> int:
        smallest = max(part.min_group_size for part in (self.loss, self.advantage) if part is not None)
        return max(2, smallest) if self.forms_pairs else smallest

    @property
    def group_relative(self) -> bool:
        """Whether it compares the rollouts of a group, so that groups must be whole."""
        return self.min_group_size > 1

    @property
    def pairwise(self) -> bool:
        return self.loss.unit == "pair"

    @property
    def forms_pairs(self) -> bool:
        """Whether its pairs are formed from the rewards of drawn groups."""
        return self.config.pairs is not None

    @property
    def draws_pairs(self) -> bool:
        """Whether its batches are stored pairs."""
        return self.pairwise and not self.forms_pairs

    @property
    def masks_each_update(self) -> bool:
        """Whether the mask is chosen anew before each optimizer update of a step (`restrict`)."""
        return self.mask is not None and self.mask.each_update

    @property
    def trains_scorer(self) -> bool:
        """Whether the trained model gives scores instead of log-probabilities."""
        return self.loss.of_scorer

    @property
    def _parts(self) -> list[Part]:
        parts = (self.loss, self.advantage, self.mask, self.kl, *self.corrections, self.expert, self.value)
        return [part for part in parts if part is not None]

    @property
    def _compares(self) -> bool:
        return self.loss.compares or (self.kl is not None and (self.config.kl.where == "reward" or self.kl.compares))

    def plan(self, batch: StepBatch, signals: Signals) -> Plan:
        """Compute the advantages and weights of a step.

        Args:
            batch: the whole batch, over all ranks, on the CPU.
            signals: those that `signals` names.

        Raises:
            RftError: a reward that is not a number, where rewards are used, or a column that the batch lacks.
        """
        config = self.config
        sampled_B = ~batch.expert_B if self.expert is not None else batch.expert_B.new_ones(batch.num_sequences)
        if self.uses_rewards:
            refuse_missing_rewards(batch, sampled_B)
        refuse_missing_columns(batch, self.columns)
        metrics = dict[str, float]()
        if signals.mismatched_kl is not None:
            metrics["kl_mismatched"] = signals.mismatched_kl.item()
        is_behavior = signals.old_N is None or config.old_logprobs == "behavior"
        anchor_N = (batch.behavior_N if is_behavior or signals.old_N is None else signals.old_N).nan_to_num(nan=0.0)
        credit = self._credit(batch, signals, anchor_N, sampled_B)
        advantages_N, counted_N = credit.advantages_N, sampled_B[batch.sequence_N]
        metrics |= credit.metrics
        if credit.counted_N is not None:
            counted_N = counted_N & credit.counted_N
        kept_N = None if self.mask is None else self.mask(batch, signals, advantages_N)
        if kept_N is not None:
            metrics["mask_kept"] = _share(kept_N)
        corrected_N = advantages_N.new_ones(len(advantages_N))
        if self.corrections:
            corrected_N, measured = combined(self.corrections, batch, signals)
            metrics |= measured
        corrected_N = corrected_N.where(counted_N, 0.0)  # NaN for tokens that no policy sampled
        if self.pairwise:
            metrics["pairs_dropped"] = float(batch.num_sequences // 2 - int(batch.whole_pairs_B.sum()) // 2)
        if config.expert is not None:
            metrics["expert_coef"] = config.expert.coef.at(batch.step)
            metrics["expert_sequences"] = float(batch.expert_B.sum())
        everything_B = batch.expert_B.new_ones(batch.num_sequences)
        return Plan(
            batch=batch,
            signals=signals,
            anchor_N=anchor_N,
            advantages_N=advantages_N,
            returns_N=credit.returns_N,
            counted_N=counted_N,
            corrected_N=corrected_N,
            kept_N=kept_N,
            kl_coef=self._kl_coef,
            metrics=metrics,
            over_update_B=self.loss.over_update(batch, signals, everything_B),
            **_update_weights(self, batch, counted_N, self._factor(corrected_N, kept_N), everything_B),
        )

    def restrict(self, plan: Plan, members_B: Tensor | None, signals: Signals | None = None) -> Plan:
        """Return the plan of an optimizer update on some of the step's sequences, with the same advantages and its own weights.

        A mask that is chosen for each update is chosen from the update's own tokens.

        Args:
            members_B: bool; whole groups, or whole pairs. None for all.
            signals: those that such a mask reads, of the policy before the update; None while it is the policy before the step.
        """
        if members_B is None:
            if not self.masks_each_update:
                return plan
            members_B = plan.batch.expert_B.new_ones(plan.batch.num_sequences)
        if self.mask is not None and self.mask.each_update:
            members_N, signals = members_B[plan.batch.sequence_N], signals or plan.signals
            chosen_N = self.mask(plan.batch.only(members_B), signals.only(members_N), plan.advantages_N[members_N])
            kept_N = members_N.masked_scatter(members_N, chosen_N)
            plan = replace(plan, kept_N=kept_N, metrics=plan.metrics | {"mask_kept": _share(chosen_N)})
        factor_N = self._factor(plan.corrected_N, plan.kept_N)
        over_update_B = self.loss.over_update(plan.batch, plan.signals, members_B)
        return replace(
            plan, over_update_B=over_update_B, **_update_weights(self, plan.batch, plan.counted_N, factor_N, members_B)
        )

    def _factor(self, corrected_N: Tensor, kept_N: Tensor | None) -> Tensor:
        """Return the factor of masks and corrections for each token's weight in the policy loss, float32 [N]."""
        return corrected_N if kept_N is None or self.loss.reads_mask else corrected_N * kept_N

    def objective(self, plan: Plan, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return what a micro-batch adds to the batch's loss and to its metrics, which are means over the whole batch."""
        index_N, view = outputs.index_N, plan.view(outputs)
        total, metrics = _weighted(plan, index_N, view, self.loss, plan.policy_weights_N)
        metrics |= plan.distances(outputs, from_behavior=self.uses_behavior_logprobs)
        if self.expert is not None:
            assert plan.expert_weights_N is not None
            loss, expert_metrics = _weighted(plan, index_N, view, self.expert, plan.expert_weights_N)
            total = total + loss
            metrics |= {f"expert_{name}": value for name, value in expert_metrics.items()} | {
                "expert_loss": loss.detach()
            }
        share = 1.0 / max(1, plan.num_tokens)
        if plan.kl_weights_N is not None:
            kl_N = self._penalty(view)
            total = total + plan.kl_coef * (kl_N * plan.kl_weights_N[index_N].to(kl_N.device)).sum()
            metrics["kl_reference"] = kl_N.detach().sum() * share
        if plan.entropy_weights_N is not None:
            assert view.entropy_N is not None
            weights_N = plan.entropy_weights_N[index_N].to(view.entropy_N.device)
            total = total - self.config.entropy.coef * (view.entropy_N * weights_N).sum()
        return total, metrics

    def _penalty(self, view: TokenView) -> Tensor:
        assert self.kl is not None and view.reference_N is not None
        kl_N = self.kl(view.logprobs_N, view.reference_N, view.anchor_N)
        return with_gradient_of_k2(kl_N, view.logprobs_N, view.reference_N) if self.config.kl.straight_through else kl_N

    def critic_objective(self, plan: Plan, outputs: TokenOutputs) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the same for the critic, whose loss is the mean over all tokens of the batch, weighted by how they were drawn."""
        assert self.value is not None
        value_loss = self.value(plan.view(outputs))
        share = 1.0 / max(1, plan.num_tokens)
        metrics = {name: value.detach().sum() * share for name, value in value_loss.metrics_U.items()}
        drawn_N = plan.batch.importance_weights_B[plan.batch.sequence_N[outputs.index_N]].to(value_loss.loss_U.device)
        loss = (value_loss.loss_U * drawn_N).sum() * share
        return loss, metrics | {"value_loss": loss.detach()}

    def observe(self, plan: Plan, metrics: Mapping[str, float]) -> None:
        """Adapt the KL coefficient after a step with these metrics."""
        if "kl_reference" in metrics:
            self._kl_coef = adapted(self._kl_coef, self.config.kl, metrics["kl_reference"], plan.batch.num_sequences)

    def state_dict(self) -> dict[str, float]:
        """Return what changes from step to step, for a checkpoint."""
        return {"kl_coef": self._kl_coef} if self.config.kl.target is not None else {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the state of a checkpoint."""
        self._kl_coef = state.get("kl_coef", self._kl_coef)

    def _credit(self, batch: StepBatch, signals: Signals, anchor_N: Tensor, sampled_B: Tensor) -> Credit:
        """Compute advantages from the sequences that no expert wrote; the others get 0."""
        if self.advantage is None:
            return Credit(advantages_N=anchor_N.new_zeros(len(anchor_N)))
        if bool(sampled_B.all()):
            batch, metrics = self._with_kl_in_reward(batch, signals, anchor_N)
            credit = self.advantage(batch, signals)
            return replace(credit, metrics=metrics | credit.metrics)
        sampled_N = sampled_B[batch.sequence_N]
        signals, batch = signals.only(sampled_N), batch.only(sampled_B)
        batch, metrics = self._with_kl_in_reward(batch, signals, anchor_N[sampled_N])
        credit = self.advantage(batch, signals)

        def spread(values: Tensor | None) -> Tensor | None:
            return None if values is None else values.new_zeros(len(sampled_N)).masked_scatter(sampled_N, values)

        advantages_N = spread(credit.advantages_N)
        assert advantages_N is not None
        return Credit(
            advantages_N=advantages_N,
            returns_N=spread(credit.returns_N),
            counted_N=spread(credit.counted_N),
            metrics=metrics | credit.metrics,
        )

    def _with_kl_in_reward(
        self, batch: StepBatch, signals: Signals, anchor_N: Tensor
    ) -> tuple[StepBatch, dict[str, float]]:
        if self.kl is None or self.config.kl.where == "loss":
            return batch, {}
        assert signals.reference_N is not None
        penalty_N = self.kl(anchor_N, signals.reference_N, anchor_N)
        rewards_N = penalty_N.new_zeros(len(penalty_N)) if batch.token_rewards_N is None else batch.token_rewards_N
        metrics = {"kl_reference": penalty_N.mean().item() if len(penalty_N) else 0.0}
        return replace(batch, token_rewards_N=rewards_N - self._kl_coef * penalty_N), metrics


def _update_weights(
    algorithm: Algorithm, batch: StepBatch, counted_N: Tensor, factor_N: Tensor, members_B: Tensor
) -> dict[str, Any]:
    """Return the fields of a plan that depend on the sequences of the update."""
    config = algorithm.config
    members_N, expert_N = members_B[batch.sequence_N], batch.expert_B[batch.sequence_N]
    drawn_N = batch.importance_weights_B[batch.sequence_N]
    # An experience may be in several pairs, and each is a pair of its own.
    rollout_B = batch.group_B.new_tensor(range(batch.num_sequences)) if algorithm.pairwise else rollouts(batch)

    def weigh(tokens_N: Tensor) -> Tensor:
        return token_weights(batch.sequence_N, rollout_B, algorithm.aggregation, tokens_N) * drawn_N

    weights_N = weigh(members_N & counted_N)
    policy_weights_N, expert_weights_N = weights_N * factor_N, None
    if config.expert is not None:
        coef = config.expert.coef.at(batch.step)
        expert_weights_N, policy_weights_N = coef * weigh(members_N & expert_N), (1.0 - coef) * policy_weights_N
    num_tokens = int(members_N.sum())
    num_units, unit_weights_B = num_tokens, batch.importance_weights_B
    if algorithm.loss.unit == "sequence":
        share_B = shares(batch.tokens_B * members_B, rollout_B)
        num_units = int((share_B > 0).sum())
        # Divided by the number of rollouts, as each counts once; metrics are means over sequences.
        unit_weights_B = unit_weights_B * (share_B * (num_units / max(1.0, float(share_B.sum())))).float()
    elif algorithm.pairwise:
        whole_B = batch.whole_pairs_B
        num_units, unit_weights_B = int((members_B & whole_B).sum()) // 2, unit_weights_B * whole_B
    return {
        "policy_weights_N": policy_weights_N,
        "expert_weights_N": expert_weights_N,
        "kl_weights_N": weights_N if algorithm.kl is not None and config.kl.where == "loss" else None,
        "entropy_weights_N": weights_N if config.entropy.coef > 0 else None,
        "unit_weights_B": unit_weights_B / max(1, num_units),
        "num_units": num_units,
        "num_tokens": num_tokens,
    }


def _weighted(
    plan: Plan, index_N: Tensor, view: TokenView, term: Term, weights_N: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the weighted loss of a term on a micro-batch, and its share of the batch's metrics."""
    term_loss: Loss = term(view)
    share = 1.0 / max(1, plan.num_units)
    if term.unit == "token":
        metrics = {name: value.detach().sum() * share for name, value in term_loss.metrics_U.items()}
        return (term_loss.loss_U * weights_N[index_N].to(term_loss.loss_U.device)).sum(), metrics
    sequences = view.sequences
    sequence_U = 2 * sequences.pair_P if term.unit == "pair" else sequences.sequence_S
    weights_U = plan.unit_weights_B[sequence_U].to(term_loss.loss_U.device)
    counted_U = weights_U > 0
    metrics = {name: value.detach().where(counted_U, 0.0).sum() * share for name, value in term_loss.metrics_U.items()}
    return (term_loss.loss_U * weights_U).sum(), metrics


def _share(kept_N: Tensor) -> float:
    return kept_N.float().mean().item() if len(kept_N) else 1.0
