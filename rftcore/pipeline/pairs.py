"""Preference pairs of a run, built by the operator `pair_builder` from the current rewards.

The rewards are `rft.experience.reward`, with every label up to one moment (the pairs' `label_cut`) and without shaping by a
pipeline. Experiences that the run's pipeline dropped are compared too, because what is too long or too easy for one algorithm may be
the contrast that another needs. A correction therefore changes what the next build finds. Stored pairs are never
changed; `rft.v_pair` shows which of them are still supported by the rewards.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.experience.pair_builder import Pair, PairBuilder
from rftdata.pairs import building
from rftdata.run import Run


@dataclass(frozen=True)
class BuiltPairs:
    """The result of one build.

    Attributes:
        num_groups: groups read; num_groups_with_pairs: groups that gave a pair.
        num_pairs: pairs found; num_new: pairs not stored before.
        chosen_longer, rejected_longer: share of pairs in which that answer is the longer one; the rest have equal length.
        chosen_tokens, rejected_tokens: mean response length.
        label_cut: newest label contained in the rewards.
        stored: False for a dry run.
    """

    run: str
    num_groups: int
    num_groups_with_pairs: int
    num_pairs: int
    num_new: int
    chosen_longer: float
    rejected_longer: float
    chosen_tokens: float
    rejected_tokens: float
    label_cut: int
    stored: bool


def build_pairs(
    run: Run, builder: PairBuilder, *, author: str, dry_run: bool = False, page_groups: int = 512
) -> BuiltPairs:
    """Build the pairs of a run's finished groups and store the new ones, all or none.

    Args:
        page_groups: number of groups in memory at a time.

    Raises:
        ConflictError: another session's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    groups, num_new, found = 0, 0, []
    settings = builder.config.model_dump(mode="json")
    with building(run, dry_run=dry_run) as build:
        for table, num_groups in build.groups(PairBuilder.reads, page_groups):
            pairs = builder.pairs(table)
            num_new += build.store([(p.chosen_id, p.rejected_id) for p in pairs], author=author, builder=settings)
            groups += num_groups
            found += pairs
    return _summary(run.name, groups, found, num_new, build.label_cut, stored=not dry_run)


def _summary(run: str, num_groups: int, pairs: list[Pair], num_new: int, label_cut: int, *, stored: bool) -> BuiltPairs:
    count = max(1, len(pairs))
    return BuiltPairs(
        run, num_groups, len({pair.group_id for pair in pairs}), len(pairs), num_new,
        chosen_longer=sum(pair.chosen_tokens > pair.rejected_tokens for pair in pairs) / count,
        rejected_longer=sum(pair.chosen_tokens < pair.rejected_tokens for pair in pairs) / count,
        chosen_tokens=sum(pair.chosen_tokens for pair in pairs) / count,
        rejected_tokens=sum(pair.rejected_tokens for pair in pairs) / count,
        label_cut=label_cut, stored=stored,
    )  # fmt: skip
