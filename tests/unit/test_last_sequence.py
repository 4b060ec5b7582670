"""Of several branches of a rollout's chats, the one with the last turn has its last answer."""

from __future__ import annotations

import numpy as np

from rftdata.experience import TURNS, Sequence, last_sequence


def branch(response: str, *turns: int) -> Sequence:
    bounds = np.array([(1 + i, 2 + i, turn) for i, turn in enumerate(turns)], np.int32)
    arrays = {TURNS: bounds} if len(turns) > 1 else {}
    return Sequence("p", response, list(range(1 + len(turns))), 1, "stop", arrays=arrays, turn_index=turns[0])


def test_a_branch_that_began_earlier_may_have_the_last_turn() -> None:
    trunk, side = branch("trunk", 0, 2), branch("side", 1)
    assert last_sequence([trunk, side]) is trunk
    assert last_sequence([branch("first", 0), side]) is side
    assert last_sequence([]) is None
