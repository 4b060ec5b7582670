"""A chain gives every row one decision, keeps groups whole, and reports clearly what is wrong with its YAML."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pyarrow as pa
import pytest

from operators.chain.build import build_chain
from operators.chain.stage import StageError
from rftdata.errors import ConfigError, OperatorError, PluginError
from rftdata.pipeline.records import DECISION_SCHEMA
from tests.support.batches import batch_of_groups


def decisions(table: pa.Table, *stages: object, **options: object) -> dict[int, dict[str, object]]:
    result = build_chain(list(stages), **options).run(table)  # type: ignore[arg-type]
    return {row["experience_id"]: row for row in result.decisions.to_pylist()}


def test_an_empty_chain_keeps_every_row_in_order() -> None:
    table = batch_of_groups([0, 1], [1, 1])
    result = build_chain(None).run(table)
    assert result.decisions.schema == DECISION_SCHEMA
    assert result.decisions["experience_id"].to_pylist() == [100, 101, 102, 103]
    assert result.decisions["kept"].to_pylist() == [True] * 4
    assert result.decisions["reward"].null_count == 4
    assert result.stages == []


def test_every_row_is_counted_once_and_every_drop_has_a_stage_and_a_reason() -> None:
    table = batch_of_groups([0, 1, 1], [1, 1, 1], [0, 0, 1], finish_reason=["stop"] * 6 + ["length", "stop", "stop"])
    stages = [{"drop_truncated": {}}, {"drop_zero_variance_groups": {}}, {"sql": "FROM batch WHERE reward >= 0"}]
    result = build_chain(stages, min_group_size=2).run(table)
    assert [(run.stage, run.index, run.rows_in, run.rows_kept, run.rows_dropped) for run in result.stages] == [
        ("drop_truncated", 1, 9, 8, 1),
        ("drop_zero_variance_groups", 2, 8, 5, 3),
        ("sql", 3, 5, 5, 0),
    ]
    assert all(run.seconds >= 0 and run.error is None for run in result.stages)
    for row in result.decisions.to_pylist():
        assert row["kept"] == (row["stage"] is None) == (row["reason"] is None)
    assert result.decisions["kept"].to_pylist() == [True] * 3 + [False] * 3 + [False, True, True]


def test_a_group_left_too_small_is_dropped_on_the_account_of_the_stage() -> None:
    table = batch_of_groups([0, 1, 1], finish_reason=["stop", "length", "length"])
    rows = decisions(table, {"drop_truncated": {}}, min_group_size=2)
    assert rows[101]["reason"] == "finish_reason is length"
    assert rows[100]["stage"] == "drop_truncated"
    assert rows[100]["reason"] == "only 1 rollout of the group left after drop_truncated, min_group_size is 2"


def test_a_group_that_came_in_too_small_is_dropped_before_the_first_stage() -> None:
    rows = decisions(batch_of_groups([1], [0, 1]), {"drop_truncated": {}}, min_group_size=2)
    assert rows[100]["stage"] == "min_group_size"
    assert rows[100]["reason"] == "only 1 rollout of the group came in, min_group_size is 2"
    assert rows[101]["kept"]


def test_turns_of_one_rollout_count_once_for_the_group_size() -> None:
    table = batch_of_groups([0, 1, 1], rollout_index=[0, 0, 0], turn_index=[0, 1, 2])
    assert {row["stage"] for row in decisions(table, min_group_size=2).values()} == {"min_group_size"}


@pytest.mark.parametrize("reward", [None, math.nan, math.inf])
def test_a_row_without_a_finite_reward_is_dropped_at_the_end(reward: float | None) -> None:
    rows = decisions(batch_of_groups([0, reward, 1]), min_group_size=2)
    assert (rows[101]["stage"], rows[101]["kept"]) == ("reward", False)
    assert str(rows[101]["reason"]).startswith("the reward is ")
    assert rows[100]["kept"]


def test_the_reward_is_not_asked_for_where_training_needs_none() -> None:
    assert all(row["kept"] for row in decisions(batch_of_groups([None, None]), require_reward=False).values())


def test_a_group_left_too_small_by_missing_rewards_is_dropped() -> None:
    rows = decisions(batch_of_groups([None, 1]), min_group_size=2)
    assert rows[101]["stage"] == "min_group_size"
    assert rows[101]["reason"] == "only 1 rollout of the group left with a reward, min_group_size is 2"


def test_only_changed_rewards_of_kept_rows_are_reported() -> None:
    query = "SELECT * REPLACE (CASE WHEN rollout_index = 1 THEN reward / 2 ELSE reward END AS reward) FROM batch"
    rows = decisions(batch_of_groups([0, 1, 1]), {"sql": query}, {"reward_threshold": {"min": 0.25}})
    assert rows[100]["reason"] == "reward 0 < min 0.25"
    assert [rows[n]["reward"] for n in (100, 101, 102)] == [None, 0.5, None]


def test_a_stage_that_makes_a_reward_non_finite_drops_the_row_with_the_reason() -> None:
    query = "SELECT * REPLACE (CASE WHEN rollout_index = 0 THEN 'nan'::DOUBLE ELSE reward END AS reward) FROM batch"
    rows = decisions(batch_of_groups([0, 1]), {"sql": query})
    assert rows[100]["stage"] == "sql"
    assert rows[100]["reason"] == "the stage turned the reward into nan"


def test_priorities_are_picked_up_and_default_to_zero() -> None:
    rows = decisions(batch_of_groups([0, 1]), {"sql": "SELECT experience_id, 2 * reward AS priority FROM batch"})
    assert [rows[n]["priority"] for n in (100, 101)] == [0.0, 2.0]


def test_the_same_batch_is_decided_the_same_twice_and_is_not_changed() -> None:
    table = batch_of_groups([0, 1, 1], [1, 1, 1], num_response_tokens=[5, 50, 500, 5, 5, 5])
    before = table.to_pylist()
    chain = build_chain(
        [
            {"drop_zero_variance_groups": {}},
            {"length_penalty": {"max_tokens": 100, "cache_tokens": 80}},
            {"sql": "SELECT * REPLACE (reward + random() AS reward) FROM batch"},
        ]
    )
    assert chain.run(table).decisions == chain.run(table).decisions
    assert table.to_pylist() == before


def test_an_empty_batch_passes() -> None:
    stages = [{"drop_truncated": {}}, {"drop_zero_variance_groups": {}}, {"sql": "FROM batch"}]
    result = build_chain(stages, min_group_size=2).run(batch_of_groups())
    assert result.decisions.num_rows == 0
    assert [run.rows_in for run in result.stages] == [0, 0, 0]


def test_the_version_follows_what_decides_and_nothing_else() -> None:
    def version(*stages: object, **options: object) -> str:
        return build_chain(list(stages), **options).version  # type: ignore[arg-type]

    assert version({"drop_zero_variance_groups": {}}) == version({"drop_zero_variance_groups": {"tolerance": 1e-6}})
    assert version({"drop_zero_variance_groups": {}}) == version("drop_zero_variance_groups")
    different = [
        version(),
        version({"drop_truncated": None}),
        version({"drop_truncated": {"finish_reasons": ["abort"]}}),
        version({"drop_truncated": None}, min_group_size=2),
        version({"sql": "FROM batch"}),
        version({"sql": "FROM batch WHERE reward > 0"}),
    ]
    assert len(set(different)) == len(different)


def test_the_chain_asks_only_for_the_columns_its_stages_read() -> None:
    chain = build_chain([{"drop_truncated": {}}, {"drop_zero_variance_groups": {}}])
    assert chain.columns == {"experience_id", "group_id", "rollout_index", "role", "reward", "finish_reason"}
    chain.run(batch_of_groups([0, 1]).select(sorted(chain.columns)))
    assert "metrics" in build_chain([{"sql": "SELECT COLUMNS(*) FROM batch"}]).columns


def test_a_batch_that_lacks_a_column_is_refused() -> None:
    chain = build_chain([{"drop_truncated": {}}])
    with pytest.raises(OperatorError, match="the batch lacks the column 'finish_reason'"):
        chain.run(batch_of_groups([0, 1]).drop_columns(["finish_reason"]))


def test_a_batch_with_an_experience_twice_is_refused() -> None:
    with pytest.raises(OperatorError, match="experience_id twice"):
        build_chain([]).run(batch_of_groups([0, 1], experience_id=[5, 5]))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"sql": "FROM batch"}, r"a pipeline is not a list of stages"),
        ("drop_truncated", r"a pipeline is not a list of stages"),
        ([{"drop_truncated": {}, "sql": "FROM batch"}], r"stage 1 of the pipeline is not one stage name"),
        (
            [{"drop_truncated": {}}, {"drop_truncted": {}}],
            r"stage 2 .*unknown operator.*did you mean 'drop_truncated'\?",
        ),
        ([{"text_lenght_filter": {}}], r"stage 1 .*did you mean 'text_length_filter'\?"),
        (
            [{"drop_truncated": {"finish_reason": ["length"]}}],
            r"no key 'finish_reason'; allowed: finish_reasons; did you mean",
        ),
        ([{"drop_truncated": ["length"]}], r"arguments are not a mapping"),
        (
            [{"length_penalty": {"cache_tokens": 5}}],
            r"the key 'max_tokens' is missing; allowed: max_tokens, cache_tokens",
        ),
        ([{"length_penalty": {"max_tokens": "x", "cache_tokens": 5}}], r"the key 'max_tokens' is wrong: .*\(got 'x'\)"),
        ([{"length_penalty": {"max_tokens": 4, "cache_tokens": 5}}], r"cache_tokens 5 is more than max_tokens 4"),
        ([{"reward_threshold": {}}], r"give min, max or both"),
        ([{"reward_threshold": {"min": 2, "max": 1}}], r"min 2 is above max 1"),
        ([{"collections:OrderedDict": {}}], r"this is not a pipeline stage"),
        ([{"./nowhere.py:f": {}}], r"stage 1 .*file does not exist"),
    ],
)
def test_wrong_yaml_is_refused_before_anything_runs(spec: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain(spec)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("stage", "message"),
    [
        (
            {"human_review": {"otherwise": "keep"}},
            r"'otherwise' is wrong: Input should be 'pass' or 'drop' \(got 'keep'\); correct it\.$",
        ),
        ({"sample": {"fraction": 2}}, r"'fraction' is wrong: Input should be less than 1 \(got 2\); correct it\.$"),
        (
            {"sql": {"query": "FROM batch", "allow": {"filez": []}}},
            r"no key 'allow.filez'; allowed: files, network; did you mean 'files'\?$",
        ),
        (
            {"rubric": {"endpoint": "policy", "criteria": [{"weight": 1}]}},
            r"'criteria.0.description' is missing; allowed: description, weight, name; add it\.",
        ),
        ({"sample": {}}, r"give one of fraction, .*; allowed: the keys fraction, max_groups"),
    ],
)
def test_what_is_allowed_is_said_of_what_is_wrong(stage: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_chain([stage])  # type: ignore[list-item]


def test_an_unknown_operator_is_a_plugin_error() -> None:
    with pytest.raises(PluginError):
        build_chain([{"no_such_thing": {}}])


def test_checking_a_chain_with_a_data_juicer_stage_imports_nothing_heavy() -> None:
    script = """
