"""The signals of a step: what the models compute of every token before the weights change.

Invariants:
- Signals are computed without gradient and lie on the CPU.
- Only what the algorithm's parts declare in `needs` is computed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcore.algorithms.base import Signal, Signals
from rftcore.algorithms.masks.clip_v import expected_discriminator
from rftcore.trainer.batches.forms import mismatched
from rftcore.trainer.batches.micro_batches import MicroBatch, split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.models import Models
from rftcore.trainer.network.head import Output, logprobs_and_entropy, read_logits
from rftcore.trainer.network.lora import without_adapters, without_dropout
from rftdata.errors import RftError

_PER_TOKEN: tuple[Signal, ...] = ("old", "entropy", "discriminator", "collision", "reference", "teacher", "values")


@dataclass(frozen=True)
class SignalReader:
    """Passes without gradient through the models.

    Attributes:
        temperature: of the distributions that log-probabilities are of.
        mark: called after each micro-batch; see `StepProgress`.
    """

    models: Models
    temperature: float
    mark: Callable[[], None]

    @torch.no_grad()
    def read(self, batch: TrainBatch, micro_batches: list[MicroBatch], wanted: Set[Signal]) -> Signals:
        """Return the wanted signals of every token that counts.

        Args:
            micro_batches: those of this rank; the signals of tokens in no rank's micro-batches are 0.

        Raises:
            RftError: log-probabilities of a teacher are wanted, and neither a teacher is configured nor are they stored.
        """
        signals = self._from_models(batch, micro_batches, wanted)
        if "teacher" in wanted and self.models.teacher is None:
            signals["teacher_N"] = _stored_teacher(batch)
        return Signals(**signals)

    @torch.no_grad()
    def discard(self, micro_batch: MicroBatch, wanted: Set[Signal]) -> None:
        """Compute the wanted signals of a micro-batch for nothing.

        Args:
            micro_batch: on the device.
        """
        with without_dropout(self.models.policy.model):
            for _ in self._of_micro_batch(micro_batch, wanted):
                pass
        self.mark()

    def computed(self, wanted: Set[Signal]) -> list[Signal]:
        """Return those of the wanted signals of each token that models compute."""
        return [
            name for name in _PER_TOKEN if name in wanted and (name != "teacher" or self.models.teacher is not None)
        ]

    def _from_models(
        self, batch: TrainBatch, micro_batches: list[MicroBatch], wanted: Set[Signal]
    ) -> dict[str, Tensor]:
        """Return the signals that models compute, by the name of their field."""
        policy = self.models.policy
        names = self.computed(wanted)
        if not names and "mismatched" not in wanted:
            return {}
        num_tokens = batch.num_loss_tokens
        signals = {f"{name}_N": torch.zeros(num_tokens, device=policy.device) for name in names}
        with without_dropout(policy.model):
            for micro_batch in (each.to(policy.device) for each in micro_batches if signals):
                for name, values_N in self._of_micro_batch(micro_batch, wanted):
                    signals[f"{name}_N"][micro_batch.index_N] = values_N
                self.mark()
            mismatched_kl = self._mismatched_kl(batch) if "mismatched" in wanted else None
        self.models.release()
        # Every token was computed by one rank, and is 0 on the others.
        signals = {name: policy.grid.add_up(values_N).cpu() for name, values_N in signals.items()}
        return signals if mismatched_kl is None else signals | {"mismatched_kl": mismatched_kl}

    def _of_micro_batch(self, micro_batch: MicroBatch, wanted: Set[Signal]) -> Iterator[tuple[Signal, Tensor]]:
        """Yield the signals of the tokens of a micro-batch, by name."""

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

        models = self.models
        if {"old", "entropy", "discriminator", "collision"} & wanted:
            of_policy = models.policy.read(micro_batch, self.temperature, lambda *inputs: dict(policy_head(*inputs)))
            yield from ((name, values_N) for name, values_N in of_policy.items() if name in wanted)
        if "reference" in wanted:
            yield "reference", self._reference_logprobs(micro_batch)
        if "teacher" in wanted and models.teacher is not None:
            yield "teacher", models.teacher.logprobs(micro_batch, self.temperature)
        if models.critic is not None and "values" in wanted:
            yield "values", models.critic.values(micro_batch)

    def _reference_logprobs(self, micro_batch: MicroBatch) -> Tensor:
        if self.models.reference is not None:
            return self.models.reference.logprobs(micro_batch, self.temperature)
        with without_adapters(self.models.policy.model):
            return self.models.policy.logprobs(micro_batch, self.temperature)

    def _mismatched_kl(self, batch: TrainBatch) -> Tensor:
        """Return the mean of Σ_t log(π / π_reference) over prompts with responses to other prompts; 0 where there is one prompt."""
        policy, pairs = self.models.policy, mismatched(batch)
        if pairs is None:
            return torch.zeros(())
        total = torch.zeros((), device=policy.device)
        for micro_batch in split_batch(pairs, policy.cutting)[policy.grid.data_rank]:
            on_device = micro_batch.to(policy.device)
            total += policy.logprobs(on_device, self.temperature).sum()
            total -= self._reference_logprobs(on_device).sum()
        return policy.grid.add_up(total).cpu() / pairs.loss_mask_BT.any(dim=1).sum()


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
