"""M2PO: drop the tokens that moved furthest, until the second moment of the rest is small (Zheng et al. 2025, arXiv 2510.01161).

    d_t = log π(o_t) - log π_behavior(o_t)        m_t = d_t²

π is the policy before the step, or with `policy: update` that before each optimizer update. Which tokens are dropped is one statistic of the
whole batch, so that a few outliers do not clip the many tokens of a stale batch, as a range per token does.

    all          of all tokens those with the largest m, as few as leave a mean of m below the threshold: the paper's text, as AReaL has it
    one-sided    of the tokens that a clip could reach, A > 0 and d > 0 or A < 0 and d < 0, those with m > τ². τ² is the largest of
                 their m for which the mean of min(m, τ²) over them is below the threshold: the authors' code, with `policy: update`
                 (github.com/Infini-AI-Lab/M2PO, compute_m2po_policy_loss in verl/trainer/ppo/core_algos.py at af54a3e)

In that code rounding of the ratio decides whether the token with m = τ² is clipped; here it is kept. That code takes the tokens of a
micro-batch, which depend on how a batch is cut; here they are those of the update.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from rftcore.algorithms.base import PartConfig, Signals, StepBatch, TokenMask

if TYPE_CHECKING:
    from torch import Tensor


class M2POConfig(PartConfig):
    threshold: float = Field(0.04, gt=0, description="The second moment stays below this (nats²).")
    form: Literal["all", "one-sided"] = Field("all", description="Which tokens count and are dropped.")
    policy: Literal["step", "update"] = Field(
        "step",
        description="Policy whose log-probabilities are compared: the one before the step, or before each update.",
    )


class M2PO(TokenMask):
    """Tokens that no policy sampled count in no statistic, and are kept."""

    Config = M2POConfig
    needs = frozenset({"old", "behavior"})
    config: M2POConfig

    @property
    def each_update(self) -> bool:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return self.config.policy == "update"

    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        assert signals.old_N is not None
        moved_N = (signals.old_N - batch.behavior_N).double()
        if self.config.form == "one-sided":
            counted_N, within = moved_N * advantages_N.sign() > 0, _capped
        else:
            counted_N, within = ~moved_N.isnan(), _means
        counted = counted_N.nonzero().flatten()
        ascending, order = moved_N[counted].square().sort()
        kept_N = advantages_N.new_ones(len(advantages_N)).bool()
        # Neither mean ever falls from one moment to the next, so those below the threshold are the first ones.
        kept_N[counted[order]] = within(ascending) < self.config.threshold
        return kept_N


def _means(ascending: Tensor) -> Tensor:
    """Return the mean of the smallest 1, 2, … moments."""
    import torch

    return ascending.cumsum(0) / torch.arange(1, len(ascending) + 1)


def _capped(ascending: Tensor) -> Tensor:
    """Return the means of all moments when they are capped at the first, the second, … of them."""
    import torch

    larger = torch.arange(len(ascending) - 1, -1, -1)
    return (ascending.cumsum(0) + larger * ascending) / max(1, len(ascending))
