"""The ratio of the policy to its anchor, over a token or over a sequence.

    token      π(o_t) / π_anchor(o_t)
    sequence   exp(mean_t log(π / π_anchor))     the geometric mean of the sequence's ratios (GSPO, arXiv 2507.18071, eq. 5)
    product    exp(Σ_t log(π / π_anchor))        the ratio of the whole response, of high variance when it is long

The two of a sequence are the same at all of its tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from rftcore.algorithms.base import MAX_LOG_RATIO, TokenView

if TYPE_CHECKING:
    from torch import Tensor

Level = Literal["token", "sequence", "product"]


def log_ratio(view: TokenView, level: Level) -> Tensor:
    """Return the logarithm of the ratio at each token, [N]; clamped.

    The sum of a sequence's n entries has the gradient of n ratios of the sequence. Each token carries its own share: the gradient of its
    log-probability once for `sequence`, n times for `product`.
    """
    if level == "token":
        return view.log_ratio_N
    sums_S, num_tokens_S, place_N = view.pool(view.log_ratio_N.detach())
    own_N = view.logprobs_N - view.logprobs_N.detach()
    if level == "sequence":
        return (sums_S / num_tokens_S)[place_N] + own_N
    return sums_S.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)[place_N] + num_tokens_S[place_N] * own_N
