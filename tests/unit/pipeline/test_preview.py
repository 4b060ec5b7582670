"""The contents of a preview for each stage."""

from __future__ import annotations

from typing import Any

from operators.chain.build import build_chain
from rftcore.pipeline.preview import Preview, preview
from tests.support.batches import batch_of_groups


def shown(stages: list[Any], *groups: list[float | None], **columns: list[Any]) -> Preview:
    return preview(build_chain(stages, min_group_size=2), batch_of_groups(*groups, **columns))


def test_columns_of_lists_are_compared() -> None:
    stages = [
        {"sql": "SELECT *, string_split(response, ' ') AS words FROM batch"},
        {"sql": "SELECT * REPLACE (list_sort(words) AS words) FROM batch"},
    ]
    found = shown(stages, [0, 1], response=["b a", "a b"])
    assert [(one.experience_id, one.before, one.after) for one in found.stages[1].changed] == [
        (100, ["b", "a"], ["a", "b"])
    ]


def test_the_rules_of_the_chain_are_distinguished() -> None:
    """A group that came in too small, a row without a reward, and the sibling that it leaves alone."""
    found = shown([{"drop_truncated": {}}], [0], [None, 1], [0, 1])
    assert [(one.index, one.stage, one.rows_in, one.rows_kept) for one in found.stages] == [
        (0, "min_group_size", 5, 4),
        (1, "drop_truncated", 4, 4),
        (2, "reward", 4, 3),
        (2, "min_group_size", 3, 2),
    ]
    assert [[key for key, _ in one.dropped] for one in found.stages] == [[100], [], [101], [102]]


def test_siblings_of_a_row_that_waits_for_a_person_are_undecided() -> None:
    stages = [{"human_review": {"where": "rollout_index = 0"}}]
    answers = [None, '{"review": "drop"}', None, '{"review": "pass"}', None]
    found = shown(stages, [0, 1, 1], [1, 1], reviews=answers, labelled=[False] * 5)
    (stage,) = found.stages
    assert ([key for key, _ in stage.waiting], stage.undecided) == ([100], [101, 102])
    assert (stage.rows_in, stage.rows_kept, stage.dropped) == (5, 2, [])
