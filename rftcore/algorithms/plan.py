"""`Plan`: what is fixed about a trainer step before its first micro-batch, and the views of micro-batches that it gives."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from rftcore.algorithms.base import Signals, StepBatch, TokenView
from rftcore.algorithms.device_copy import copy_to_device
from rftcore.algorithms.sequences import Sequences

if TYPE_CHECKING:
    import torch
    from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One trainer step, before the first micro-batch; `Algorithm.restrict` gives the plan of one of several optimizer updates in it.

    Attributes:
        anchor_N, advantages_N, returns_N: see `TokenView`.
        counted_N: bool; the tokens of the policy loss: not an expert's with a loss of its own, nor left out by the advantage.
        corrected_N: what corrections make of each token's weight in the policy loss, float32; 0 where it does not count.
        kept_N: bool; False where the mask drops the token's gradient. None without a mask.
        policy_weights_N, expert_weights_N, kl_weights_N, entropy_weights_N: weight of each token in its term, float32. The last
            three are None where the algorithm has no such term.
        unit_weights_B: weight of a sequence, or of the pair that it belongs to, in a loss per sequence or pair; 0 for a pair with an
            empty answer.
        over_update_B: what `Term.over_update` found for the loss; see there.
        num_units: tokens, sequences or pairs over which metrics of the loss are averaged.
        num_tokens: tokens over which the others are averaged.
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
        """The same with its tensors on `device`."""
        moved = {entry.name: _on(getattr(self, entry.name), device) for entry in fields(self)}
        return replace(self, **moved)

    def view(
        self,
        index_N: Tensor,
        sequences: Sequences,
        logprobs_N: Tensor,
        *,
        entropy_N: Tensor | None = None,
        values_N: Tensor | None = None,
        read_N: Tensor | None = None,
    ) -> TokenView:
        """The view of a micro-batch.

        Args:
            index_N: int64; places of its tokens in the batch, whole sequences, on the plan's device.
            sequences: those of its tokens, on the device of `logprobs_N`.
            logprobs_N, entropy_N, values_N, read_N: of those tokens; they carry the gradient. Log-probabilities are 0 for a loss of
                a scorer, which has none.
        """

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
            entropy_N=entropy_N,
            values_N=values_N,
            old_values_N=part(signals.values_N),
            returns_N=part(self.returns_N),
            rewards_N=rewards_N,
            read_N=read_N,
            kept_N=part(self.kept_N),
            mismatched_kl=mismatched_kl,
            over_update_S=over_update_S,
        )


def _on(value: Any, device: torch.device) -> Any:
    """A tensor, or the tensors of a batch or of signals, on `device`; anything else as it is."""
    if isinstance(value, (StepBatch, Signals)):
        return replace(value, **{entry.name: _on(getattr(value, entry.name), device) for entry in fields(value)})
    return copy_to_device(value, device) if hasattr(value, "to") else value
