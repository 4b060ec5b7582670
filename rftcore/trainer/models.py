"""The models of a run, and what they compute of a batch: the signals before a step, and the view of a micro-batch.

Invariants:
- Signals are computed without gradient, on the weights before the step, and lie on the CPU.
- Only what the algorithm's parts declare in `needs` is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import HeadTerm, Signal, Signals, TokenView
from rftcore.algorithms.kl import k3
from rftcore.algorithms.masks.clip_v import expected_discriminator
from rftcore.algorithms.plan import Plan
from rftcore.trainer.batches.forms import answered_pairs, mismatched, paired, scored, whole
from rftcore.trainer.batches.micro_batches import MicroBatch, split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.network.head import Output, logprobs_and_entropy, read_logits
from rftcore.trainer.network.lora import without_adapters, without_dropout
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.routing import ROUTING
from rftdata.errors import ConfigError, RftError


@dataclass(frozen=True, kw_only=True)
class Models:
    """The policy, or the reward model in its place, and the models beside it.

    Attributes:
        temperature: of the distributions that log-probabilities are of.
        reference: None, too, where the policy without its adapters is the reference.
        mark: called after each micro-batch; see `StepProgress`.
    """

    algorithm: Algorithm
    temperature: float
    policy: Network
    reference: Network | None
    teacher: Network | None
    critic: Network | None
    mark: Callable[[], None]

    def as_computed(self, batch: TrainBatch) -> tuple[TrainBatch, dict[str, float]]:
        """The batch with the pairs and the tokens that the algorithm trains on, and metrics of how it was made.

        Raises:
            RftError: pairs are formed from rewards, and one is not a finite number.
        """
        metrics, rules = dict[str, float](), self.algorithm.config.pairs
        if rules is not None:
            batch, metrics = paired(batch, rules)
        if self.algorithm.pairwise:
            # Not even computed: experts would be balanced for their tokens, and updates dealt with them.
            batch, metrics["pairs_dropped"] = answered_pairs(batch)
        if self.algorithm.trains_scorer:
            return scored(batch), metrics
        return (whole(batch) if self.algorithm.config.train_on == "all" else batch), metrics

    def split(self, batch: TrainBatch, members: list[int] | None = None) -> list[MicroBatch]:
        """This rank's micro-batches of some of the experiences, by default of all."""
        shares = split_batch(batch, self.policy.cutting, members)
        return shares[self.policy.grid.data_rank]

    def updated(
        self, plan: Plan, batch: TrainBatch, micro_batches: list[MicroBatch], members: list[int] | None, *, again: bool
    ) -> Plan:
        """The plan of an optimizer update.

        Args:
            micro_batches: those of the update, on this rank.
            members: its sequences; None for all.
            again: whether the policy has changed since the step began.
        """
        num = plan.batch.num_sequences
        members_B = torch.ones(num, dtype=torch.bool)
        if members is not None:
            members_B = torch.zeros(num, dtype=torch.bool)
            members_B[members] = True
        mask = self.algorithm.mask
        if mask is not None and mask.each_update:
            num_tokens = len(plan.batch.sequence_N)
            signals = self.signals(batch, micro_batches, num_tokens, mask.signals) if again else plan.signals
            return self.algorithm.remask(plan, signals, members_B)
        return plan if members is None else self.algorithm.restrict(plan, members_B)

    @torch.no_grad()
    def signals(
        self, batch: TrainBatch, micro_batches: list[MicroBatch], num_tokens: int, wanted: Set[Signal] | None = None
    ) -> Signals:
        """What the algorithm has to know of every token before the step.

        Args:
            wanted: only these; by default all that the algorithm's parts declare.

        Raises:
            RftError: log-probabilities of a teacher are needed, and neither a teacher is configured nor are they stored.
        """
        wanted = self.algorithm.signals if wanted is None else wanted
        found: dict[str, Tensor] = {
            f"{name}_N": torch.zeros(num_tokens, device=self.policy.device)
            for name in ("old", "entropy", "discriminator", "collision", "reference", "teacher", "values")
            if name in wanted and not (name == "teacher" and self.teacher is None)
        }
        with without_dropout(self.policy.model):
            for micro_batch in (each.to(self.policy.device) for each in micro_batches if found):
                for name, values_N in self._of_micro_batch(micro_batch, wanted):
                    found[f"{name}_N"][micro_batch.index_N] = values_N
                self.mark()
            mismatched_kl = self._mismatched_kl(batch) if "mismatched" in wanted else None
        self.release()
        # Every token was computed by one rank, and is 0 on the others.
        found = {name: self.policy.grid.add_up(values_N).cpu() for name, values_N in found.items()}
        if "teacher" in wanted and self.teacher is None:
            found["teacher_N"] = _stored_teacher(batch)
        if mismatched_kl is not None:
            found["mismatched_kl"] = mismatched_kl
        return Signals(**found)

    def release(self) -> None:
        """Free the gathered weights that only a backward pass would free; after passes without gradient."""
        for network in (self.policy, self.reference, self.teacher, self.critic):
            if network is not None:
                network.release()

    def _of_micro_batch(self, micro_batch: MicroBatch, wanted: Set[Signal]) -> Iterator[tuple[Signal, Tensor]]:
        """The signals that models compute, by name."""

        def policy_head(hidden_NH: Tensor, output: Output) -> Iterator[tuple[Signal, Tensor]]:
            logprobs_N, entropy_N = logprobs_and_entropy(hidden_NH, output, micro_batch.target_N)
            yield "old", logprobs_N
            yield "entropy", entropy_N
            if "discriminator" in wanted:
                yield (
                    "discriminator",
                    read_logits(hidden_NH, output, lambda z_CV: expected_discriminator(z_CV.log_softmax(dim=-1))),
                )

            if "collision" in wanted:
                yield (
                    "collision",
                    read_logits(hidden_NH, output, lambda z_CV: z_CV.softmax(dim=-1).square().sum(dim=-1)),
                )

        if {"old", "entropy", "discriminator", "collision"} & wanted:
            of_policy = self.policy.read(micro_batch, self.temperature, lambda *inputs: dict(policy_head(*inputs)))
            yield from ((name, values_N) for name, values_N in of_policy.items() if name in wanted)
        if "reference" in wanted:
            yield "reference", self._reference_logprobs(micro_batch)
        if "teacher" in wanted and self.teacher is not None:
            yield "teacher", self.teacher.logprobs(micro_batch, self.temperature)
        if self.critic is not None and "values" in wanted:
            yield "values", self.critic.values(micro_batch)

    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        if self.reference is not None:
            return self.reference.logprobs(micro_batch, self.temperature)
        with without_adapters(self.policy.model):
            return self.policy.logprobs(micro_batch, self.temperature)

    def _mismatched_kl(self, batch: TrainBatch) -> Tensor:
        """The mean of Σ_t log(π / π_reference) over prompts with responses to other prompts; 0 where there is one prompt."""
        pairs = mismatched(batch)
        if pairs is None:
            return torch.zeros(())
        total = torch.zeros((), device=self.policy.device)
        for micro_batch in (each.to(self.policy.device) for each in self.split(pairs)):
            total += self.policy.logprobs(micro_batch, self.temperature).sum()
            total -= self._reference_logprobs(micro_batch).sum()
        return self.policy.grid.add_up(total).cpu() / pairs.loss_mask_BT.any(dim=1).sum()

    def accumulate(self, micro_batch: MicroBatch, plan: Plan, *, learns: bool, num_tokens: Tensor) -> dict[str, Tensor]:
        """Forward and backward pass of one micro-batch; returns what it adds to the loss and the mean metrics of an update.

        Args:
            learns: whether the policy gets a gradient; a critic always does.
            num_tokens: that the update computes, on all ranks.

        Returns:
            Numbers, and `ROUTING`, [2, layers, experts], for a mixture of experts.
        """
        index_N = micro_batch.index_N
        sums: dict[str, Tensor] = {}
        if self.critic is not None:
            values_N = self.critic.values(micro_batch)
            view = plan.view(index_N, micro_batch.sequences, values_N, values_N=values_N)
            loss, sums = self.algorithm.critic_objective(plan, index_N, view)
            loss.backward()
        with torch.set_grad_enabled(learns):
            view, measured = self._view(micro_batch, plan)
            loss, metrics = self.algorithm.objective(plan, index_N, view)
            routed = None if self.algorithm.trains_scorer else self.policy.routing()
            if routed is not None:
                # A micro-batch that only keeps the others company has no tokens.
                (routing, coef), share = routed, micro_batch.num_tokens / num_tokens
                loss = loss + coef * share * routing.loss
                measured["router_aux_loss"] = share * routing.loss.detach()
                counted = float(micro_batch.num_tokens > 0)
                measured[ROUTING] = counted * torch.stack([routing.tokens_ME, routing.probabilities_ME])
        if learns:
            loss.backward()
        return sums | metrics | measured | {"loss": loss.detach()}

    def _view(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        """What the trained model computes of a micro-batch, with its gradient, and what that adds to the mean metrics of an update."""
        return self._scores(micro_batch, plan) if self.algorithm.trains_scorer else self._logprobs(micro_batch, plan)

    def _logprobs(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        index_N, share = micro_batch.index_N, 1.0 / plan.num_tokens
        has_bonus = self.algorithm.config.entropy.coef > 0

        def head(hidden_NH: Tensor, output: Output) -> tuple[Tensor, Tensor, Tensor | None]:
            both = logprobs_and_entropy(hidden_NH, output, micro_batch.target_N, entropy_has_gradient=has_bonus)
            return *both, self._compared(micro_batch, hidden_NH, output)

        logprobs_N, entropy_N, read_N = self.policy.read(micro_batch, self.temperature, head)
        measured = {"entropy": entropy_N.detach().sum() * share}
        if self.algorithm.uses_behavior_logprobs:
            behavior_N = plan.batch.behavior_N[index_N]
            # Tokens of experts, which no policy sampled, add 0.
            behavior_N = behavior_N.where(behavior_N.isfinite(), logprobs_N.detach())
            measured["logprob_diff"] = (logprobs_N.detach() - behavior_N).abs().sum() * share
            # Samples come from the behaviour policy, so it is the `p` of the estimator.
            measured["kl_behavior"] = k3(behavior_N, logprobs_N.detach()).sum() * share
        bonus_N = entropy_N if has_bonus else None
        return plan.view(index_N, micro_batch.sequences, logprobs_N, entropy_N=bonus_N, read_N=read_N), measured

    def _compared(self, micro_batch: MicroBatch, hidden_NH: Tensor, output: Output) -> Tensor | None:
        """What a loss reads of the whole distributions of the policy, and of a teacher; None for other losses."""
        loss = self.algorithm.loss
        if not isinstance(loss, HeadTerm):
            return None
        if "teacher_logits" not in loss.signals:
            return read_logits(hidden_NH, output, lambda logits_CV: loss.read(logits_CV, None))
        assert self.teacher is not None
        with torch.no_grad():
            teacher_NH, of_teacher = self.teacher.read(micro_batch, self.temperature, lambda *inputs: inputs)

        def compare(logits_CV: Tensor, teacher_CH: Tensor) -> Tensor:
            with torch.no_grad():
                teacher_CV = of_teacher.logits(teacher_CH)
            return loss.read(logits_CV, teacher_CV)

        return read_logits(hidden_NH, output, compare, teacher_NH)

    def _scores(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        scores_N = self.policy.values(micro_batch)
        zeros_N = torch.zeros_like(scores_N)
        return plan.view(micro_batch.index_N, micro_batch.sequences, zeros_N, values_N=scores_N), {}


def refuse_other_vocabulary(policy: Network, teacher: Network | None) -> None:
    """For algorithms that compare whole distributions.

    Raises:
        ConfigError: there is no teacher, or it has another vocabulary.
    """
    if teacher is None:
        raise ConfigError(
            "the algorithm compares whole distributions over the vocabulary, which are not stored",
            todo="set algorithm.teacher to a model, or use on_policy_distillation or jsd_sampled",
        )
    sizes = [network.model.get_output_embeddings().weight.shape[0] for network in (policy, teacher)]
    if sizes[0] != sizes[1]:
        raise ConfigError(
            "the teacher has another vocabulary than the policy, so their distributions cannot be compared",
            value=f"{sizes[1]} tokens",
            allowed=f"{sizes[0]} tokens",
            todo="name a teacher of the same family in algorithm.teacher",
        )


def refuse_fewer_tokens(policy: Network, critic: Network) -> None:
    """For a critic that starts from another model than the policy.

    Raises:
        ConfigError: the policy has tokens that the critic has not.
    """
    sizes = [network.num_tokens for network in (policy, critic)]
    if sizes[1] < sizes[0]:
        raise ConfigError(
            "the critic has fewer tokens than the policy, so it cannot read what the policy writes",
            value=f"{sizes[1]} tokens",
            allowed=f"{sizes[0]} or more",
            todo="name a model with the policy's tokenizer in algorithm.critic.path, or leave it out",
        )


def _stored_teacher(batch: TrainBatch) -> Tensor:
    logprobs_BT, counted_BT = batch.teacher_logprobs_BT, batch.loss_mask_BT
    missing_B = counted_BT.any(dim=1) if logprobs_BT is None else (logprobs_BT.isnan() & counted_BT).any(dim=1)
    wrong = missing_B.nonzero().flatten().tolist()
    if logprobs_BT is None or wrong:
        raise RftError(
            f"the algorithm needs log-probabilities of a teacher, and {len(wrong)} of {batch.num_experiences} experiences of the batch have none"
            + (f"; the first is experience {wrong[0]} of the batch" if wrong else ""),
            todo="set explorer.teacher, so that rollouts are stored with them, or algorithm.teacher to a model that the trainer computes; a "
            "workflow may also store them: turn.record(teacher_logprobs=…)",
        )
    return logprobs_BT[counted_BT]
