"""SFT: supervised fine-tuning on the responses as they are.

    loss_t = -log π(o_t | o_<t)

the negative log-likelihood (cross-entropy) of each response token, averaged over all tokens of the batch. Rewards are
ignored; choose what to imitate in the operator chain. Every experience counts alone, so groups may have any size.
"""

from __future__ import annotations

from rftcore.algorithms.base import Algorithm, TokenBatch, TokenLoss


class SFT(Algorithm):
    """Maximum likelihood of the response tokens; it has no keys of its own."""

    name = "sft"
    uses_rewards = False

    def loss(self, tokens: TokenBatch) -> TokenLoss:
        return TokenLoss(-tokens.logprobs_N)
