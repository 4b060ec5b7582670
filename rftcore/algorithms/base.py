"""The parts of an algorithm, and the data that passes between them.

An algorithm is composed (`algorithm.py`) of an advantage, one or more loss terms, and optional masks, corrections and penalties.
Once per optimizer batch, and over all ranks, an `Advantage` turns a `StepBatch` and its `Signals` into a `Credit`. Per micro-batch
each `Term` turns a `TokenView` into a loss per unit: a token, a sequence or a preference pair. A term never averages. The weight of
every unit comes from the whole batch, so neither micro-batches, nor packing, nor the number of ranks change the gradient.

To write a part: subclass `Advantage`, `TokenMask` or one of the terms, declare `needs`, give it a `Config`, and name the class by
path (`loss: {name: ./my_loss.py:MyLoss}`). `docs/how-to/write-an-algorithm.md` shows one.

Shapes: B sequences (experiences) of the batch; A turns of the sequence with the most turns; N tokens with a loss, of all sequences, sequence
after sequence; P pairs, where sequences 2p and 2p + 1 are the chosen and the rejected one. All tensors of a batch are on the CPU; those of a view are on the
trainer's device.
"""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from rftdata.config import Section

if TYPE_CHECKING:
    from torch import Tensor

    from rftcore.algorithms.sequences import Sequences

# Most processes read what an algorithm needs and compute nothing: they do not import torch, but a missing torch is reported here.
if importlib.util.find_spec("torch") is None:
    raise ModuleNotFoundError("No module named 'torch'", name="torch")

Signal = Literal[
    "behavior",
    "old",
    "reference",
    "teacher",
    "values",
    "entropy",
    "discriminator",
    "collision",
    "mismatched",
    "teacher_logits",
]
Column = Literal["step_rewards", "state", "baseline_rewards", "reward_parts", "role_baselines"]
PER_TURN: frozenset[Column] = frozenset({"step_rewards", "state"})
Unit = Literal["token", "sequence", "pair"]

# exp(20) is 5e8: the two policies have nothing in common. A slightly larger ratio would overflow to NaN.
MAX_LOG_RATIO = 20.0


class PartConfig(Section):
    """Base of the keys that a part takes in YAML, in addition to its `name`."""


