"""What an algorithm is: advantages from rewards and a loss per token (`Algorithm`), or a loss per preference pair (`PairAlgorithm`).

To add one, write one file beside this with one class and one line in `ALGORITHMS`:

1. `class Config(AlgorithmConfig)`: the keys it takes in YAML, each with a description.
2. class attributes: `name`, `min_group_size` (2 if it compares rollouts of a group), `group_relative` (it must see
   whole groups), `uses_behavior_logprobs` (it weighs tokens by the policy that sampled them), `uses_rewards` (False if it
   can do without).
3. `advantages`: one number per experience. Optional: the default gives zeros, for losses that take no reward.
4. `loss`: one number per token that counts, and metrics per token. Never a mean: `aggregation` (a class attribute or
   a configuration key) says how tokens are weighed, and the learner applies it over the whole batch, so that cutting
   the batch into micro-batches changes nothing.
5. a docstring with the formula and the paper, and a test against numbers computed by hand.

One that compares two answers subclasses `PairAlgorithm` and writes `pair_loss`, one number per pair, instead of 3 and 4.

Shapes: B experiences of a batch; N tokens that count, of any number of experiences, one after the other; P pairs. In a batch
of pairs experience 2p is the chosen and 2p + 1 the rejected one of pair p.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, field_validator

from rftdata.config import Section
from rftdata.errors import RftError

if TYPE_CHECKING:
    from torch import Tensor

# Most processes read an algorithm's needs and compute nothing with it: they do not wait two seconds for torch, but an installation
# without it is found here.
if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"]
KLType = Literal["none", "k1", "k2", "k3"]

# exp(20) is 5e8: a ratio there says that two policies have nothing in common, and a larger one overflows to NaN.
MAX_LOG_RATIO = 20.0


class AlgorithmConfig(Section):
    """Base of every algorithm's own keys."""


class ClipConfig(Section):
    """How far the ratio of current to behaviour probability may count, as distances from 1 downwards and upwards.

    YAML may also say one number for both, or a list `[low, high]`.
    """

    low: float = Field(0.2, ge=0, lt=1, description="The ratio counts down to 1 - low.")
    high: float = Field(0.2, ge=0, description="The ratio counts up to 1 + high.")

    @classmethod
    def read(cls, value: Any) -> Any:
        """Turn YAML's short forms into the long one; anything else is left to validation."""
        if isinstance(value, int | float) and not isinstance(value, bool):
            return {"low": value, "high": value}
        if isinstance(value, list | tuple):
            if len(value) != 2:
                raise ValueError("clip takes two numbers, [low, high]")
            return {"low": value[0], "high": value[1]}
        return value


class KLConfig(Section):
    """Penalty for leaving the reference policy, which is the model the run started from."""

    type: KLType = Field("none", description="Estimator: k1, k2 or k3.")
    coef: float = Field(0.0, ge=0, description="Weight of the penalty in the loss; 0 loads no reference model.")

    @field_validator("coef")
    @classmethod
    def _has_an_estimator(cls, coef: float, info: Any) -> float:
        if coef > 0 and info.data.get("type") == "none":
            raise ValueError("a coefficient without an estimator does nothing; set kl.type to k1, k2 or k3")
        return coef


@dataclass(frozen=True)
class TokenBatch:
    """The N tokens of a micro-batch that count, flat.

    Attributes:
        logprobs_N: log-probability (nats) under the policy being trained; carries the gradient. float32.
        behavior_logprobs_N: under the policy that sampled, as recorded then; 0 where an experience has none. float32.
        advantages_N: the experience's advantage at each of its tokens. float32.
        reference_logprobs_N: under the reference model; None unless `needs_reference`. float32.
        sequence_N: which experience of the batch a token belongs to. int64, 0..B-1.
    """

    logprobs_N: Tensor
    behavior_logprobs_N: Tensor
    advantages_N: Tensor
    reference_logprobs_N: Tensor | None
    sequence_N: Tensor


