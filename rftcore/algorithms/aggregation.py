"""How the loss of each token is weighted, so that the loss of a batch is one weighted sum.

The weights come from the whole optimizer batch over all ranks. With n_b tokens in sequence b, n in all, and B sequences that have a
token:

    token-mean               1 / n          DAPO (arXiv 2503.14476, eq. 8)
    seq-mean-token-mean      1 / (B n_b)    GRPO (arXiv 2402.03300, eq. 3)
    seq-mean-token-sum       1 / B
    seq-mean-token-sum-norm  1 / (B L)      Dr. GRPO (arXiv 2503.20783): a constant L for every length

TRL's names for the four `loss_type`s are dapo, grpo, – and dr_grpo. Its bnpo is token-mean over a micro-batch, which depends on how
a batch is cut, and so has no counterpart here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, model_validator

from rftdata.config import Section

if TYPE_CHECKING:
    from torch import Tensor

Mode = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


class AggregationConfig(Section):
    """YAML may also give the mode alone: `aggregation: token-mean`."""

    mode: Mode = Field("token-mean", description="Weight of a token in the loss.")
    length: int | None = Field(
        None, ge=1, description="L of seq-mean-token-sum-norm, usually the longest response that is allowed."
    )

    @model_validator(mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"mode": value} if isinstance(value, str) else value

    @model_validator(mode="after")
    def _length_goes_with_its_mode(self) -> AggregationConfig:
        if (self.length is None) == (self.mode == "seq-mean-token-sum-norm"):
            raise ValueError(
                "seq-mean-token-sum-norm needs a length, such as explorer.max_tokens; the other modes take none"
            )
        return self


def token_weights(sequence_N: Tensor, num_sequences: int, config: AggregationConfig, counted_N: Tensor) -> Tensor:
    """Weight of each token, float32 [N]; 0 where `counted_N` is False. All are 0 in a batch where no token is counted.

    Args:
        sequence_N: int64; the sequence of each token.
        counted_N: bool; the tokens of the loss term.
    """
    counted = counted_N.double()
    tokens_B = counted.new_zeros(num_sequences).index_add(0, sequence_N, counted)
    num_counted = (tokens_B > 0).sum().clamp(min=1)
    if config.mode == "token-mean":
        weights = counted / tokens_B.sum().clamp(min=1)
    elif config.mode == "seq-mean-token-mean":
        weights = counted / tokens_B.clamp(min=1)[sequence_N] / num_counted
    else:
        weights = counted / num_counted / (config.length or 1)
    return weights.float()
