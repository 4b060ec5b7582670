"""Maximum likelihood, plain or with less weight on tokens that the policy finds unlikely.

    sft       -log p
    sft-is    -sg(p) log p              importance-weighted (Wu et al. 2025, "DFT", arXiv 2508.05629)
    sft-phi   -sg(p (1 - p)) log p      CHORD (arXiv 2508.11408, eq. 6)

with p = π(o_t) and sg for stopped gradient.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class SFTConfig(PartConfig):
    weight: Literal["none", "is", "phi"] = Field("none", description="Weight of a token: 1, p, or p (1 - p).")


class SFT(TokenTerm):
    Config = SFTConfig
    config: SFTConfig

    def __call__(self, view: TokenView) -> Loss:
        p_N = view.logprobs_N.detach().exp()
        weight_N = {"none": p_N.new_ones(len(p_N)), "is": p_N, "phi": p_N * (1.0 - p_N)}[self.config.weight]
        return Loss(-weight_N * view.logprobs_N)