@dataclass(frozen=True, kw_only=True)
class StepBatch:
    """One optimizer batch over all ranks: whole groups, or whole pairs.

    Attributes:
        step: number of the trainer step, from 1.
        rewards_B: float32; the reward as it stood when the batch was drawn, NaN where there is none.
        group_B: int64; index of the group, 0..G-1. Where workflows have roles, each role of a group is a group of its own: rewards
            of two roles are not comparable.
        rollout_B: int64; rollout within the group. Branches of one rollout share it.
        turn_BA: int64; number of each turn of the sequence in its rollout, from 0, ascending; -1 after the last.
        turn_N: int64; column of `turn_BA` of the token's turn.
        sequence_N: int64, ascending; the sequence of each token.
        behavior_N: float32, nats; log-probability under the policy that sampled the token, NaN where no policy did.
        importance_weights_B: float32; corrects for the probability with which prioritised sampling drew the sequence
            (arXiv 1511.05952, section 3.4), 1 otherwise.
        expert_B: bool; the sequence was written by an expert (a person, a stronger model) and not sampled.
        token_rewards_N: float32; rewards of single tokens, in addition to `rewards_B`. None where there are none.
        step_rewards_BA: float32; reward of each turn alone, 0 where `turn_BA` is -1. None where workflows recorded none.
        state_BA: int64; hash of the environment's state before each turn, 0 where `turn_BA` is -1. None where workflows recorded none.
        baseline_rewards_B: float32; reward of the greedy response to the same task, None where none was sampled.
        role_baselines_B: float32; running mean reward of the sequence's taskset and role before its rollout, None where no part reads it.
        reward_parts_B: float32 [B, K]; the rewards by name, as sampled, None where they are not read.
        reward_names: names of the K.
    """

    step: int
    rewards_B: Tensor
    group_B: Tensor
    rollout_B: Tensor
    turn_BA: Tensor
    turn_N: Tensor
    sequence_N: Tensor
    behavior_N: Tensor
    importance_weights_B: Tensor
    expert_B: Tensor
    token_rewards_N: Tensor | None = None
    step_rewards_BA: Tensor | None = None
    state_BA: Tensor | None = None
    baseline_rewards_B: Tensor | None = None
    role_baselines_B: Tensor | None = None
    reward_parts_B: Tensor | None = None
    reward_names: tuple[str, ...] = ()

    @property
    def num_sequences(self) -> int:
        return len(self.rewards_B)

    def sum_per_sequence(self, values_N: Tensor) -> Tensor:
        """Sum the values over each sequence's tokens, [B]; 0 for a sequence without tokens."""
        return values_N.new_zeros(self.num_sequences).index_add(0, self.sequence_N, values_N)

    def mean_per_sequence(self, values_N: Tensor) -> Tensor:
        """Average the values over each sequence's tokens, [B]; 0 for a sequence without tokens."""
        return self.sum_per_sequence(values_N) / self.tokens_B.clamp(min=1)

    @property
    def whole_pairs_B(self) -> Tensor:
        """Whether both answers of each sequence's pair have a token that counts, bool [B]. The pairs are sequences 2p and 2p + 1."""
        answered_B: Tensor = self.tokens_B > 0
        return answered_B & answered_B.view(-1, 2).flip(1).flatten()

    @property
    def tokens_B(self) -> Tensor:
        """Number of tokens with a loss, int64 [B]."""
        return self.sequence_N.bincount(minlength=self.num_sequences)

    def only(self, kept_B: Tensor) -> StepBatch:
        """Return the batch with only the sequences where `kept_B` is True, and their tokens."""
        kept_N = kept_B[self.sequence_N]
        number_B = kept_B.long().cumsum(0) - 1
        columns = _only(self, kept_N) | {
            column.name: getattr(self, column.name)[kept_B]
            for column in fields(self)
            if column.name.endswith(("_B", "_BA")) and getattr(self, column.name) is not None
        }
        return replace(self, **columns | {"sequence_N": number_B[self.sequence_N[kept_N]]})


@dataclass(frozen=True, kw_only=True)
class Signals:
    """Results of the forward passes without gradient at the start of a step; only those that parts declare in `needs` are computed.

    Attributes:
        old_N: float32, nats; log-probability under the policy before the step.
        reference_N: the same under the reference model, which is the model that the run started from.
        teacher_N: the same under the teacher.
        values_N: float32; the critic's value of the state before the token.
        entropy_N: float32, nats; entropy of the policy's distribution before the token.
        discriminator_N: float32; Σ_v p_v² (H + log p_v) of that distribution, H its entropy (`masks.clip_v`).
        collision_N: float32; Σ_v p_v² of that distribution: the probability that two draws from it are equal.
        mismatched_kl: float32, a single number, nats; mean of Σ_t log(π / π_reference) over sequences that join a prompt of the
            batch with the response to another one (`rftcore.trainer.batches.forms.mismatched`), over all ranks. 0 where the batch
            has one prompt.

    `teacher_logits` is not among them: a `HeadTerm` reads the teacher's logits in the forward pass of the loss.
    """

    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None
    values_N: Tensor | None = None
    entropy_N: Tensor | None = None
    mismatched_kl: Tensor | None = None
    discriminator_N: Tensor | None = None
    collision_N: Tensor | None = None

    def only(self, kept_N: Tensor) -> Signals:
        """Return the signals of only the tokens where `kept_N` is True."""
        return replace(self, **_only(self, kept_N))


