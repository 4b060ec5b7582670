"""The whole batch of a step from the shares of data-parallel ranks, so that every rank plans the same step.

Advantages, masks and weights are statistics of the whole optimizer batch. A rank holds whole groups (`rftdata.training.batch.Batch.share`)
and computes the signals of its own tokens. Each rank then sends both to the others, about 4 bytes per token and signal, and runs
`Algorithm.plan` on the joined batch. No part communicates.

What a rank's micro-batches add to the loss is its part of the batch's loss. Gradients and metrics are therefore added up over ranks, not
averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from rftcore.algorithms.base import Signals, StepBatch
from rftdata.errors import RftError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed import ProcessGroup

Share = tuple[StepBatch, Signals]


@dataclass(frozen=True, kw_only=True)
class Joined:
    """The whole batch as one rank sees it.

    Attributes:
        batch, signals: of all ranks, rank after rank.
        first_token: place of the rank's first token in them; token n of its share is token `first_token` + n of the batch.
    """

    batch: StepBatch
    signals: Signals
    first_token: int


def collect(batch: StepBatch, signals: Signals, group: ProcessGroup | None = None) -> Joined:
    """Exchange the shares of a step; every rank of the process group calls it once per step.

    Args:
        batch, signals: the rank's own share: whole groups, or whole pairs. Their tensors are on the CPU.
        group: a process group that can send CPU tensors (gloo); None for the default one.

    Raises:
        RftError: an input that only some ranks have.
    """
    import torch.distributed as dist

    shares: list[Share] = [(batch, signals)] * dist.get_world_size(group)
    dist.all_gather_object(shares, (batch, signals), group=group)
    return joined(shares, dist.get_rank(group))


def joined(shares: Sequence[Share], rank: int) -> Joined:
    """Put the shares one after the other, with groups and sequences renumbered.

    Raises:
        RftError: an input that only some ranks have.
    """
    import torch

    batches = [batch for batch, _ in shares]
    found: dict[str, Tensor | None] = {
        entry.name: _concatenated(entry.name, [getattr(batch, entry.name) for batch in batches], batches)
        for entry in fields(StepBatch)
        if entry.name != "step"
    }
    for name, sizes in (
        ("group_B", [int(batch.group_B.max()) + 1 if batch.num_sequences else 0 for batch in batches]),
        ("sequence_N", [batch.num_sequences for batch in batches]),
    ):
        found[name] = torch.cat([getattr(b, name) + sum(sizes[:i]) for i, b in enumerate(batches)])
    signals = {
        entry.name: _concatenated(entry.name, [getattr(share, entry.name) for _, share in shares], batches)
        for entry in fields(Signals)
        if entry.name != "mismatched_kl"
    }
    return Joined(
        batch=StepBatch(step=batches[rank].step, **found),  # type: ignore[arg-type]  # None only where it is optional
        signals=Signals(**signals, mismatched_kl=_mean([share for _, share in shares], batches)),
        first_token=sum(len(batch.sequence_N) for batch in batches[:rank]),
    )


def _concatenated(name: str, values: Sequence[Tensor | None], batches: Sequence[StepBatch]) -> Tensor | None:
    import torch

    filled = [value for value, batch in zip(values, batches, strict=True) if batch.num_sequences]
    if all(value is None for value in filled):
        return None
    if name == "token_rewards_N":  # an experience without them has none
        filled = [
            torch.zeros(len(batch.sequence_N)) if value is None else value
            for value, batch in zip(values, batches, strict=True)
        ]
    there = [value for value in filled if value is not None]
    if len(there) < len(filled):
        raise RftError(
            f"{len(filled) - len(there)} of {len(filled)} ranks have no {name} in their share of the batch", value=name,
            todo="train on experiences that all bring it, or on none that do",
        )  # fmt: skip
    return torch.cat(there)


def _mean(signals: Sequence[Signals], batches: Sequence[StepBatch]) -> Tensor | None:
    """The mean over all sequences of `mismatched_kl`, which is a mean over a rank's own."""
    import torch

    means = [share.mismatched_kl for share in signals if share.mismatched_kl is not None]
    if len(means) < len(signals):
        return None
    num = torch.tensor([float(batch.num_sequences) for batch in batches])
    return (torch.stack(means) * num).sum() / num.sum().clamp(min=1)
