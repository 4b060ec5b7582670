"""A trial shows every row to every stage, and leaves out stages that need a model."""

from __future__ import annotations

from typing import Any

import pytest

from operators.base import UnavailableError
from operators.chain.build import build_chain
from operators.chain.stage import StageError
from operators.chain.stage_trial import try_stages
from tests.support.batches import batch_of_groups

JUDGE: dict[str, Any] = {"llm_judge": {"endpoint": {"url": "http://127.0.0.1:9", "model": "m"}}}


def seen(row: dict[str, Any]) -> bool:
    raise RuntimeError(f"saw row {row['experience_id']}")


def unavailable(row: dict[str, Any]) -> bool:
    raise UnavailableError("the index does not respond")


def test_a_stage_sees_rows_that_an_earlier_one_drops_and_columns_that_it_adds() -> None:
    chain = build_chain(
        [
            {"sql": "SELECT *, reward * 2 AS twice FROM batch WHERE reward > 9"},
            {"threshold": {"column": "twice", "min": 9}},
        ]
    )
    assert try_stages(chain, batch_of_groups([0, 1])) == {}
    with pytest.raises(StageError, match=r"stage 2 .* saw row 100"):
        try_stages(build_chain([{"reward_threshold": {"min": 9}}, f"{__file__}:seen"]), batch_of_groups([0, 1]))


def test_stages_that_ask_a_model_and_those_that_read_their_columns_are_left_out() -> None:
    chain = build_chain([JUDGE, {"threshold": {"column": "judge_score", "min": 1}}, {"reward_threshold": {"min": 0}}])
    assert try_stages(chain, batch_of_groups([0, 1], messages=[None, None])) == {
        "llm_judge": "it may run or ask a model",
        "threshold": "it reads columns of a stage that was not tried",
    }


def test_a_stage_whose_service_does_not_respond_is_left_out() -> None:
    name = f"{__file__}:unavailable"
    assert try_stages(build_chain([name]), batch_of_groups([0, 1])) == {name: "the index does not respond"}
