"""The optimizer updates of a trainer step: the experiences of each, its plan, its gradients and the step of the weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from rftcore.algorithms.plan import Plan
from rftcore.config.trainer import TrainerConfig
from rftcore.trainer.batches.micro_batches import MicroBatch, split_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftcore.trainer.step.divergence import Divergence
from rftcore.trainer.step.gradients import GradientPasses
from rftcore.trainer.step.preparation import one_thread
from rftcore.trainer.step.signals import SignalReader
from rftcore.trainer.step.update_metrics import means, totals


@dataclass(frozen=True)
class OptimizerUpdates:
    """Makes `epochs` · `mini_batches` updates in each step.

    Attributes:
        seed: of the order in which experiences are dealt to mini-batches.
    """

    signals: SignalReader
    gradients: GradientPasses
    divergence: Divergence
    config: TrainerConfig
    seed: int

    def make(
        self, plan: Plan, batch: TrainBatch, micro_batches: list[MicroBatch], rate: float
    ) -> tuple[dict[str, float], float]:
        """Make the updates of a step; return mean metrics, and the number of tokens that all ranks computed.

        Args:
            plan: of the step.
            micro_batches: those of the whole batch, on this rank.
            rate: share of the peak learning rate.

        Raises:
            RftError: training has diverged, or has had nothing to train for many steps; see `Divergence`.
        """
        policy, num_tokens, updates = self.gradients.models.policy, 0, list[dict[str, float]]()
        for members in self._mini_batches(batch, plan.batch.step):
            if members is not None:
                with one_thread():
                    micro_batches = split_batch(batch, policy.cutting, members)[policy.grid.data_rank]
            num_tokens += sum(micro_batch.num_tokens for micro_batch in micro_batches)
            updates.append(self._update(plan, batch, micro_batches, members, rate, is_first=not updates))
        self.divergence.end_step(is_empty=not any("loss" in update for update in updates))
        computed = policy.grid.add_up(torch.tensor(float(num_tokens)).to(policy.device)).item()
        return means(updates), computed

    def _mini_batches(self, batch: TrainBatch, step: int) -> Iterator[list[int] | None]:
        """Yield the experiences of each update; None for all of them."""
        for epoch in range(self.config.epochs):
            if self.config.mini_batches == 1:
                yield None
            else:
                # One seed for each epoch of each step, so that a resumed run deals as the first one did.
                yield from batch.deal(self.config.mini_batches, hash((self.seed, step, epoch)) % 2**63)

    def _update(
        self,
        plan: Plan,
        batch: TrainBatch,
        micro_batches: list[MicroBatch],
        members: list[int] | None,
        rate: float,
        *,
        is_first: bool,
    ) -> dict[str, float]:
        """Make one update; return mean metrics.

        Args:
            members: the experiences of the update; None for all.
            is_first: whether the policy is still the one before the step.
        """
        models, algorithm, signals, members_B = self.gradients.models, self.gradients.algorithm, None, None
        if members is not None:
            members_B = torch.zeros(batch.num_experiences, dtype=torch.bool)
            members_B[members] = True
        if algorithm.mask is not None and algorithm.masks_each_update and not is_first:
            signals = self.signals.read(batch, micro_batches, algorithm.mask.signals)
        with one_thread():
            plan = algorithm.restrict(plan, members_B, signals)
        kept = {"mask_kept": plan.metrics["mask_kept"]} if algorithm.masks_each_update else {}
        if not micro_batches or not plan.num_units:
            return kept | {"skipped": 1.0}
        critic = algorithm.config.critic
        learns = critic is None or plan.batch.step > critic.warmup_steps
        sums = self.gradients.accumulate(plan.to(models.policy.device), micro_batches, learns=learns)
        norms = models.update(rate, learns=learns)
        # One transfer for all, after the last kernel was launched: clipping is launched while the backward pass is computed.
        metrics = totals(sums, models.policy.grid)
        self.gradients.mark()
        return kept | metrics | norms | {"skipped": float(self.divergence.is_skipped(norms))}