import sys
from operators.chain.build import build_chain
build_chain([{"text_length_filter": {"min_len": 3}}, {"sql": "FROM batch"}])
print(sorted({"data_juicer", "datasets", "torch", "ray", "vllm", "transformers"} & set(sys.modules)))
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "rules.py").write_text(
        textwrap.dedent(
            """
            import pyarrow as pa
            from operators.base import Operator, StageConfig, StageOutcome, drop

            def polite(row, words=("sorry",)):
                return not any(word in row["response"] for word in words)

            def strict(row):
                return drop("too long") if row["num_response_tokens"] > 10 else {"reward": row["reward"] * 2}

            def forgetful(row):
                pass

            def talks(row):
                return "too long" if row["num_response_tokens"] > 10 else "fine"

            def drops_for_nothing(row):
                return drop(" ")

            def broken(row):
                return row["reward"] / 0

            def renames(row):
                return {"reworad": 1.0}

            class KeepFirst(Operator):
                class Config(StageConfig):
                    count: int = 1
                reads = frozenset({"rollout_index"})
                def apply(self, table):
                    keep = pa.compute.less(table["rollout_index"].combine_chunks(), self.config.count)
                    return StageOutcome.keep_where(keep, "not among the first")

            class Moves(Operator):
                reads = frozenset({"task_id"})

                def apply(self, table):
                    return StageOutcome.keep_all(table.num_rows, {"group_id": table["task_id"].combine_chunks()})
            """
        )
    )
    return tmp_path


