"""Stages that do not return: which rows are set aside, with which message, and how long building a chain waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from operators.base import Operator, StageConfig, StageOutcome
from operators.chain.build import build_chain
from operators.chain.stage import RunOptions, StageError, identify
from rftcore.pipeline.group_decisions import decide_groups
from rftdata.errors import ConfigError, PluginError, TimeLimitError, time_limit_behind
from rftdata.pipeline.records import SealedBatch
from rftdata.user_code.time_limits import DEFAULT_S, LOADING_S, at_most
from tests.support.batches import batch_of_groups

HERE = __name__
ENDLESS_ON_NO_ROWS = "SELECT * FROM batch WHERE (SELECT count(*) FROM range(1000000000000)) > 0"
# Ends at once on a batch without rows, so it is found only when it runs.
ENDLESS_ON_ROWS = (
    "WITH RECURSIVE numbers AS (SELECT 1 AS n FROM batch UNION ALL SELECT n + 1 FROM numbers) "
    "SELECT b.* FROM batch b WHERE (SELECT count(*) FROM (SELECT n FROM numbers LIMIT 100000000000)) > 0"
)

calls: list[list[int]] = []


def spin() -> None:
    while True:
        pass


def loops_on(row: dict[str, Any], ids: tuple[int, ...] = ()) -> bool:
    """A rule with an endless loop for some rows; it catches every Exception."""
    try:
        if row["experience_id"] in ids:
            spin()
    except Exception:  # noqa: BLE001 - as careless functions do
        return False
    return True


class LoopsOn(Operator):
    """The same over columns: nothing says at which row it is."""

    class Config(StageConfig):
        ids: tuple[int, ...] = ()

    rowwise = True

    def apply(self, table: pa.Table) -> StageOutcome:
        calls.append(table["experience_id"].to_pylist())
        if set(self.config.ids) & set(table["experience_id"].to_pylist()):
            spin()
        return StageOutcome.keep_all(table.num_rows)


class LoopsInDecide(LoopsOn):
    scores = {"nothing": pa.float64()}  # noqa: RUF012

    def apply(self, table: pa.Table) -> StageOutcome:
        return StageOutcome.keep_all(table.num_rows, {"nothing": pa.array([0.0] * table.num_rows)})

    def decide(self, table: pa.Table) -> pa.Array:
        spin()
        return pa.nulls(table.num_rows, pa.string())


def batch(*groups: tuple[float, ...]) -> SealedBatch:
    table = batch_of_groups(*groups)
    group_ids = sorted(set(table["group_id"].to_pylist()))
    return SealedBatch(table, group_ids, dict.fromkeys(group_ids, 0))


def limited(name: str, timeout_s: float = 2, **args: Any) -> dict[str, Any]:
    return {f"{HERE}:{name}": {**args, "run": {"timeout_s": timeout_s, "retries": 2}}}


def decisions(decided: Any) -> dict[int, tuple[bool, str | None]]:
    return {one["experience_id"]: (one["kept"], one["reason"]) for one in decided.decisions.to_pylist()}


def test_the_row_at_which_a_rule_loops_is_set_aside_alone_and_the_reason_states_where_it_was() -> None:
    groups = batch((0.0, 1.0, 0.5), (0.0, 1.0, 0.5), (0.0, 1.0, 0.5))
    first = groups.table["experience_id"][0].as_py()
    late = (first + 1, first + 7)
    chain = build_chain([limited("loops_on", ids=late)])
    decided = decide_groups(chain, groups, patient=True)
    found = decisions(decided)
    assert {key for key, (kept, _) in found.items() if not kept} == set(late)
    reason = found[late[0]][1]
    assert reason is not None
    assert f"did not return for experience {late[0]} within 2 s" in reason
    assert "test_stage_limits.py, line" in reason and "in spin" in reason
    # One limit for each row: neither is it retried, nor looked for by halves.
    assert len([stage for stage in decided.stages if stage.error]) == 2
    assert decided.failed == set(late)


def test_the_rows_of_a_stage_that_names_none_are_looked_for_by_halves() -> None:
    groups = batch((0.0, 1.0), (0.0, 1.0), (0.0, 1.0))
    late = groups.table["experience_id"][3].as_py()
    chain = build_chain([limited("LoopsOn", ids=[late])])
    decided = decide_groups(chain, groups, patient=True)
    assert decided.failed == {late}
    assert all(kept for key, (kept, _) in decisions(decided).items() if key != late)
    errors = [stage.error for stage in decided.stages if stage.error]
    assert errors and all("did not return within 2 s" in error for error in errors)


@pytest.mark.parametrize("name", ["loops_on", "LoopsOn"])
def test_a_stage_that_exceeds_its_limit_on_everything_is_broken_and_not_tried_on_every_row(name: str) -> None:
    groups = batch(*[(0.0, 1.0, 0.5, 0.2)] * 4)
    chain = build_chain([limited(name, 0.05, ids=groups.table["experience_id"].to_pylist())])
    calls.clear()
    with pytest.raises(StageError) as raised:
        decide_groups(chain, groups, patient=True)
    assert time_limit_behind(raised.value) is not None
    assert len(calls) <= 8
    # Not patient, as where a group is alone: everything is set aside.
    assert len(decide_groups(chain, batch((0.0, 1.0))).failed) == 2


def test_a_stage_that_loops_on_every_row_is_broken_though_what_is_left_of_a_group_is_too_small_for_it() -> None:
    groups = batch((0.0, 1.0))
    stages = [limited("loops_on", 0.05, ids=groups.table["experience_id"].to_pylist())]
    with pytest.raises(StageError, match="did not return"):
        decide_groups(build_chain(stages, min_group_size=2), groups, patient=True)


def test_a_row_that_loops_is_set_aside_though_no_other_row_gets_to_the_stage() -> None:
    groups = batch((0.0, 1.0), (0.0, 1.0))
    late = groups.table["experience_id"][1].as_py()
    only = {"sql": f"SELECT * FROM batch WHERE experience_id = {late}"}
    assert decide_groups(build_chain([only, limited("loops_on", 0.05, ids=[late])]), groups, patient=True).failed == {
        late
    }


def test_all_rows_of_a_lone_group_that_loops_are_set_aside_where_others_passed_before() -> None:
    groups = batch((0.0, 1.0))
    chain = build_chain([limited("loops_on", 0.05, ids=groups.table["experience_id"].to_pylist())])
    assert decide_groups(chain, groups, patient=False).failed == set(groups.table["experience_id"].to_pylist())


def test_parts_that_run_at_the_same_time_have_the_limit_each() -> None:
    groups = batch((0.0, 1.0), (0.0, 1.0))
    late = groups.table["experience_id"][2].as_py()
    stage = {f"{HERE}:loops_on": {"ids": [late], "run": {"timeout_s": 2, "concurrency": 4}}}
    assert decide_groups(build_chain([stage]), groups, patient=True).failed == {late}


def test_decide_of_a_scoring_stage_has_the_limit_too() -> None:
    with pytest.raises(StageError, match=r"did not return within 0\.5 s"):
        build_chain([limited("LoopsInDecide", 0.5)]).run(batch((0.0, 1.0)).table)


def test_a_query_is_interrupted_and_its_chain_continues_with_the_next_batch() -> None:
    chain = build_chain([{"sql": {"query": ENDLESS_ON_ROWS, "run": {"timeout_s": 0.3}}}])
    for _ in range(2):
        with pytest.raises(
            StageError, match=r"stage 1 of the pipeline \(sql\) on 2 rows .* did not return within 0\.3 s"
        ):
            chain.run(batch((0.0, 1.0)).table)


def test_building_a_chain_waits_for_no_query_and_no_file_of_a_user(tmp_path: Path) -> None:
    with at_most(0.5, "rft check"), pytest.raises(TimeLimitError) as raised:
        build_chain([{"sql": ENDLESS_ON_NO_ROWS}])
    assert "checking stage 1 of the pipeline (sql) on a batch without rows did not return within 0.5 s" in str(
        raised.value
    )
    assert f"rft check waits 0.5 s at most, and a run {DEFAULT_S:g} s" in str(raised.value)

    (tmp_path / "rules.py").write_text("while True:\n    pass\n")
    found = r"the import of .*rules\.py did not return within 0\.3 s; it was at rules\.py, line"
    with at_most(0.1, "rft check", loading_s=0.3), pytest.raises(PluginError, match=found):
        build_chain([{"./rules.py:polite": {}}], tmp_path)


def test_prepare_has_the_limit_that_its_class_declares(tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text(
        "from operators.base import Operator, StageOutcome\n"
        "from rftdata.user_code import time_limits\n"
        "class Slow(Operator):\n"
        "    prepare_timeout_s = 0.2\n"
        "    def prepare(self, context):\n"
        "        while True: pass\n"
        "    def apply(self, table):\n"
        "        return StageOutcome.keep_all(table.num_rows)\n"
        "class Large(Slow):\n"
        "    prepare_timeout_s = None\n"
        "    def prepare(self, context):\n"
        "        self.limit = time_limits.current()\n"
    )
    assert Operator.prepare_timeout_s == LOADING_S
    large = build_chain([{"./slow.py:Large": {}}], tmp_path)
    large.prepare()
    assert large.stages[0].operator.limit is None  # type: ignore[attr-defined]
    chain = build_chain([{"./slow.py:Slow": {}}], tmp_path)
    with pytest.raises(TimeLimitError, match=r"`prepare` of stage 1 of the pipeline \(./slow.py:Slow\) did not return"):
        chain.prepare()


def test_limits_are_set_per_stage_and_longer_where_a_model_is_asked() -> None:
    (stage,) = build_chain([{"sql": "SELECT * FROM batch"}]).stages
    assert stage.timeout_s(1000) == DEFAULT_S
    judge = {"endpoint": {"url": "http://127.0.0.1:1/v1", "model": "m"}}
    (stage,) = build_chain([{"llm_judge": judge}]).stages
    assert stage.timeout_s(512) > DEFAULT_S + 512
    assert identify(1, "sql", stage.operator, RunOptions(timeout_s=7), []).timeout_s(512) == 7
    with pytest.raises(ConfigError, match=r"run: the key 'timeout_s' is wrong"):
        build_chain([{"sql": {"query": "SELECT * FROM batch", "run": {"timeout_s": 0}}}])
    # How long a stage may take decides nothing.
    versions = [build_chain([{"tag": {"columns": {"a": "1"}, "run": run}}]).version for run in ({}, {"timeout_s": 9})]
    assert versions[0] == versions[1]
