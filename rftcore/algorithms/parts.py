"""The parts that an algorithm is composed of."""

from __future__ import annotations

from dataclasses import dataclass

from rftcore.algorithms.aggregation import Aggregation
from rftcore.algorithms.base import Advantage, Term, TokenMask
from rftcore.algorithms.correction import Correction
from rftcore.algorithms.kl import KLEstimator


@dataclass(frozen=True, kw_only=True)
class AlgorithmParts:
    """The parts of one algorithm; None where it has none.

    Attributes:
        loss: of the policy, of sequences or of pairs.
        corrections: their weights are multiplied.
        expert: loss of sequences that an expert wrote.
        value: loss of the critic.
    """

    loss: Term
    aggregation: Aggregation
    advantage: Advantage | None = None
    mask: TokenMask | None = None
    kl: KLEstimator | None = None
    corrections: tuple[Correction, ...] = ()
    expert: Term | None = None
    value: Term | None = None
