"""The policy gradient (Williams 1992), for samples of the policy itself or with importance weights for stored ones.

    -A_t log π(o_t)       plain
    -A_t ρ_t              `importance: true`; unbiased for samples of the anchor, and the same gradient where ρ_t = 1

Where ρ_t overflows it is limited to e^20.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class ReinforceConfig(PartConfig):
    importance: bool = Field(False, description="Weigh each token by its ratio to the policy that sampled it.")


class Reinforce(TokenTerm):
    """Metrics: `ratio_mean` with importance weights."""

    Config = ReinforceConfig
    uses_advantages = True
    config: ReinforceConfig

    @property
    def compares(self) -> bool:  # type: ignore[override]  # a class attribute where it is the same for all configurations
        return self.config.importance

    def __call__(self, view: TokenView) -> Loss:
        if not self.config.importance:
            return Loss(-view.advantages_N * view.logprobs_N)
        ratio_N = view.log_ratio_N.exp()
        return Loss(-view.advantages_N * ratio_N, {"ratio_mean": ratio_N.detach()})