@dataclass(frozen=True, kw_only=True)
class Credit:
    """The result of an advantage.

    Attributes:
        advantages_N: float32.
        returns_N: float32; target of the critic, None where there is no critic.
        counted_N: bool; False for tokens that are left out of the loss and of its denominators. None for all True.
        metrics: means over the batch.
    """

    advantages_N: Tensor
    returns_N: Tensor | None = None
    counted_N: Tensor | None = None
    metrics: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenView:
    """The tokens of some whole sequences (whole pairs) in one micro-batch.

    Attributes:
        logprobs_N: float32, nats; under the policy being trained. Carries the gradient.
        anchor_N: log-probability that ratios compare with: under the policy before the step if the algorithm has it recomputed, else
            under the behaviour policy, as recorded. 0 where there is none.
        advantages_N: float32; 0 in an algorithm without advantages.
        sequences: the sequences of the batch to which they belong. The tokens of a sequence are contiguous.
        reference_N, teacher_N: None unless declared in `needs`.
        entropy_N: nats; carries the gradient. None unless the algorithm has an entropy bonus.
        values_N, old_values_N, returns_N: of the critic; `values_N` carries the gradient. None without a critic. For a scorer's
            loss each sequence has one token, and `values_N` is its score.
        rewards_N: float32; the reward of the token's sequence, NaN where there is none.
        read_N: result of `HeadTerm.read` for the token's logits; carries the gradient. None for other terms.
        kept_N: bool; False for the tokens that the mask chose. None without a mask.
        mismatched_kl: see `Signals`.
        over_update_S: float32; result of `Term.over_update` for each sequence of `sequences`. None for a loss that depends on no other
            sequence.
    """

    logprobs_N: Tensor
    anchor_N: Tensor
    advantages_N: Tensor
    sequences: Sequences
    reference_N: Tensor | None = None
    teacher_N: Tensor | None = None
    entropy_N: Tensor | None = None
    values_N: Tensor | None = None
    old_values_N: Tensor | None = None
    returns_N: Tensor | None = None
    rewards_N: Tensor | None = None
    read_N: Tensor | None = None
    kept_N: Tensor | None = None
    mismatched_kl: Tensor | None = None
    over_update_S: Tensor | None = None

    @property
    def log_ratio_N(self) -> Tensor:
        """log(π / π_anchor), clamped to ±`MAX_LOG_RATIO`; carries the gradient."""
        return (self.logprobs_N - self.anchor_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)

    @property
    def sequence_N(self) -> Tensor:
        """int64; the sequence of the batch that each token belongs to."""
        return self.sequences.sequence_N

    def pool(self, values_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the sum of each sequence's values and its number of tokens, [S], and the place of each token's sequence among them, [N].

        S are the sequences with a token, in the batch's order.
        """
        sequences = self.sequences
        return sequences.sum_per_sequence(values_N), sequences.num_tokens_S, sequences.place_N

    def sequence_mean(self, values_N: Tensor) -> Tensor:
        """Return, at each token, the mean over its sequence, [N]; carries the gradient."""
        sum_S, num_tokens_S, place_N = self.pool(values_N)
        return (sum_S / num_tokens_S)[place_N]


@dataclass(frozen=True)
class Loss:
    """A loss per unit, to be minimised and not yet weighted, and metrics per unit, which are averaged over the whole batch."""

    loss_U: Tensor
    metrics_U: dict[str, Tensor] = field(default_factory=dict)


class Part:
    """Base of all parts. A part keeps no state between steps.

    Attributes:
        needs: signals that it reads.
        columns: entries per sequence or turn that it needs. A batch has only those that a part declares, here or in `optional_columns`.
        optional_columns: entries per sequence or turn that it reads where every sampled sequence has them; None where none has.
        min_group_size: 2 where it compares the rollouts of a group.
        uses_rewards: it reads rewards, so each sequence must have one.
    """

    Config: ClassVar[type[PartConfig]] = PartConfig
    needs: ClassVar[frozenset[Signal]] = frozenset()
    columns: ClassVar[frozenset[Column]] = frozenset()
    optional_columns: ClassVar[frozenset[Column]] = frozenset()
    min_group_size: ClassVar[int] = 1
    uses_rewards: ClassVar[bool] = False

    def __init__(self, config: PartConfig | None = None) -> None:
        self.config = config or self.Config()

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that it reads with its configuration; `needs` by default."""
        return self.needs


class Advantage(Part, ABC):
    """Computes one advantage per token from rewards and signals.

    Attributes:
        imitates: it selects responses to imitate, at temperature 1 whatever sampled them, instead of giving a policy gradient.
    """

    imitates: ClassVar[bool] = False
    uses_rewards = True

    @abstractmethod
    def __call__(self, batch: StepBatch, signals: Signals) -> Credit:
        """Return the advantages of the whole batch.

        Raises:
            RftError: a reward that is not a number.
        """


class TokenMask(Part, ABC):
    """Chooses tokens that give no gradient in this step, by statistics of the whole batch.

    Attributes:
        each_update: it is called again before each optimizer update, with the update's tokens and the signals of the policy at that
            time. This costs a forward pass for each update after the first.
    """

    each_update: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, batch: StepBatch, signals: Signals, advantages_N: Tensor) -> Tensor:
        """Return bool [N], False where the token gives no gradient. Dropped tokens still count in the loss's denominator."""


