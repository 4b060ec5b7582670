"""The gradients of an optimizer update: a forward and a backward pass for each micro-batch, and their metrics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rftcore.algorithms.algorithm import Algorithm
from rftcore.algorithms.base import HeadTerm
from rftcore.algorithms.device_copy import copy_to_device
from rftcore.algorithms.plan import Plan, TokenOutputs
from rftcore.trainer.batches.micro_batches import MicroBatch
from rftcore.trainer.models import Models
from rftcore.trainer.network.head import Output, logprobs_and_entropy, read_logits
from rftcore.trainer.network.network import Network
from rftcore.trainer.network.routing import ROUTING


@dataclass(frozen=True)
class GradientPasses:
    """Passes with gradient through the trained models.

    Attributes:
        temperature: of the distributions that log-probabilities are of.
        mark: called after each micro-batch; see `StepProgress`.
    """

    models: Models
    algorithm: Algorithm
    temperature: float
    mark: Callable[[], None]

    def accumulate(self, plan: Plan, micro_batches: list[MicroBatch], *, learns: bool) -> dict[str, Tensor]:
        """Accumulate the gradients of an update; return this rank's share of the loss and of the mean metrics.

        Args:
            plan: of the update, on the device.
            learns: whether the policy gets a gradient; a critic always does.

        Returns:
            Numbers, and `ROUTING`, [2, layers, experts], for a mixture of experts.
        """
        policy, sums = self.models.policy, dict[str, Tensor]()
        own_tokens = torch.tensor(float(sum(micro_batch.num_tokens for micro_batch in micro_batches)))
        num_tokens = policy.grid.add_up(copy_to_device(own_tokens, policy.device))
        for number, micro_batch in enumerate(micro_batches, start=1):
            for network in self.models.trained().values():
                network.begin_micro_batch(is_last=number == len(micro_batches))
            added = self._of_micro_batch(plan, micro_batch.to(policy.device), num_tokens, learns)
            for name, value in added.items():
                sums[name] = sums.get(name, torch.zeros_like(value)) + value
            self.mark()
        return sums

    def discard(self, micro_batch: MicroBatch) -> None:
        """Compute a micro-batch forward and backward, with a loss without meaning: its gradients are to be cleared.

        Args:
            micro_batch: on the device.
        """
        for network in self.models.trained().values():
            network.begin_micro_batch(is_last=True)
        if self.models.critic is not None:
            self.models.critic.values(micro_batch).sum().backward()
        outputs = self._scores(micro_batch) if self.algorithm.trains_scorer else self._logprobs(micro_batch)
        routing = None if self.models.policy.routers is None else self.models.policy.routers.take()
        results = [outputs.logprobs_N, outputs.entropy_N, outputs.values_N, outputs.read_N]
        results.append(None if routing is None else routing.loss)
        torch.stack([each.sum() for each in results if each is not None and each.requires_grad]).sum().backward()
        self.mark()

    def _of_micro_batch(
        self, plan: Plan, micro_batch: MicroBatch, num_tokens: Tensor, learns: bool
    ) -> dict[str, Tensor]:
        metrics = {} if self.models.critic is None else self._train_critic(self.models.critic, plan, micro_batch)
        with torch.set_grad_enabled(learns):
            outputs = self._scores(micro_batch) if self.algorithm.trains_scorer else self._logprobs(micro_batch)
            routers = self.models.policy.routers
            routing = None if routers is None else routers.take()
            loss, measured = self.algorithm.objective(plan, outputs)
            if routers is not None and routing is not None:
                # A micro-batch that was added so that all ranks have as many has no tokens.
                share = micro_batch.num_tokens / num_tokens
                loss = loss + routers.coef * share * routing.loss
                metrics["router_aux_loss"] = share * routing.loss.detach()
                counted = float(micro_batch.num_tokens > 0)
                metrics[ROUTING] = counted * torch.stack([routing.tokens_ME, routing.probabilities_ME])
        if learns:
            loss.backward()
        return metrics | measured | {"loss": loss.detach()}

    def _train_critic(self, critic: Network, plan: Plan, micro_batch: MicroBatch) -> dict[str, Tensor]:
        values_N = critic.values(micro_batch)
        outputs = TokenOutputs(
            index_N=micro_batch.index_N, sequences=micro_batch.sequences, logprobs_N=values_N, values_N=values_N
        )
        loss, metrics = self.algorithm.critic_objective(plan, outputs)
        loss.backward()
        return metrics

    def _scores(self, micro_batch: MicroBatch) -> TokenOutputs:
        scores_N = self.models.policy.values(micro_batch)
        return TokenOutputs(
            index_N=micro_batch.index_N,
            sequences=micro_batch.sequences,
            logprobs_N=torch.zeros_like(scores_N),
            values_N=scores_N,
        )

    def _logprobs(self, micro_batch: MicroBatch) -> TokenOutputs:
        has_bonus = self.algorithm.config.entropy.coef > 0
        term = self.algorithm.loss if isinstance(self.algorithm.loss, HeadTerm) else None

        def head(hidden_NH: Tensor, output: Output) -> tuple[Tensor, Tensor, Tensor | None]:
            both = logprobs_and_entropy(hidden_NH, output, micro_batch.target_N, entropy_has_gradient=has_bonus)
            return *both, None if term is None else self._read(term, micro_batch, hidden_NH, output)

        logprobs_N, entropy_N, read_N = self.models.policy.read(micro_batch, self.temperature, head)
        return TokenOutputs(
            index_N=micro_batch.index_N,
            sequences=micro_batch.sequences,
            logprobs_N=logprobs_N,
            entropy_N=entropy_N,
            read_N=read_N,
        )

    def _read(self, loss: HeadTerm, micro_batch: MicroBatch, hidden_NH: Tensor, output: Output) -> Tensor:
        """Return what a loss reads of the whole distributions of the policy, and of a teacher."""
        if "teacher_logits" not in loss.signals:
            return read_logits(hidden_NH, output, lambda logits_CV: loss.read(logits_CV, None))
        assert self.models.teacher is not None
        with torch.no_grad():
            teacher_NH, of_teacher = self.models.teacher.read(micro_batch, self.temperature, lambda *inputs: inputs)

        def compare(logits_CV: Tensor, teacher_CH: Tensor) -> Tensor:
            with torch.no_grad():
                teacher_CV = of_teacher.logits(teacher_CH)
            return loss.read(logits_CV, teacher_CV)

        return read_logits(hidden_NH, output, compare, teacher_NH)
