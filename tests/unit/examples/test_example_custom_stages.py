"""The example's own stages and selector do what its README says."""

from __future__ import annotations

from pathlib import Path

import pytest

from operators.chain.build import build_chain
from rftdata.selectors import Observation, build_selector
from tests.support.batches import batch_of_groups

FOLDER = Path(__file__).resolve().parents[3] / "examples" / "custom_stages"


def test_the_stages_score_and_drop() -> None:
    table = batch_of_groups([0, 1, 0, 0], response=["732", "237", "23", "2x7"], answer=["237"] * 4, prompt=["372>"] * 4)
    stages = [
        {"./stages.py:no_letters": {}},
        {"./stages.py:DigitsKept": {}},
        {"threshold": {"column": "digits_kept", "min": 0.7}},
    ]
    result = build_chain(stages, FOLDER).run(table)
    assert result.decisions["kept"].to_pylist() == [True, True, False, False]
    assert result.decisions["reason"].to_pylist()[3] == "has 'x'"
    assert result.scores[0].table["digits_kept"].to_pylist() == pytest.approx([1.0, 1.0, 2 / 3])


def test_the_selector_mixes_new_tasks_with_those_near_its_target() -> None:
    selector = build_selector("./selector.py:Curious", {"target": 0.5}, list(range(1, 11)), 0, FOLDER)
    assert selector.select(4) == [1, 2, 3, 4]
    selector.observe(
        [Observation(key, successes, 8.0, kind="explicit") for key, successes in enumerate([0.0, 3.0, 8.0, 5.0], 1)]
    )
    assert selector.select(4) == [2, 4, 5, 6]
    again = build_selector("./selector.py:Curious", {}, [1, 2, 3], 0, FOLDER)
    again.load_state_dict(selector.state_dict())
    assert sorted(again.select(3)) == [1, 2, 3] and len(again.select(7)) == 7
