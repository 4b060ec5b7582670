"""Online policy mirror descent, the simple form (Trinity-RFT, arXiv 2505.17826, appendix).

    loss_t = -A_t log π(o_t) / (1 + τ)

The derivation assumes no policy that sampled, so stored responses are trained on without importance weights.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class OPMDConfig(PartConfig):
    tau: float = Field(1.0, ge=0, description="τ: strength of the pull to the policy before the step.")


class OPMD(TokenTerm):
    Config = OPMDConfig
    uses_advantages = True
    config: OPMDConfig

    def __call__(self, view: TokenView) -> Loss:
        return Loss(-view.advantages_N * view.logprobs_N / (1.0 + self.config.tau))
