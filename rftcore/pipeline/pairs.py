"""Preference pairs of a run, built by the operator `pair_builder` from the current rewards.

The rewards are `rft.experience.reward`, with every label up to one moment (the pairs' `label_cut`) and without shaping by a pipeline.
Answers that the run's pipeline dropped are not compared: one that was cut off is no example. `include_dropped` compares them, too, because
an answer that is too long or too easy for one algorithm may be the contrast that another needs. A correction changes what the next build
finds. Stored pairs are never changed; `rft.v_pair` shows which of them are still supported by the rewards, and what became of their
answers.
"""

from __future__ import annotations

from dataclasses import dataclass

from operators.experience.pair_builder import Pair, PairBuilder
from rftdata.attempts.dropped import DropCount, drop_counts
from rftdata.exchange.pairs import building
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
        dropped: answers that were not compared, since the run's pipeline dropped them, by reason.
        include_dropped: whether such answers were compared.
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
    dropped: tuple[DropCount, ...]
    include_dropped: bool


def build_pairs(
    run: Run,
    builder: PairBuilder,
    *,
    author: str,
    dry_run: bool = False,
    include_dropped: bool = False,
    page_groups: int = 512,
) -> BuiltPairs:
    """Build the pairs of a run's finished groups and store the new ones, all or none.

    Args:
        include_dropped: compare answers that the run's pipeline dropped, too.
        page_groups: number of groups in memory at a time.

    Raises:
        ConflictError: another session's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    groups, num_new = 0, 0
    all_pairs: list[Pair] = []
    dropped: list[tuple[str, str]] = []
    settings = builder.config.model_dump(mode="json") | {"include_dropped": include_dropped}
    with building(run, dry_run=dry_run, include_dropped=include_dropped) as build:
        for table, num_groups, drops in build.groups(PairBuilder.reads, page_groups):
            dropped += drops
            pairs = builder.pairs(table)
            num_new += build.store([(p.chosen_id, p.rejected_id) for p in pairs], author=author, builder=settings)
            groups += num_groups
            all_pairs += pairs
    count = max(1, len(all_pairs))
    return BuiltPairs(
        run.name,
        groups,
        len({pair.group_id for pair in all_pairs}),
        len(all_pairs),
        num_new,
        chosen_longer=sum(pair.chosen_tokens > pair.rejected_tokens for pair in all_pairs) / count,
        rejected_longer=sum(pair.chosen_tokens < pair.rejected_tokens for pair in all_pairs) / count,
        chosen_tokens=sum(pair.chosen_tokens for pair in all_pairs) / count,
        rejected_tokens=sum(pair.rejected_tokens for pair in all_pairs) / count,
        label_cut=build.label_cut,
        stored=not dry_run,
        dropped=drop_counts(dropped),
        include_dropped=include_dropped,
    )
