"""What of an algorithm fits together, and still surprises."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from rftcore.algorithms.losses.ppo import PPO

if TYPE_CHECKING:
    from rftcore.algorithms.algorithm import Algorithm

# Ratios of a sequence that dropout alone changes by more: GSPO's clip of 4e-4 is far below it, GRPO's of 0.2 far above.
_NARROW_CLIP = 0.01


def notes(algorithm: Algorithm, dropout: float) -> Iterator[str]:
    """Yield sentences, which `rft check` prints.

    Args:
        dropout: of the adapters that are trained.
    """
    loss, aggregation = algorithm.loss, algorithm.config.aggregation.name
    if (
        isinstance(loss, PPO)
        and loss.config.level == "product"
        and aggregation in ("token-mean", "seq-mean-token-mean")
    ):
        yield (
            f"algorithm.loss.level: product gives each token 1 / length of its response's loss, and aggregation: {aggregation} averages over"
            " tokens once more, so the update shrinks with the length of responses; aggregation: seq-mean-token-sum is one loss per response"
        )
    if isinstance(loss, PPO) and dropout and loss.config.clip.high < _NARROW_CLIP:
        yield (
            f"trainer.lora.dropout {dropout:g} changes the ratios by more than algorithm.loss.clip ({loss.config.clip.low:g},"
            f" {loss.config.clip.high:g}) lets through, so most of what is sampled is clipped before anything is trained; leave it at 0"
        )
