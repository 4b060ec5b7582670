"""Rules that the chain applies to all stages: questions, names, results of parts and of the database, wrong results."""

from __future__ import annotations

import datetime
import math
import threading
import time
from typing import Any

import pyarrow as pa
import pytest

from operators.base import CreatedAnswer, CreatedGroup, CreatedTask, Operator, Review, StageOutcome
from operators.chain.build import build_chain
from operators.chain.stage import StageError
from rftcore.pipeline.preview import preview
from rftdata.errors import ConfigError, PluginError, RftError
from tests.support.batches import batch_of_groups, stored


class AsksAlways(Operator):
    """Asks about the rows without reward, without looking at answers."""

    reads = frozenset({"reward"})
    asks = None

    def apply(self, table: pa.Table) -> StageOutcome:
        waiting = {
            row: Review("check", "Well?", 60.0, "pass")
            for row, reward in enumerate(table["reward"].to_pylist())
            if reward == 0
        }
        return StageOutcome(pa.nulls(table.num_rows, pa.string()), waiting=waiting)


class Returns(Operator):
    """Returns what the test wants."""

    asks = frozenset({"c"})
    outcome: StageOutcome

    def apply(self, table: pa.Table) -> StageOutcome:
        return Returns.outcome


class Marks(Operator):
    """Adds columns, but only where there is something to say."""

    reads = frozenset({"reward"})
    writes = frozenset({"mark", "size", "reward"})
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        rewards = table["reward"].to_pylist()
        if not any(rewards):
            return StageOutcome.keep_all(table.num_rows)
        marks = pa.array([f"r{reward:g}" if reward else None for reward in rewards], pa.string())
        sizes = pa.array([int(reward) if reward > 1 else None for reward in rewards])
        return StageOutcome.keep_all(table.num_rows, {"mark": marks, "size": sizes})


def name(operator: type[Operator]) -> str:
    return f"{__name__}:{operator.__name__}"


def test_a_stage_that_asks_again_takes_the_answer_it_got() -> None:
    chain = build_chain([{name(AsksAlways): {}}])
    assert "reviews" in chain.columns
    reviews = ['{"check": "pass"}', '{"check": "drop"}', '{"check": "waiting"}', '{"other": "pass"}', None]
    table = batch_of_groups(*[[0.0, 1.0] for _ in reviews])
    both = [text for review in reviews for text in (review, None)]
    result = chain.run(table.append_column("reviews", pa.array(both, pa.string())))
    assert [row.experience_id for row in result.questions] == [104, 106, 108]
    decided = {row["experience_id"]: (row["kept"], row["reason"]) for row in result.decisions.to_pylist()}
    assert decided == {100: (True, None), 101: (True, None), 102: (False, "review 'check': drop"), 103: (True, None)}
    assert len(chain.run(table).questions) == 5  # a batch without the column


def test_reviews_are_read_only_where_a_stage_may_ask() -> None:
    assert "reviews" not in build_chain([{"drop_truncated": {}}, {"reward_threshold": {"min": 0}}]).columns
    assert "reviews" in build_chain([{"human_review": {}}]).columns


def test_a_question_of_one_name_is_asked_by_one_stage() -> None:
    polite = {"human_review": {"question": "polite?"}}
    with pytest.raises(
        ConfigError, match=r"stage 3 .*\(human_review\): asks .* stage 1 \(human_review\) asks already \(got 'review'\)"
    ):
        build_chain([polite, {"drop_truncated": {}}, {"human_review": {"question": "correct?"}}])
    build_chain([polite, {"human_review": {"question": "correct?", "name": "correctness"}}])


def test_a_score_is_the_same_when_it_was_computed_and_when_it_was_stored() -> None:
    columns = {"share": "reward_sampled / num_prompt_tokens", "text": "response", "whole": "num_prompt_tokens"}
    chain = build_chain([{"tag": {"columns": columns}}, {"threshold": {"column": "share", "min": 0.1}}])
    table = batch_of_groups([1.0, 1.0, 0.0], num_prompt_tokens=[0, 8, 0], response=["a\x00b", "c", None])
    first = chain.run(table)
    assert first.scores[0].table.drop_columns(["experience_id"]).to_pylist() == [
        {"share": None, "text": "a\ufffdb", "whole": 0},
        {"share": 0.125, "text": "c", "whole": 8},
        {"share": None, "text": None, "whole": 0},
    ]
    second = chain.run(table, stored_scores=stored(first.scores))
    assert second.scores == [] and second.decisions.equals(first.decisions)


