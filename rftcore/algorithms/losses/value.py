"""The critic's loss, with a step that is limited like the policy's (Schulman et al. 2017, section 5; the clip is OpenAI baselines').

    loss_t = ½ max((v_t - R_t)², (clip(v_t, v_old - ε, v_old + ε) - R_t)²)

v_old is the critic's value before the step and R_t the return from the advantage.
"""

from __future__ import annotations

from pydantic import Field

from rftcore.algorithms.base import Loss, PartConfig, TokenTerm, TokenView


class ValueConfig(PartConfig):
    clip: float | None = Field(0.2, gt=0, description="ε: how far a value may count, or null for no limit.")


class Value(TokenTerm):
    """Metrics: `value_mean`, and `value_clip_fraction` with a limit."""

    Config = ValueConfig
    of_critic = True
    needs = frozenset({"values"})
    config: ValueConfig

    def __call__(self, view: TokenView) -> Loss:
        assert view.values_N is not None and view.old_values_N is not None and view.returns_N is not None
        plain_N = (view.values_N - view.returns_N).square()
        metrics = {"value_mean": view.values_N.detach()}
        if self.config.clip is None:
            return Loss(0.5 * plain_N, metrics)
        limited_N = view.old_values_N + (view.values_N - view.old_values_N).clamp(-self.config.clip, self.config.clip)
        limited_N = (limited_N - view.returns_N).square()
        metrics["value_clip_fraction"] = (limited_N > plain_N).float()
        return Loss(0.5 * plain_N.maximum(limited_N), metrics)
