"""How a stage is run: the columns it receives, stored scores, concurrent parts, retries, and the rules that every stage obeys."""

from __future__ import annotations

import datetime
import math
import threading
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from operators.base import Operator, Review, StageOutcome
from operators.chain.build import build_chain
from operators.chain.chain import Chain
from operators.chain.stage import RunOptions, StageError, identify
from rftdata.errors import ConfigError
from rftdata.pipeline.scores import StoredScore
from tests.support.batches import batch_of_groups, stored
from tests.support.waiting import PATIENCE_S

seen: list[list[str]] = []


class Words(Operator):
    """Scores the number of words of a response."""

    reads = frozenset({"response"})
    scores = {"words": pa.float64()}  # noqa: RUF012
    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        seen.append(table["response"].to_pylist())
        return StageOutcome.keep_all(
            table.num_rows, {"words": pa.array([float(len(t.split())) for t in table["response"].to_pylist()])}
        )


class Upper(Operator):
    """Changes what later stages read."""

    reads = frozenset({"response"})
    writes = frozenset({"response"})

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(
            table.num_rows, {"response": pa.array([t.upper() for t in table["response"].to_pylist()])}
        )


class DropsAndScores(Words):
    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome(pa.array(["no"] * table.num_rows), {"words": pa.array([1.0] * table.num_rows)})


class Undeclared(Operator):
    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(table.num_rows, {"reward": pa.array([1.0] * table.num_rows)})


class Flaky(Operator):
    """Fails the first times it is asked."""

    left = 0

    def apply(self, table: pa.Table) -> StageOutcome:
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionError("away")
        return StageOutcome.keep_all(table.num_rows)


class Asks(Operator):
    """Asks a person about the rows without reward."""

    reads = frozenset({"reward"})
    asks = frozenset({"check"})

    def apply(self, table: pa.Table) -> StageOutcome:
        asked = Review("check", "Well?", 60.0, "pass")
        return StageOutcome(
            pa.nulls(table.num_rows, pa.string()),
            waiting={row: asked for row, reward in enumerate(table["reward"].to_pylist()) if reward == 0},
        )


def name(operator: type[Operator]) -> str:
    return f"{__name__}:{operator.__name__}"


def chain(*stages: object) -> Chain:
    return build_chain([stage if isinstance(stage, dict) else {name(stage): {}} for stage in stages])  # type: ignore[arg-type]


def test_stored_scores_are_not_computed_again_and_give_the_same() -> None:
    table = batch_of_groups([1.0, 0.0, 1.0])
    words = chain(Words, {"sql": "SELECT * REPLACE (words AS reward) FROM batch"})
    (key,) = words.score_keys
    first = words.run(table)
    (scored,) = first.scores
    assert (scored.score_key, scored.table.num_rows) == (key, 3)
    known = stored([scored])
    third = known[key].pop(102)
    seen.clear()
    second = words.run(table, stored_scores=known)
    assert seen == [table["response"].to_pylist()[2:]]
    assert second.decisions.equals(first.decisions) and [s.table.num_rows for s in second.scores] == [1]
    seen.clear()
    known[key][102] = StoredScore(third.input_digest, {"words": 40.0})
    last = words.run(table, stored_scores=known)
    assert seen == [] and last.scores == [] and last.decisions["reward"].to_pylist()[2] == 40.0


def test_the_key_of_a_score_covers_what_changes_it_and_nothing_else() -> None:
    (plain,) = chain(Words).score_keys
    assert chain({"drop_truncated": {}}, Words, {"reward_threshold": {"min": 0.5}}).score_keys == [plain]
    assert chain(Upper, Words).score_keys != [plain]
    assert chain({"sql": "SELECT * FROM batch WHERE reward > 0"}, Words).score_keys == [plain]
    # It may have written anything.
    assert chain({"sql": "SELECT COLUMNS(*) FROM batch"}, Words).score_keys != [plain]


@settings(deadline=None)  # threads are started
@given(rows=st.integers(1, 40), batch_rows=st.integers(1, 50), concurrency=st.integers(1, 8))
def test_parts_of_a_batch_give_what_the_whole_gives(rows: int, batch_rows: int, concurrency: int) -> None:
    table = batch_of_groups([float(i % 3) for i in range(rows)])
    stages: list[dict[str, Any]] = [{name(Words): {}}, {"reward_threshold": {"min": 0.5}}]
    run = {"run": {"batch_rows": batch_rows, "concurrency": concurrency}}
    cut = build_chain([{name(Words): run}, {"reward_threshold": {"min": 0.5, **run}}])
    whole, parts = build_chain(stages).run(table), cut.run(table)
    assert parts.decisions.equals(whole.decisions)
    assert parts.scores[0].table.equals(whole.scores[0].table)
    assert cut.version == build_chain(stages).version  # how a stage is run decides nothing


