"""Direct preference optimization and the losses of its family.

For a pair of responses y_w (chosen) over y_l (rejected) to a prompt x:

    r(y)       = log π(y | x) - log π_reference(y | x)     summed over the response's tokens
    h          = β (r(y_w) - r(y_l))
    sigmoid    -(1 - ε) log σ(h) - ε log σ(-h)             DPO (arXiv 2305.18290, eq. 7); ε > 0: conservative DPO (E. Mitchell
                                                           2023, "A note on DPO with noisy preferences", eq. 3)
    ipo        (h / β - 1 / 2β)²                           IPO (arXiv 2310.12036, eq. 17)
    hinge      max(0, 1 - h)                               SLiC (arXiv 2305.10425)
    robust     [-(1 - ε) log σ(h) + ε log σ(-h)] / (1 - 2ε)     robust DPO (arXiv 2403.00329, eq. 12)
    exo_pair   σ(h) log [σ(h) / (1 - ε)] + σ(-h) log [σ(-h) / ε]     EXO, ε > 0 (arXiv 2402.00856, eq. 16)
    nca_pair   -log σ(βr_w) - ½ log σ(-βr_w) - ½ log σ(-βr_l)        NCA (arXiv 2402.05369)
    bco_pair   -log σ(βr_w) - log σ(-βr_l)                 BCO with a shift of 0 (arXiv 2404.04656)
    sppo_hard  (r_w - 1 / 2β)² + (r_l + 1 / 2β)²           SPPO with hard probabilities (arXiv 2405.00675, eq. 4.7)
    apo_zero   1 - σ(βr_w) + σ(βr_l)                       APO (arXiv 2408.06266, eq. 7): the chosen ones are better than the policy's
    apo_down   σ(βr_w) + 1 - σ(h)                          APO (eq. 8): they are worse
    discopop   -(1 - g) log σ(h) + g e^-h, g = σ(h / τ)    DiscoPOP (arXiv 2406.08414, eq. 5)
    aot        -(1 - ε) log σ(h + βs) - ε log σ(-h - βs)   AOT of pairs (arXiv 2406.05882): with Δ = log π(y_w) - log π(y_l), the pair
                                                           with the k-th smallest Δ of its optimizer update is compared with the k-th
                                                           smallest Δ_reference, s = Δ_reference of its own - that one
    sft        -log π(y_w | x) / n_w                       likelihood of the chosen response, n_w its tokens

`form` may also be a mapping of several to their weights, whose losses are added: MPO is {sigmoid: 0.8, bco_pair: 0.2, sft: 1} (arXiv 2411.10442).

aot sorts all pairs of the update, over micro-batches and ranks, where TRL sorts those of one micro-batch. Each pair counts once in the order,
whatever its weight. The order is that of the policy before the step: with several updates in a step, pairs may have passed each other since.

`length_normalised` divides r(y) by the number of the response's tokens (Tülu 3, arXiv 2411.15124, section 5). TRL always does so in
ipo. β should then be larger by about as many times as responses have tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator, model_validator

from rftcore.algorithms.base import MAX_LOG_RATIO, Loss, PairTerm, PartConfig, Signal, Signals, StepBatch, TokenView
from rftcore.algorithms.losses.pairs import pair_metrics, pooled_pairs

if TYPE_CHECKING:
    from torch import Tensor

Form = Literal[
    "sigmoid",
    "ipo",
    "hinge",
    "robust",
    "exo_pair",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
    "discopop",
    "aot",
    "sft",
]
_SMOOTHED = ("sigmoid", "robust", "exo_pair", "aot")


class DPOConfig(PartConfig):
    form: dict[Form, float] = Field(
        {"sigmoid": 1.0}, description="The loss of a margin: one, or several with their weights."
    )
    beta: float = Field(0.1, gt=0, description="How closely the policy is held to the reference model.")
    label_smoothing: float = Field(0.0, ge=0, lt=0.5, description="ε: share of pairs assumed to be swapped.")
    length_normalised: bool = Field(False, description="Log-ratios per token instead of per response.")
    tau: float = Field(0.05, gt=0, description="τ of discopop.")

    @field_validator("form", mode="before")
    @classmethod
    def _one_form(cls, value: Any) -> Any:
        return {value: 1.0} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _smoothing_fits_the_form(self) -> DPOConfig:
        if not self.form or min(self.form.values()) < 0:
            raise ValueError("form needs at least one loss, with a weight that is not negative")
        if self.label_smoothing and not set(self.form) & set(_SMOOTHED):
            raise ValueError(f"label_smoothing is for the forms {', '.join(_SMOOTHED)}")
        if "exo_pair" in self.form and not self.label_smoothing:
            raise ValueError("exo_pair needs label_smoothing above 0, such as 0.001: its loss is infinite without")
        return self


@dataclass(frozen=True)
class _Pairs:
    """The inputs of the losses of pairs; `chosen_P` and `rejected_P` are β r(y), and `sorted_shift_P` is the s of aot."""

    chosen_P: Tensor
    rejected_P: Tensor
    nll_P: Tensor
    sorted_shift_P: Tensor | None
    config: DPOConfig

    @property
    def margin_P(self) -> Tensor:
        return self.chosen_P - self.rejected_P


class DPO(PairTerm):
    """Metrics: see `pair_metrics`."""

    Config = DPOConfig
    needs = frozenset({"reference"})
    config: DPOConfig

    @property
    def signals(self) -> frozenset[Signal]:
        return self.needs | {"old"} if "aot" in self.config.form else self.needs

    def over_update(self, batch: StepBatch, signals: Signals, members_B: Tensor) -> Tensor | None:
        if "aot" not in self.config.form:
            return None
        assert signals.old_N is not None and signals.reference_N is not None
        per_sequence = batch.mean_per_sequence if self.config.length_normalised else batch.sum_per_sequence
        policy_P, reference_P = (
            per_sequence(values_N).view(-1, 2).diff(dim=1)[:, 0].neg()
            for values_N in (signals.old_N, signals.reference_N)
        )
        # A pair with an empty answer is not trained on, so it has no position in the order either.
        counted_P = (members_B & batch.whole_pairs_B)[::2]
        shift_P = policy_P.new_zeros(len(policy_P))
        own_P = reference_P[counted_P]
        shift_P[counted_P] = own_P - own_P.sort().values[policy_P[counted_P].argsort(stable=True).argsort()]
        return shift_P.repeat_interleave(2)

    def __call__(self, view: TokenView) -> Loss:
        config = self.config
        assert view.reference_N is not None
        sums_P2, tokens_P2 = pooled_pairs(view, view.logprobs_N - view.reference_N)
        tokens_P2 = tokens_P2.clamp(min=1)
        rewards_P2 = config.beta * (sums_P2 / tokens_P2 if config.length_normalised else sums_P2)
        nll_P = -pooled_pairs(view, view.logprobs_N)[0][:, 0] / tokens_P2[:, 0]
        shift_P = None if view.over_update_S is None else view.sequences.in_pairs(view.over_update_S)[:, 0]
        pairs = _Pairs(rewards_P2[:, 0], rewards_P2[:, 1], nll_P, shift_P, config)
        loss_P = nll_P.new_zeros(len(nll_P))
        for form, weight in config.form.items():
            loss_P = loss_P + weight * _LOSSES[form](pairs)
        return Loss(loss_P, pair_metrics(rewards_P2))


def _log_sigmoid(x: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(x)


def _sigmoid(pairs: _Pairs) -> Tensor:
    return _smoothed(pairs.margin_P, pairs.config.label_smoothing)


def _smoothed(margin_P: Tensor, smoothing: float) -> Tensor:
    return -(1.0 - smoothing) * _log_sigmoid(margin_P) - smoothing * _log_sigmoid(-margin_P)


def _ipo(pairs: _Pairs) -> Tensor:
    beta = pairs.config.beta
    return (pairs.margin_P / beta - 1.0 / (2.0 * beta)).square()


def _hinge(pairs: _Pairs) -> Tensor:
    return (1.0 - pairs.margin_P).relu()


def _robust(pairs: _Pairs) -> Tensor:
    smoothing = pairs.config.label_smoothing
    loss_P = -(1.0 - smoothing) * _log_sigmoid(pairs.margin_P) + smoothing * _log_sigmoid(-pairs.margin_P)
    return loss_P / (1.0 - 2.0 * smoothing)


def _exo_pair(pairs: _Pairs) -> Tensor:
    smoothing, margin_P = pairs.config.label_smoothing, pairs.margin_P
    right_P = margin_P.sigmoid() * (_log_sigmoid(margin_P) - math.log1p(-smoothing))
    return right_P + (-margin_P).sigmoid() * (_log_sigmoid(-margin_P) - math.log(smoothing))


def _nca_pair(pairs: _Pairs) -> Tensor:
    pushed_P = _log_sigmoid(-pairs.chosen_P) + _log_sigmoid(-pairs.rejected_P)
    return -_log_sigmoid(pairs.chosen_P) - 0.5 * pushed_P


def _bco_pair(pairs: _Pairs) -> Tensor:
    return -_log_sigmoid(pairs.chosen_P) - _log_sigmoid(-pairs.rejected_P)


def _sppo_hard(pairs: _Pairs) -> Tensor:
    beta = pairs.config.beta
    return (pairs.chosen_P / beta - 0.5 / beta).square() + (pairs.rejected_P / beta + 0.5 / beta).square()


def _apo_zero(pairs: _Pairs) -> Tensor:
    return (-pairs.chosen_P).sigmoid() + pairs.rejected_P.sigmoid()


def _apo_down(pairs: _Pairs) -> Tensor:
    return pairs.chosen_P.sigmoid() + (-pairs.margin_P).sigmoid()


def _discopop(pairs: _Pairs) -> Tensor:
    share_P = (pairs.margin_P / pairs.config.tau).sigmoid()
    return -_log_sigmoid(pairs.margin_P) * (1.0 - share_P) + (-pairs.margin_P).clamp(max=MAX_LOG_RATIO).exp() * share_P


def _aot(pairs: _Pairs) -> Tensor:
    assert pairs.sorted_shift_P is not None
    return _smoothed(pairs.margin_P + pairs.config.beta * pairs.sorted_shift_P, pairs.config.label_smoothing)


def _sft(pairs: _Pairs) -> Tensor:
    return pairs.nll_P


_LOSSES: dict[Form, Callable[[_Pairs], Tensor]] = {
    "sigmoid": _sigmoid,
    "ipo": _ipo,
    "hinge": _hinge,
    "robust": _robust,
    "exo_pair": _exo_pair,
    "nca_pair": _nca_pair,
    "bco_pair": _bco_pair,
    "sppo_hard": _sppo_hard,
    "apo_zero": _apo_zero,
    "apo_down": _apo_down,
    "discopop": _discopop,
    "aot": _aot,
    "sft": _sft,
}
