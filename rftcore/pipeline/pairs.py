"""Preference pairs of a run, built by the operator `pair_builder` from the current rewards, or from what people ranked and edited.

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
from rftdata.errors import QueryError
from rftdata.exchange.pairs import PairSource, building
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


@dataclass(frozen=True)
class PreferredPairs:
    """The pairs that people's rankings and edits give.

    Attributes:
        num_pairs: pairs whose chosen answer most people prefer; num_new: pairs not stored before.
        num_from_edits: those of an edited response and its parent.
        num_undecided: compared pairs on which people agree too little.
        num_other_prompts: compared pairs of answers to different prompts, such as branches of a rollout.
        num_blind: pairs that rankings and edits of blind kinds compare, which were not used.
        label_cut, stored, dropped, include_dropped: see `BuiltPairs`.
    """

    run: str
    num_pairs: int
    num_new: int
    num_from_edits: int
    num_undecided: int
    num_other_prompts: int
    num_blind: int
    label_cut: int
    stored: bool
    dropped: tuple[DropCount, ...]
    include_dropped: bool


def pairs_of_labels(
    run: Run,
    *,
    author: str,
    min_agreement: float = 0.5,
    dry_run: bool = False,
    include_dropped: bool = False,
    include_blind: bool = False,
) -> PreferredPairs:
    """Store the pairs that people's rankings and edits of a run give, the new ones, all or none.

    Args:
        min_agreement: smallest share of comparisons in which the chosen answer is better; more than half are needed in any case.
        include_dropped: use answers that the run's pipeline dropped, too.
        include_blind: use rankings and edits of blind kinds, too. Every account that may read sees the pairs.

    Raises:
        QueryError: `min_agreement` is no share of at least a half.
        ConflictError: another session's labels stay uncommitted, or the same pairs are being built elsewhere.
    """
    if not 0.5 <= min_agreement <= 1:
        raise QueryError("the smallest agreement of people is not valid", value=min_agreement, allowed="0.5 to 1")
    settings = {"min_agreement": min_agreement, "include_dropped": include_dropped, "include_blind": include_blind}
    with building(run, dry_run=dry_run, include_dropped=include_dropped) as build:
        blind, num_blind = ([], 0) if include_blind else build.blind_kinds()
        compared, drops = build.preferred(without_kinds=blind)
        comparable = [row for row in compared if row["same_prompt"]]
        agreed = [row for row in comparable if row["agreement"] > 0.5 and row["agreement"] >= min_agreement]
        num_new = 0
        sources: tuple[PairSource, ...] = ("ranking", "edit")
        for source in sources:
            pairs = [(row["chosen_id"], row["rejected_id"]) for row in agreed if row["source"] == source]
            num_new += build.store(pairs, author=author, builder=settings, source=source)
    return PreferredPairs(
        run.name,
        num_pairs=len(agreed),
        num_new=num_new,
        num_from_edits=sum(row["source"] == "edit" for row in agreed),
        num_undecided=len(comparable) - len(agreed),
        num_other_prompts=len(compared) - len(comparable),
        num_blind=num_blind,
        label_cut=build.label_cut,
        stored=not dry_run,
        dropped=drop_counts(drops),
        include_dropped=include_dropped,
    )


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
