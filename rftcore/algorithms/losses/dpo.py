"""Direct preference optimization and the losses of its family.

For a pair of responses y_w (chosen) over y_l (rejected) to a prompt x:

    r(y)     = log π(y | x) - log π_reference(y | x)     summed over the response's tokens
    Δ        = r(y_w) - r(y_l)
    sigmoid  -(1 - ε) log σ(βΔ) - ε log σ(-βΔ)           DPO (arXiv 2305.18290, eq. 7); ε > 0: conservative DPO (E. Mitchell
                                                         2023, "A note on DPO with noisy preferences", eq. 3)
    ipo      (Δ - 1 / 2β)²                               IPO (arXiv 2310.12036, eq. 17)
    hinge    max(0, 1 - βΔ)                              SLiC (arXiv 2305.10425)
    robust   [-(1 - ε) log σ(βΔ) + ε log σ(-βΔ)] / (1 - 2ε)     robust DPO (arXiv 2403.00329, eq. 12)

`length_normalised` divides r(y) by the number of the response's tokens (Tülu 3, arXiv 2411.15124, section 5). TRL always does so in
ipo. β should then be larger by about as many times as responses have tokens.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from rftcore.algorithms.base import Loss, PairTerm, PartConfig, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs


class DPOConfig(PartConfig):
    form: Literal["sigmoid", "ipo", "hinge", "robust"] = Field("sigmoid", description="The loss of a margin.")
    beta: float = Field(0.1, gt=0, description="How closely the policy is held to the reference model.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="ε: share of pairs assumed to be swapped.")
    length_normalised: bool = Field(False, description="Log-ratios per token instead of per response.")

    @model_validator(mode="after")
    def _smoothing_fits_the_form(self) -> DPOConfig:
        if self.label_smoothing and self.form not in ("sigmoid", "robust"):
            raise ValueError("label_smoothing is for the forms sigmoid and robust")
        return self


class DPO(PairTerm):
    """Metrics: see `pair_metrics`."""

    Config = DPOConfig
    needs = frozenset({"reference"})
    config: DPOConfig

    def __call__(self, view: TokenView) -> Loss:
        from torch.nn.functional import logsigmoid

        config = self.config
        assert view.reference_N is not None
        sums_P2, tokens_P2 = pooled_pairs(view, view.logprobs_N - view.reference_N)
        ratios_P2 = sums_P2 / tokens_P2.clamp(min=1) if config.length_normalised else sums_P2
        margin_P = config.beta * (ratios_P2[:, 0] - ratios_P2[:, 1])
        smoothing = config.label_smoothing
        if config.form == "ipo":
            loss_P = (margin_P / config.beta - 1.0 / (2.0 * config.beta)).square()
        elif config.form == "hinge":
            loss_P = (1.0 - margin_P).relu()
        else:
            sign = 1.0 if config.form == "sigmoid" else -1.0
            loss_P = -(1.0 - smoothing) * logsigmoid(margin_P) - sign * smoothing * logsigmoid(-margin_P)
            if config.form == "robust":
                loss_P = loss_P / (1.0 - 2.0 * smoothing)
        return Loss(loss_P, pair_metrics(config.beta * ratios_P2))