def test_parts_run_at_the_same_time() -> None:
    barrier = threading.Barrier(4, timeout=PATIENCE_S)

    def meet(row: dict[str, Any]) -> bool:
        barrier.wait()  # ends only when four rows are looked at at once
        return True

    from operators.chain.apply import apply_stage
    from operators.chain.row_function import RowFunction

    stage = identify(1, "meet", RowFunction("meet", meet, {}), RunOptions(concurrency=4), [])
    assert apply_stage(stage, batch_of_groups([1.0] * 4), {}).outcome.reasons.null_count == 4


def test_a_stage_that_fails_is_tried_again_as_often_as_asked() -> None:
    Flaky.left = 2
    with pytest.raises(StageError, match="away"):
        chain({name(Flaky): {"run": {"retries": 1}}}).run(batch_of_groups([1.0]))
    Flaky.left = 2
    assert chain({name(Flaky): {"run": {"retries": 2}}}).run(batch_of_groups([1.0])).decisions["kept"].to_pylist() == [
        True
    ]


@pytest.mark.parametrize(
    ("operator", "message"),
    [(DropsAndScores, "drops rows while it scores"), (Undeclared, "column reward, which it does not declare")],
)
def test_rules_that_no_stage_may_break(operator: type[Operator], message: str) -> None:
    with pytest.raises(StageError, match=message):
        chain(operator).run(batch_of_groups([1.0, 0.0]))


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"run": {"batchrows": 3}}, "stage 1 .*run: there is no key 'batchrows'.*batch_rows"),
        ({"run": {"concurrency": 0}}, "run: the key 'concurrency' is wrong"),
        ({"run": 3}, "run: the arguments are not a mapping"),
        ({"run": {"concurrency": 2}}, "sees whole groups"),
    ],
)
def test_how_a_stage_is_run_is_checked_when_the_chain_is_built(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([{"drop_zero_variance_groups": args}])


def test_a_group_that_waits_for_a_person_is_not_decided_on() -> None:
    table = batch_of_groups([0.0, 1.0], [1.0, 1.0])
    result = chain(Asks, {"reward_threshold": {"min": 0.5}}).run(table)
    assert [(row.experience_id, row.group_id, row.review.name) for row in result.questions] == [(100, 0, "check")]
    assert result.decisions["experience_id"].to_pylist() == table["experience_id"].to_pylist()[2:]
    assert [(run.rows_in, run.rows_kept) for run in result.stages] == [(2, 2), (2, 2)]


def judged_by_numpy(row: dict[str, Any], since: object = None) -> object:
    return np.mean([row["reward"]]) > 0.5


def test_a_function_may_answer_with_a_truth_value_of_numpy() -> None:
    decisions = build_chain([{f"{__name__}:judged_by_numpy": {}}]).run(batch_of_groups([0, 1])).decisions
    assert decisions["kept"].to_pylist() == [False, True]
    assert decisions["reason"][0].as_py().endswith("judged_by_numpy returned False")


@pytest.mark.parametrize("value", [datetime.date(2024, 1, 1), math.nan, [{1, 2}]])
@pytest.mark.parametrize(
    "stage",
    [
        {f"{__name__}:judged_by_numpy": None},
        {"synthesize": {"kind": f"{__name__}:judged_by_numpy", "args": None}},
        {"llm_judge": {"endpoint": {"url": "http://x/v1", "model": "m", "extra": None}}},
    ],
)
def test_a_value_that_json_cannot_hold_is_no_argument(stage: dict[str, Any], value: object) -> None:
    """Two pipelines could not be distinguished by it, and it could not be stored."""

    def filled(given: Any) -> Any:
        return (
            {"since": value}
            if given is None
            else {k: filled(v) if v is None or isinstance(v, dict) else v for k, v in given.items()}
        )

    with pytest.raises(ConfigError, match=r"the argument 'since' is neither .*; write a date as a text, in quotes"):
        build_chain([filled(stage)])