@dataclass(frozen=True)
class TokenLoss:
    """A loss per token, not yet weighed, and metrics per token, which the learner averages over all tokens."""

    loss_N: Tensor
    metrics_N: dict[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class PairBatch:
    """The P pairs of a micro-batch, whole: each number is of one response, all of whose tokens that count are in it.

    Attributes:
        chosen_logprobs_P, rejected_logprobs_P: Σ_t log π(o_t) in nats under the policy being trained; carry the gradient.
        chosen_reference_P, rejected_reference_P: the same under the reference model.
        chosen_tokens_P, rejected_tokens_P: tokens that count; 0 for a response without any, whose sums are 0.
    """

    chosen_logprobs_P: Tensor
    rejected_logprobs_P: Tensor
    chosen_reference_P: Tensor
    rejected_reference_P: Tensor
    chosen_tokens_P: Tensor
    rejected_tokens_P: Tensor


@dataclass(frozen=True)
class PairLoss:
    """A loss per pair and metrics per pair; the learner takes means over all pairs of the batch."""

    loss_P: Tensor
    metrics_P: dict[str, Tensor] = field(default_factory=dict)


class Rule(ABC):
    """One learning rule; it keeps no state between steps. Base of `Algorithm` and `PairAlgorithm`."""

    Config: ClassVar[type[AlgorithmConfig]] = AlgorithmConfig
    name: ClassVar[str]
    min_group_size: ClassVar[int] = 1
    group_relative: ClassVar[bool] = False
    pairwise: ClassVar[bool] = False
    uses_behavior_logprobs: ClassVar[bool] = False
    uses_rewards: ClassVar[bool] = True
    aggregation: Aggregation = "token-mean"

    def __init__(self, config: AlgorithmConfig | None = None) -> None:
        self.config = config or self.Config()

    @property
    def needs_reference(self) -> bool:
        """Whether `loss` reads reference log-probabilities."""
        return False

    def advantages(self, rewards_B: Tensor, group_index_B: Tensor, rollout_index_B: Tensor) -> Tensor:
        """One advantage per experience, float32.

        Args:
            rewards_B: reward of each experience as it stands now.
            group_index_B: the group of each experience.
            rollout_index_B: its rollout within the group; turns of one rollout share it.

        Raises:
            RftError: a reward that is not a number.
        """
        return rewards_B.new_zeros(len(rewards_B)).float()

    @abstractmethod
    def objective(self, tokens: TokenBatch, weights_N: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
        """What a micro-batch adds to the batch's loss and to its metrics, which are means.

        Args:
            weights_N: weight of each token in the loss of the whole batch.
            share: 1 / number of tokens that count in the whole batch; in a batch of pairs, 1 / number of pairs.
        """


class Algorithm(Rule):
    """A rule whose loss is a sum over tokens."""

    @abstractmethod
    def loss(self, tokens: TokenBatch) -> TokenLoss:
        """The loss of each token, to be minimised."""

    def objective(self, tokens: TokenBatch, weights_N: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.loss(tokens)
        metrics = {name: value.sum() * share for name, value in found.metrics_N.items()}
        return (found.loss_N * weights_N).sum(), metrics


class PairAlgorithm(Rule):
    """A rule that compares the two responses of a preference pair with what the reference model makes of them."""

    pairwise = True
    uses_rewards = False

    @property
    def needs_reference(self) -> bool:
        return True

    @abstractmethod
    def pair_loss(self, pairs: PairBatch) -> PairLoss:
        """The loss of each pair, to be minimised."""

    def objective(self, tokens: TokenBatch, weights_N: Tensor, share: float) -> tuple[Tensor, dict[str, Tensor]]:
        found = self.pair_loss(pairs_of(tokens))
        return found.loss_P.sum() * share, {name: value.sum() * share for name, value in found.metrics_P.items()}


def pairs_of(tokens: TokenBatch) -> PairBatch:
    """The pairs whose tokens these are, in order of their numbers; float32 sums."""
    assert tokens.reference_logprobs_N is not None
    pair_N, rejected_N = tokens.sequence_N // 2, tokens.sequence_N % 2
    pairs_P, place_N = pair_N.unique(return_inverse=True)
    place_N = 2 * place_N + rejected_N

    def sums_P2(values_N: Tensor) -> Tensor:
        return values_N.new_zeros(2 * len(pairs_P)).index_add(0, place_N, values_N).view(-1, 2)

    logprobs_P2, reference_P2 = sums_P2(tokens.logprobs_N), sums_P2(tokens.reference_logprobs_N)
    tokens_P2 = sums_P2(tokens.reference_logprobs_N.new_ones(len(tokens.reference_logprobs_N)))
    return PairBatch(
        chosen_logprobs_P=logprobs_P2[:, 0],
        rejected_logprobs_P=logprobs_P2[:, 1],
        chosen_reference_P=reference_P2[:, 0],
        rejected_reference_P=reference_P2[:, 1],
        chosen_tokens_P=tokens_P2[:, 0],
        rejected_tokens_P=tokens_P2[:, 1],
    )


def aggregation_weights(loss_mask_BT: Tensor, mode: Aggregation) -> Tensor:
    """Weight of each token in the loss, so that the loss is a plain weighted sum; 0 where the mask is False.

    With n_b tokens in experience b, n over all, and B experiences that have any token:
    `token-mean` 1/n (DAPO, arXiv 2503.14476 eq. 8); `seq-mean-token-mean` 1/(B n_b) (GRPO, arXiv 2402.03300 eq. 3);
    `seq-mean-token-sum` 1/B (no preference by length; Dr. GRPO, arXiv 2503.20783, up to a constant).
    A batch without any token has weight 0 everywhere.
    """
    mask = loss_mask_BT.double()
    tokens_B = mask.sum(dim=1)
    num_sequences = (tokens_B > 0).sum().clamp(min=1)
    if mode == "token-mean":
        weights = mask / tokens_B.sum().clamp(min=1)
    elif mode == "seq-mean-token-mean":
        weights = mask / tokens_B.clamp(min=1)[:, None] / num_sequences
    elif mode == "seq-mean-token-sum":
        weights = mask / num_sequences
    else:
        raise ValueError(f"unknown aggregation {mode!r}; allowed: token-mean, seq-mean-token-sum, seq-mean-token-mean")
    return weights.float()


def kl_k1(logprobs: Tensor, reference: Tensor) -> Tensor:
    """log p - log q: unbiased, high variance, may be negative (J. Schulman 2020, "Approximating KL Divergence").

    As a loss its gradient on samples of p is 0 on average; k2 and k3 are the ones that pull.
    """
    return logprobs - reference


def kl_k2(logprobs: Tensor, reference: Tensor) -> Tensor:
    """(log p - log q)² / 2: biased, low variance, never negative (Schulman 2020)."""
    return 0.5 * (logprobs - reference).square()


def kl_k3(logprobs: Tensor, reference: Tensor) -> Tensor:
    """q/p - 1 - log(q/p): unbiased, low variance, never negative (Schulman 2020; GRPO, arXiv 2402.03300 eq. 4)."""
    log_ratio = (reference - logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return log_ratio.expm1() - log_ratio


KL_ESTIMATORS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}


def refuse_missing_rewards(rewards_B: Tensor, group_index_B: Tensor, rollout_index_B: Tensor) -> None:
    """Stop before a NaN reaches the weights.

    Raises:
        RftError: names the first reward that is not finite.
    """
    wrong = (~rewards_B.isfinite()).nonzero().flatten().tolist()
    if wrong:
        row = wrong[0]
        raise RftError(
            f"{len(wrong)} of {len(rewards_B)} rewards of the batch cannot be trained on; the first is row {row}, "
            f"rollout {int(rollout_index_B[row])} of group {int(group_index_B[row])} of the batch",
            value=float(rewards_B[row]),
            allowed="finite numbers",
            todo="set the reward (UPDATE rft.experience SET reward = …) or drop the row in the operator chain",
        )