def test_a_function_of_one_row_is_a_stage(rules: Path) -> None:
    table = batch_of_groups([0, 1, 1], response=["sorry", "oops", "fine"], num_response_tokens=[5, 5, 50])
    rows = decisions(
        table, {"./rules.py:polite": {"words": ["sorry", "oops"]}}, {"./rules.py:strict": None}, base_dir=rules
    )
    assert rows[100]["reason"] == "./rules.py:polite returned False"
    assert rows[101]["stage"] == "./rules.py:polite"
    assert (rows[102]["stage"], rows[102]["reason"]) == ("./rules.py:strict", "too long")
    assert decisions(table, "./rules.py:polite", "./rules.py:strict", base_dir=rules)[101]["reward"] == 2


def test_an_operator_class_of_the_users_is_a_stage(rules: Path) -> None:
    rows = decisions(batch_of_groups([0, 1, 1]), {"./rules.py:KeepFirst": {"count": 2}}, base_dir=rules)
    assert rows[102]["reason"] == "not among the first"
    with pytest.raises(ConfigError, match=r"no key 'cuont'; allowed: count; did you mean 'count'\?"):
        build_chain([{"./rules.py:KeepFirst": {"cuont": 2}}], base_dir=rules)


def test_an_edited_rule_is_another_version(rules: Path) -> None:
    stages = [{"./rules.py:polite": None}]
    before = build_chain(stages, base_dir=rules).version
    assert build_chain(stages, base_dir=rules).version == before
    with (rules / "rules.py").open("a") as file:
        file.write("\nLIMIT = 3\n")
    assert build_chain(stages, base_dir=rules).version != before


