"""The benchmark of rollouts of many turns at its smallest: both layouts hold every sampled token once."""

from __future__ import annotations

from benchmarks.buffer.turns import GROUP_SIZE, figures, groups, publish_policy
from rftdata import Buffer


def test_a_row_per_branch_has_fewer_tokens_and_trains_on_as_many(buffer: Buffer) -> None:
    publish_policy(buffer)
    made = groups(2, 4, 8)
    per_turn, per_branch = (figures(buffer, layout, of) for layout, of in made.items())
    assert (per_turn["rows"], per_branch["rows"]) == (2 * GROUP_SIZE * 4, 2 * GROUP_SIZE)
    assert per_turn["trained_tokens"] == per_branch["trained_tokens"] > 0
    assert per_turn["stored_tokens"] > 2 * per_branch["stored_tokens"]
    assert per_turn["trainer_tokens"] > 2 * per_branch["trainer_tokens"]