@pytest.mark.parametrize(
    ("outcome", "message"),
    [
        (
            {"waiting": {2: Review("c", "?", 60.0, "pass")}},
            r"a row wait that it was not given \(got 2\); allowed: 0 to 1",
        ),
        ({"waiting": {-1: Review("c", "?", 60.0, "pass")}}, "a row wait that it was not given"),
        ({"waiting": {0: Review("c", "?", math.inf, "pass")}}, "a question that is not valid"),
        ({"waiting": {0: Review("c", "?", 60.0, "maybe")}}, "a question that is not valid"),
        (
            {"waiting": {0: Review("d", "?", 60.0, "pass")}},
            r"asks the question 'd', which it does not declare; allowed: c; add it to `asks` of the operator",
        ),
        ({"reasons": pa.array([1, 1])}, r"reasons that are not texts \(got 'int64'\)"),
        ({"created": ["task"]}, "neither a task nor a group"),
        (
            {"created": [CreatedTask("t", "k", {"at": datetime.date(2020, 1, 1)}, 100)]},
            r"JSON cannot hold: .*date.*\(got 'k'\)",
        ),
        ({"created": [CreatedTask("t", "k", {}, 100, {"x": {1, 2}})]}, "JSON cannot hold: .*set"),
        (
            {"created": [CreatedGroup(CreatedTask("t", "k", {}, 100), 100, [CreatedAnswer([{"role": b"x"}], "y")])]},
            "JSON cannot hold: .*bytes",
        ),
    ],
)
def test_what_cannot_be_stored_is_an_error_of_the_stage(outcome: dict[str, Any], message: str) -> None:
    Returns.outcome = StageOutcome(**{"reasons": pa.nulls(2, pa.string()), **outcome})
    with pytest.raises(StageError, match=rf"stage 1 .*Returns.* {message}") as error:
        build_chain([{name(Returns): {}}]).run(batch_of_groups([0.0, 1.0]))
    assert error.value.run is not None and error.value.run.rows_in == 2


def test_stages_of_one_name_are_distinguished() -> None:
    stages = [
        {"reward_threshold": {"min": 0.5}},
        {"drop_truncated": {}},
        {"reward_threshold": {"max": 1.5}},
        {"reward_threshold": {"max": 0.9}},
    ]
    chain = build_chain(stages)
    names = ["reward_threshold", "drop_truncated", "reward_threshold#2", "reward_threshold#3"]
    assert [stage.name for stage in chain.stages] == names
    table = batch_of_groups([0.0, 1.0, 2.0, 0.7])
    result = chain.run(table)
    assert result.decisions["stage"].to_pylist() == [names[0], names[3], names[2], None]
    shown = preview(chain, table)
    assert [[key for key, _ in stage.dropped] for stage in shown.stages] == [[100], [], [102], [101]]
    # A name is how a stage is shown, and decides nothing.
    alone = build_chain([{"tag": {"columns": {"a": "1"}}}, {"tag": {"columns": {"b": "2"}}}])
    assert {found.stage for found in alone.run(table).scores} == {"tag"}
    assert alone.score_keys[1] == build_chain([{"tag": {"columns": {"b": "2"}}}]).score_keys[0]


def test_a_column_that_only_some_parts_add_is_null_in_the_others() -> None:
    table = batch_of_groups([0.0, 0.0, 1.0, 2.0, 0.0])
    cut = build_chain([{name(Marks): {"run": {"batch_rows": 1, "concurrency": 2}}}])
    found: list[pa.Table] = []
    cut.run(table, watch=lambda stage, before, after, outcome: found.append(after))
    assert found[0]["mark"].to_pylist() == [None, None, "r1", "r2", None]
    assert found[0]["size"].to_pylist() == [None, None, None, 2, None]
    assert found[0].schema.field("mark").type == pa.string() and found[0].schema.field("size").type == pa.int64()


tries: list[str] = []


class Refuses(Operator):
    """Raises the given error at every try."""

    reads = frozenset({"reward"})
    error: Exception

    def apply(self, table: pa.Table) -> StageOutcome:
        tries.append("again")
        raise Refuses.error


@pytest.mark.parametrize(
    ("error", "number"), [(PluginError("no package"), 1), (ConfigError("wrong"), 1), (ConnectionError("away"), 21)]
)
def test_a_failed_part_is_tried_again_at_limited_intervals_where_that_may_help(
    error: Exception, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []
    thread, sleep = threading.get_ident(), time.sleep
    # The function is that of all threads of this process.
    monkeypatch.setattr(
        "operators.chain.parts.time.sleep",
        lambda seconds: pauses.append(seconds) if threading.get_ident() == thread else sleep(seconds),
    )
    tries.clear()
    Refuses.error = error
    with pytest.raises(RftError, match="Refuses"):
        build_chain([{name(Refuses): {"run": {"retries": 20}}}]).run(batch_of_groups([0, 1]))
    assert len(tries) == number
    assert pauses == pytest.approx([min(10.0, 0.2 * 2**n) for n in range(number - 1)])