def test_a_stage_with_a_revision_is_another_version_by_that_and_not_by_its_file(rules: Path) -> None:
    def version(revision: int) -> str:
        file = rules / f"of_{revision}.py"
        file.write_text(
            "from operators.base import Operator, StageOutcome\n\n"
            f"class Keeps(Operator, revision={revision}):\n"
            "    def apply(self, table):\n        return StageOutcome.keep_all(table.num_rows)\n\n"
            f"class Child(Keeps):\n    number = {revision}\n"
        )
        (rules / "stages.py").write_text(file.read_text())
        chain = build_chain([{"./stages.py:Keeps": None}], base_dir=rules)
        (rules / "stages.py").write_text(file.read_text() + "\nEDITED = True\n")
        assert build_chain([{"./stages.py:Keeps": None}], base_dir=rules).version == chain.version
        child = build_chain([{"./stages.py:Child": None}], base_dir=rules)
        assert set(child.stages[0].operator.spec()) == {"args", "code"}
        return chain.version

    assert version(1) != version(2)


def test_wrong_arguments_of_a_function_are_refused_when_the_chain_is_built(rules: Path) -> None:
    with pytest.raises(ConfigError, match=r"stage 1 .*no key 'word'; allowed: words; did you mean 'words'\?"):
        build_chain([{"./rules.py:polite": {"word": []}}], base_dir=rules)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("broken", r"stage 2 of the pipeline \(./rules.py:broken\) failed .*experience 100: ZeroDivisionError"),
        ("forgetful", r"stage 2 .*returned NoneType for experience 100; allowed: True, False"),
        (
            "talks",
            r"stage 2 .*returned str for experience 100 \(got 'fine'\); allowed: True, False, drop\(reason\), or a dict .*; return drop\(…\) ",
        ),
        ("drops_for_nothing", r"stage 2 .*experience 100: ValueError: drop\(\) takes a reason, .*got ' '"),
        ("renames", r"stage 2 .*set a column that the batch does not have \(got 'reworad'\)"),
        ("Moves", r"stage 2 .*changes group_id"),
    ],
)
def test_a_stage_that_fails_is_named_and_nothing_is_decided(rules: Path, name: str, message: str) -> None:
    chain = build_chain([{"drop_truncated": {}}, {f"./rules.py:{name}": None}], base_dir=rules)
    with pytest.raises(StageError, match=message) as caught:
        chain.run(batch_of_groups([1, 1]))
    error = caught.value
    assert error.run is not None
    assert (error.run.index, error.run.rows_in, error.run.rows_kept) == (2, 2, 0)
    assert error.run.error
    assert [run.stage for run in error.stages] == ["drop_truncated"]
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.run, copy.stages) == (str(error), error.run, error.stages)


def test_columns_stay_with_their_rows_however_many_stages_drop_some() -> None:
    table = batch_of_groups(
        *[[0, 1, 2, 3]] * 5, num_response_tokens=list(range(20)), staleness=[n % 7 for n in range(20)]
    )
    stages: list[dict[str, object]] = [
        {"drop_stale": {"max": 5}},
        {"reward_shaping": {"formula": "reward + num_response_tokens"}},
        {"threshold": {"column": "num_response_tokens % 3", "max": 1}},
        {"tag": {"columns": {"copied": "num_response_tokens"}}},
        {"clip_reward": {"max": 15}},
        {"sql": "FROM batch WHERE staleness <> 2 OR copied > 15"},
        {"threshold": {"column": "reward - least(copied + rollout_index, 15)", "min": 0, "max": 0}},
    ]
    seen = []
    result = build_chain(stages).run(table, watch=lambda stage, before, after, outcome: seen.append((before, after)))
    kept = [n for n in range(20) if n % 7 <= 5 and n % 3 <= 1 and (n % 7 != 2 or n > 15)]
    rows = {row["experience_id"] - 100: row for row in result.decisions.to_pylist()}
    assert [number for number, row in rows.items() if row["kept"]] == kept
    for number in kept:
        shaped = min(number % 4 + number, 15)
        assert rows[number]["reward"] == (None if shaped == number % 4 else shaped)
    assert [before.num_rows for before, _ in seen] == [run.rows_in for run in result.stages]
    for before, after in seen:
        assert before["experience_id"].to_pylist() == after["experience_id"].to_pylist()
        for one in (before, after):
            assert one["num_response_tokens"].to_pylist() == [key - 100 for key in one["experience_id"].to_pylist()]
    assert seen[-1][1]["copied"].to_pylist() == kept
