"""`Plan`: the advantages and weights of a trainer step, fixed before its first micro-batch, and views that join them with the models' outputs."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rftcore.algorithms.base import Signals, StepBatch, TokenView
from rftcore.algorithms.device_copy import copy_to_device
from rftcore.algorithms.kl import k3
from rftcore.algorithms.sequences import Sequences

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class TokenOutputs:
    """Outputs of the models for the tokens of one micro-batch; they carry the gradient.

    Attributes:
        index_N: int64; places of the tokens in the batch, whole sequences.
        sequences: the sequences that the tokens belong to.
        logprobs_N: float32, nats; 0 for a loss of a scorer, which has none, and for a critic's no log-probability at all.
        entropy_N: float32, nats; None where no distributions were computed. Without an entropy bonus it carries no gradient.
        values_N: of a critic or a scorer.
        read_N: results of `HeadTerm.read`, one for each token.
    """

    index_N: Tensor
    sequences: Sequences
    logprobs_N: Tensor
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
    read_N: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One trainer step, before the first micro-batch; `Algorithm.restrict` gives the plan of one of several optimizer updates in it.

    Attributes:
        anchor_N, advantages_N, returns_N: see `TokenView`.
        counted_N: bool; the tokens of the policy loss, without those of a separate expert loss and those that the advantage leaves out.
        corrected_N: factor of the corrections for each token's weight in the policy loss, float32; 0 where the token does not count.
        kept_N: bool; False where the mask drops the token's gradient. None without a mask.
        policy_weights_N, expert_weights_N, kl_weights_N, entropy_weights_N: weight of each token in its term, float32. The last
            three are None where the algorithm has no such term.
        unit_weights_B: weight of a sequence, or of the pair that it belongs to, in a loss per sequence or pair; 0 for a pair with an
            empty answer.
        over_update_B: result of `Term.over_update` of the loss.
        num_units: tokens, sequences or pairs over which metrics of the loss are averaged.
        num_tokens: tokens over which other metrics are averaged.
        kl_coef: coefficient of the KL penalty in this step.
        metrics: of the whole batch.
    """

    batch: StepBatch
    signals: Signals
    anchor_N: Tensor
    advantages_N: Tensor
    returns_N: Tensor | None
    counted_N: Tensor
    corrected_N: Tensor
    kept_N: Tensor | None
    policy_weights_N: Tensor
    expert_weights_N: Tensor | None
    kl_weights_N: Tensor | None
    entropy_weights_N: Tensor | None
    unit_weights_B: Tensor
    over_update_B: Tensor | None
    num_units: int
    num_tokens: int
    kl_coef: float
    metrics: dict[str, float] = field(default_factory=dict)

    def to(self, device: torch.device) -> Plan:
        """Return the plan with its tensors on `device`."""
        moved = {entry.name: _on(getattr(self, entry.name), device) for entry in fields(self)}
        return replace(self, **moved)

    def distances(self, outputs: TokenOutputs, *, from_behavior: bool) -> dict[str, Tensor]:
        """Return what a micro-batch adds to the means of entropy and, where wanted, of the distances between policy and behaviour policy."""
        if outputs.entropy_N is None:
            return {}
        share, logprobs_N = 1.0 / max(1, self.num_tokens), outputs.logprobs_N.detach()
        metrics = {"entropy": outputs.entropy_N.detach().sum() * share}
        if from_behavior:
            behavior_N = self.batch.behavior_N[outputs.index_N]
            # Tokens of experts, which no policy sampled, add 0.
            behavior_N = behavior_N.where(behavior_N.isfinite(), logprobs_N)
            metrics["logprob_diff"] = (logprobs_N - behavior_N).abs().sum() * share
            # Samples come from the behaviour policy, so it is the policy p of the estimator.
            metrics["kl_behavior"] = k3(behavior_N, logprobs_N).sum() * share
        return metrics

    def view(self, outputs: TokenOutputs) -> TokenView:
        """Return the view of a micro-batch: the models' outputs for its tokens, joined with what this plan fixed for them."""
        index_N, sequences, logprobs_N = outputs.index_N, outputs.sequences, outputs.logprobs_N

        def part(whole: Tensor | None) -> Tensor | None:
            return None if whole is None else whole[index_N].to(logprobs_N.device)

        signals = self.signals
        anchor_N, advantages_N = part(self.anchor_N), part(self.advantages_N)
        assert anchor_N is not None and advantages_N is not None
        rewards_N = self.batch.rewards_B[self.batch.sequence_N[index_N]].to(logprobs_N.device)
        over_update_S = (
            None if self.over_update_B is None else self.over_update_B.to(logprobs_N.device)[sequences.sequence_S]
        )
        mismatched_kl = None if signals.mismatched_kl is None else signals.mismatched_kl.to(logprobs_N.device)
        return TokenView(
            logprobs_N=logprobs_N,
            anchor_N=anchor_N,
            advantages_N=advantages_N,
            sequences=sequences,
            reference_N=part(signals.reference_N),
            teacher_N=part(signals.teacher_N),
            entropy_N=None if self.entropy_weights_N is None else outputs.entropy_N,
            values_N=outputs.values_N,
            old_values_N=part(signals.values_N),
            returns_N=part(self.returns_N),
            rewards_N=rewards_N,
            read_N=outputs.read_N,
            kept_N=part(self.kept_N),
            mismatched_kl=mismatched_kl,
            over_update_S=over_update_S,
        )


def _on(value: Any, device: torch.device) -> Any:
    """Return a tensor, or the tensors of a batch or of signals, on `device`; anything else unchanged."""
    if isinstance(value, (StepBatch, Signals)):
        return replace(value, **{entry.name: _on(getattr(value, entry.name), device) for entry in fields(value)})
    return copy_to_device(value, device) if hasattr(value, "to") else value