class Term(Part, ABC):
    """A loss; subclass `TokenTerm`, `SequenceTerm` or `PairTerm`.

    Attributes:
        unit: what one number of the loss belongs to.
        compares: it compares the policy with `TokenView.anchor_N`.
        uses_advantages: it reads `TokenView.advantages_N`.
        reads_mask: it needs a mask, and uses the tokens that the mask chose otherwise than by dropping them.
        of_critic: it trains the critic instead of the policy, from `values_N`, `old_values_N` and `returns_N`.
        of_scorer: it trains a model with a scalar head in place of the language-model head, from `values_N`.
    """

    unit: ClassVar[Unit]
    compares: ClassVar[bool] = False
    uses_advantages: ClassVar[bool] = False
    reads_mask: ClassVar[bool] = False
    of_critic: ClassVar[bool] = False
    of_scorer: ClassVar[bool] = False

    @abstractmethod
    def __call__(self, view: TokenView) -> Loss:
        """Return the loss of each unit of a micro-batch."""

    def over_update(self, batch: StepBatch, signals: Signals, members_B: Tensor) -> Tensor | None:
        """Compute what the loss of each sequence takes from the others of its optimizer update, before the first micro-batch.

        Returns:
            float32 [B], without gradient; None, the default, for a loss that depends on its own unit alone.

        Args:
            members_B: bool; the sequences of the update.
        """
        return None


class TokenTerm(Term):
    """One loss per token; `algorithm.aggregation` weights the tokens."""

    unit = "token"


class HeadTerm(TokenTerm):
    """One loss per token that depends on whole distributions: of the policy, and, unless `needs` is empty, of the teacher at the same place.

    The trainer calls `read` on some rows of logits at a time, and again on the same rows in the backward pass, so that logits of all
    tokens never exist at once. The results become `TokenView.read_N`. Each depends on its row alone.
    """

    needs = frozenset({"teacher_logits"})

    @abstractmethod
    def read(self, logits_RV: Tensor, teacher_logits_RV: Tensor | None) -> Tensor:
        """Return one number per row, float32 [R].

        Args:
            logits_RV: float32, after division by the temperature; carries the gradient.
            teacher_logits_RV: the same of the teacher, without gradient; None for a loss that needs none.
        """

    def __call__(self, view: TokenView) -> Loss:
        """Return the numbers as the loss."""
        assert view.read_N is not None
        return Loss(view.read_N)


class SequenceTerm(Term):
    """One loss per sequence, in the order of `TokenView.pool`; the batch's loss is the mean over rollouts of the mean over their sequences."""

    unit = "sequence"


class PairTerm(Term):
    """One loss per preference pair; the batch's loss is the mean over pairs."""

    unit = "pair"


def _only(parts: StepBatch | Signals, kept_N: Tensor) -> dict[str, Tensor]:
    """Return the fields per token that are not None, for the tokens where `kept_N` is True."""
    named = {entry.name: getattr(parts, entry.name) for entry in fields(parts) if entry.name.endswith("_N")}
    return {name: values[kept_N] for name, values in named.items() if values is not None}
