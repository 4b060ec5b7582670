"""Maximum likelihood with label smoothing (Szegedy et al. 2016, arXiv 1512.00567, section 7).

    loss_t = -(1 - ε) log π(o_t) - ε mean_v log π(v)        v over the vocabulary

The cross entropy to a distribution that gives the token 1 - ε, and shares ε among all tokens of the vocabulary, this one included.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from rftcore.algorithms.base import HeadTerm, Loss, PartConfig, TokenView

if TYPE_CHECKING:
    from torch import Tensor


class SmoothedSFTConfig(PartConfig):
    smoothing: float = Field(0.1, ge=0, lt=1, description="ε: probability that is spread over the vocabulary.")


class SmoothedSFT(HeadTerm):
    """Metrics: `nll`, -log π of the tokens themselves."""

    Config = SmoothedSFTConfig
    needs = frozenset()
    config: SmoothedSFTConfig

    def read(self, logits_RV: Tensor, teacher_logits_RV: Tensor | None) -> Tensor:
        return logits_RV.logsumexp(dim=-1) - logits_RV.mean(dim=-1)

    def __call__(self, view: TokenView) -> Loss:
        assert view.read_N is not None
        smoothing = self.config.smoothing
        nll_N = -view.logprobs_N
        return Loss((1.0 - smoothing) * nll_N + smoothing * view.read_N, {"nll": nll_N.detach()})
