"""The models of a run, and what they compute of a batch: the signals before a step, and the view of a micro-batch.

Invariants:
- Signals are computed without gradient, on the weights before the step, and lie on the CPU.
- Only what the algorithm's parts declare in `needs` is computed.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rftcore.algorithms.algorithm import Algorithm, Plan
from rftcore.algorithms.base import HeadTerm, Signals, TokenView
from rftcore.algorithms.kl import estimate
from rftcore.algorithms.masks.clip_v import expected_discriminator
from rftcore.trainer.batch_forms import mismatched, scored, whole
from rftcore.trainer.batches import TrainBatch
from rftcore.trainer.micro_batches import MicroBatch, split_batch
from rftcore.trainer.network import Network, by_rows, entropy, pick, read_rows
from rftdata.errors import ConfigError, RftError


@dataclass(frozen=True, kw_only=True)
class Models:
    """The policy, or the reward model in its place, and the models beside it.

    Attributes:
        temperature: of the distributions that log-probabilities are of.
    """

    algorithm: Algorithm
    temperature: float
    policy: Network
    reference: Network | None
    teacher: Network | None
    critic: Network | None

    def as_computed(self, batch: TrainBatch) -> TrainBatch:
        """The batch with the tokens that the algorithm trains on."""
        if self.algorithm.trains_scorer:
            return scored(batch)
        return whole(batch) if self.algorithm.config.train_on == "all" else batch

    def split(self, batch: TrainBatch, members: list[int] | None = None) -> list[MicroBatch]:
        """Micro-batches of some of the experiences, by default of all."""
        return split_batch(
            batch,
            self.policy.config.max_tokens_per_microbatch,
            share_prompts=self.policy.shares_prompts,
            members=members,
        )

    @torch.no_grad()
    def signals(self, batch: TrainBatch, micro_batches: list[MicroBatch], num_tokens: int) -> Signals:
        """What the algorithm has to know of every token before the step.

        Raises:
            RftError: log-probabilities of a teacher are needed, and neither a teacher is configured nor are they stored.
        """
        wanted = self.algorithm.signals
        found: dict[str, Tensor] = {
            f"{name}_N": torch.zeros(num_tokens)
            for name in ("old", "entropy", "discriminator", "reference", "teacher", "values")
            if name in wanted
        }
        for micro_batch in (each.to(self.policy.device) for each in micro_batches if found):
            place_N = micro_batch.index_N.cpu()
            if {"old", "entropy", "discriminator"} & wanted:
                logprobs_NV = self.policy.logprobs(micro_batch, self.temperature)
                if "old" in wanted:
                    found["old_N"][place_N] = pick(logprobs_NV, micro_batch.target_N).cpu()
                if "entropy" in wanted:
                    found["entropy_N"][place_N] = entropy(logprobs_NV).cpu()
                if "discriminator" in wanted:
                    found["discriminator_N"][place_N] = by_rows(expected_discriminator, logprobs_NV).cpu()
                del logprobs_NV
            if self.reference is not None:
                reference_NV = self.reference.logprobs(micro_batch, self.temperature)
                found["reference_N"][place_N] = pick(reference_NV, micro_batch.target_N).cpu()
            if "teacher_N" in found and self.teacher is not None:
                teacher_NV = self.teacher.logprobs(micro_batch, self.temperature)
                found["teacher_N"][place_N] = pick(teacher_NV, micro_batch.target_N).cpu()
            if self.critic is not None:
                found["values_N"][place_N] = self.critic.values(micro_batch).cpu()
        if "teacher" in wanted and self.teacher is None:
            found["teacher_N"] = _stored_teacher(batch)
        if "mismatched" in wanted:
            found["mismatched_kl"] = self._mismatched_kl(batch)
        return Signals(**found)

    def _mismatched_kl(self, batch: TrainBatch) -> Tensor:
        """The mean of Σ_t log(π / π_reference) over prompts with responses to other prompts; 0 where there is one prompt."""
        assert self.reference is not None
        pairs = mismatched(batch)
        if pairs is None:
            return torch.zeros(())
        total = torch.zeros((), device=self.policy.device)
        for micro_batch in (each.to(self.policy.device) for each in self.split(pairs)):
            for network, sign in ((self.policy, 1.0), (self.reference, -1.0)):
                total += sign * pick(network.logprobs(micro_batch, self.temperature), micro_batch.target_N).sum()
        return total.cpu() / pairs.loss_mask_BT.any(dim=1).sum()

    def view(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        """What the trained model computes of a micro-batch, with its gradient, and what that adds to the mean metrics of an update."""
        return self._scores(micro_batch, plan) if self.algorithm.trains_scorer else self._logprobs(micro_batch, plan)

    def _logprobs(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        index_N, share = micro_batch.index_N.cpu(), 1.0 / plan.num_tokens
        has_bonus = self.algorithm.config.entropy.coef > 0
        all_logprobs_NV = self.policy.logprobs(micro_batch, self.temperature)
        logprobs_N = pick(all_logprobs_NV, micro_batch.target_N)
        entropy_N = entropy(all_logprobs_NV if has_bonus else all_logprobs_NV.detach())
        read_N = None
        if isinstance(self.algorithm.loss, HeadTerm):
            assert self.teacher is not None
            with torch.no_grad():
                teacher_NV = self.teacher.logprobs(micro_batch, self.temperature)
            read_N = read_rows(self.algorithm.loss.read, all_logprobs_NV, teacher_NV)
        measured = {"entropy": entropy_N.detach().sum() * share}
        if self.algorithm.uses_behavior_logprobs:
            behavior_N = plan.batch.behavior_N[index_N].to(self.policy.device)
            # Tokens of experts, which no policy sampled, add 0.
            behavior_N = behavior_N.where(behavior_N.isfinite(), logprobs_N.detach())
            measured["logprob_diff"] = (logprobs_N.detach() - behavior_N).abs().sum() * share
            # Samples come from the behaviour policy, so it is the `p` of the estimator.
            measured["kl_behavior"] = estimate("k3", behavior_N, logprobs_N.detach()).sum() * share
        view = plan.view(index_N, logprobs_N, entropy_N=entropy_N if has_bonus else None, read_N=read_N)
        return view, measured

    def _scores(self, micro_batch: MicroBatch, plan: Plan) -> tuple[TokenView, dict[str, Tensor]]:
        scores_N = self.policy.values(micro_batch)
        return plan.view(micro_batch.index_N.cpu(), torch.zeros_like(scores_N), values_N=scores_N), {}


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
            value=f"{sizes[1]} tokens", allowed=f"{sizes[0]} tokens", todo="name a teacher of the same family in algorithm.teacher",
        )  # fmt: skip


def refuse_fewer_tokens(policy: Network, critic: Network) -> None:
    """For a critic that starts from another model than the policy.

    Raises:
        ConfigError: the policy has tokens that the critic has not.
    """
    sizes = [network.num_tokens for network in (policy, critic)]
    if sizes[1] < sizes[0]:
        raise ConfigError(
            "the critic has fewer tokens than the policy, so it cannot read what the policy writes", value=f"{sizes[1]} tokens",
            allowed=f"{sizes[0]} or more", todo="name a model with the policy's tokenizer in algorithm.critic.path, or leave it out",
        )  # fmt: skip


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
        )  # fmt: skip
    return logprobs_BT[counted_BT]
