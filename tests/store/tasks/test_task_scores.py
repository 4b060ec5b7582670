"""Scores of stages for tasks, including usage, and the tasks that stages create."""

from __future__ import annotations

import json
from pathlib import Path

from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer, exchange
from rftdata.tasks import list_tasksets
from tests.store.tasks.test_task_pipeline import (
    LEVELS,
    ROWS,
    configuration,
    count,
    decide,
    features,
    tally,
    write,
)
from tests.support.store_roles import Roles


def test_usage_and_outcomes_of_runs_are_counted_in_the_buffer_and_scored_again(buffer: Buffer, tmp_path: Path) -> None:
    roles = Roles(buffer, num_tasks=4, steps=2)
    buffer.sql('UPDATE rft.task SET payload = \'{"prompt": "How much is it?"}\'')
    attempt = roles.attempt()
    roles.work()
    roles.train(attempt, 1)
    stages = ["usage_frequency", "difficulty_score", "task_priority"]
    decide(buffer, configuration(tmp_path, stages, tasks=[{"name": "set0", "source": "none"}]))
    rows = buffer.sql("SELECT task_id, features FROM rft.task ORDER BY task_id").to_pylist()
    groups = tally(
        buffer, "SELECT task_id, count(*) AS n FROM rft.rollout_group WHERE sealed_at IS NOT NULL GROUP BY 1"
    )
    observed = buffer.sql(
        "SELECT task_id, attempts AS n, mean_reward AS r FROM rft.task_stat WHERE attempts > 0"
    ).to_pylist()
    assert sum(groups.values()) == 2 and len(observed) == 2
    for row in rows:
        times = groups.get(row["task_id"], 0)
        assert (row["features"]["times_used"], row["features"]["usage_frequency"]) == (times, times / (times + 4))
    features = {row["task_id"]: row["features"] for row in rows}
    for row in observed:
        assert features[row["task_id"]]["difficulty"] == (0.5 + row["n"] * (1 - row["r"])) / (1 + row["n"])
    drawn = tally(
        buffer,
        "SELECT task_id, count(DISTINCT item_id) AS n FROM rft.draw d JOIN rft.rollout_group g ON g.group_id = d.item_id GROUP BY 1",
    )
    assert drawn
    decide(
        buffer,
        configuration(tmp_path, [{"usage_frequency": {"of": "draws"}}], tasks=[{"name": "set0", "source": "none"}]),
    )
    used = tally(buffer, "SELECT task_id, (features ->> 'times_used')::bigint AS n FROM rft.task")
    assert {task_id: times for task_id, times in used.items() if times} == drawn
    version = buffer.sql("SELECT DISTINCT pipeline_version AS v FROM rft.v_task")["v"].to_pylist()
    roles.work()
    roles.train(attempt, 2)
    config = configuration(tmp_path, [{"usage_frequency": {"of": "draws"}}], tasks=[{"name": "set0", "source": "none"}])
    assert decide(buffer, config).num_decided == 0
    assert decide(buffer, config, again=True).num_decided == 4
    again = tally(buffer, "SELECT task_id, (features ->> 'times_used')::bigint AS n FROM rft.task")
    assert sum(again.values()) == 2 * sum(drawn.values())
    assert buffer.sql("SELECT DISTINCT pipeline_version AS v FROM rft.v_task")["v"].to_pylist() == version


def test_a_selector_takes_tasks_by_the_priority_that_the_pipeline_gave_them(buffer: Buffer, tmp_path: Path) -> None:
    roles = Roles(buffer, num_tasks=4, steps=2, selector="easy_to_hard", selector_args={"features": ["priority"]})
    buffer.sql(
        "UPDATE rft.task SET payload = jsonb_build_object('prompt', 'x', 'metadata', jsonb_build_object('level', task_id % 3))"
    )
    chain = [
        {"sql": "SELECT * FROM batch WHERE task_id <> 2"},
        LEVELS,
        {"task_priority": {"weights": {"difficulty": -1}}},
    ]
    decide(buffer, configuration(tmp_path, chain, tasks=[{"name": "set0", "source": "none"}]))
    roles.attempt()
    roles.plan()
    assert [key for _, key in roles.task_order()] == [
        "3",
        "1",
    ]  # levels 0 and 1; task 2 would be the hardest and is excluded


def test_a_score_is_computed_once_for_what_it_looks_at_and_used_by_other_versions(
    buffer: Buffer, tmp_path: Path
) -> None:
    quality_stage = {"quality_score": {"columns": {"level": [0, 9]}}}
    write(tmp_path, ROWS[:5])
    load_tasks(ResolvedRun(configuration(tmp_path, [quality_stage])), buffer)
    assert count(buffer, "rft.task_score") == 5
    buffer.sql("UPDATE rft.task_score SET scores = '{\"quality\": 0.125}'")
    load_tasks(ResolvedRun(configuration(tmp_path, [quality_stage, "task_priority"])), buffer)
    quality = "SELECT features -> 'quality' AS q, features -> 'priority' AS p FROM rft.task ORDER BY task_id"
    assert {(row["q"], row["p"]) for row in buffer.sql(quality).to_pylist()} == {(0.125, 0.125)}
    write(tmp_path, [{**ROWS[0], "level": 9}, {**ROWS[1], "answer": "two"}, *ROWS[2:5]])
    load_tasks(ResolvedRun(configuration(tmp_path, [quality_stage, "task_priority"])), buffer)
    values = [row["q"] for row in buffer.sql(quality).to_pylist()]
    assert values[0] != 0.125 and values[1:] == [0.125] * 4


def test_a_purged_task_leaves_no_text_behind_and_is_not_decided_on(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[:2])
    (tmp_path / "mine.py").write_text("def shout(row):\n    return {'prompt': row['prompt'].upper()}\n")
    load_tasks(ResolvedRun(configuration(tmp_path, ["quality_score", "./mine.py:shout"])), buffer)
    buffer.sql(
        "UPDATE rft.task SET payload = '{\"purged\": true}', features = '{}', status = 'excluded' WHERE task_id = 1"
    )
    left = buffer.sql(
        "SELECT (SELECT count(*) FROM rft.task_score WHERE task_id = 1) AS scores, source_payload, source_features, v.prompt,"
        " v.features, t.payload FROM rft.task t JOIN rft.task_verdict v USING (task_verdict_id) WHERE t.task_id = 1"
    ).to_pylist()[0]
    assert left == {
        "scores": 0,
        "source_payload": None,
        "source_features": None,
        "prompt": None,
        "features": {},
        "payload": {"purged": True},
    }
    assert decide(buffer, configuration(tmp_path, [LEVELS])).num_decided == 1


GRADE = """
import pathlib
import pyarrow as pa
from operators.base import Operator, StageOutcome

class Grade(Operator):
    "Fails on the third task while there is no file called up."
    reads = frozenset({"prompt", "answer"})
    scores = {"grade": pa.float64(), "error": pa.string()}
    error_column = "error"
    rowwise = True

    def apply(self, table):
        up = (pathlib.Path(__file__).parent / "up").exists()
        bad = [row == "4" and not up for row in table["answer"].to_pylist()]
        grades = pa.array([None if b else 1.0 for b in bad], pa.float64())
        errors = pa.array(["no answer" if b else None for b in bad], pa.string())
        return StageOutcome.keep_all(table.num_rows, {"grade": grades, "error": errors})
"""


SPLIT = """
import pyarrow as pa
from operators.base import CreatedTask, Operator, StageOutcome

class Split(Operator):
    "One task per sentence."
    reads = frozenset({"prompt", "task_key"})
    rowwise = True

    def apply(self, table):
        reasons, created = [], []
        for row in table.to_pylist():
            parts = row["prompt"].split(". ")
            reasons.append("made into its sentences")
            created += [
                CreatedTask("", f"{row['task_key']}/{i}", {"prompt": part, "answer": None}, row["experience_id"])
                for i, part in enumerate(parts)
            ]
        return StageOutcome(pa.array(reasons, pa.string()), created=created)
"""


def test_tasks_that_a_stage_makes_pass_the_other_stages_and_name_where_they_come_from(
    buffer: Buffer, tmp_path: Path
) -> None:
    (tmp_path / "mine.py").write_text(SPLIT)
    write(tmp_path, [{"question": "How much is one? How much is two. Say it"}, {"question": "A task. B task. C task"}])
    config = configuration(
        tmp_path,
        [{"quality_score": {"measures": ["length"]}}, "./mine.py:Split", {"text_length_filter": {"min_len": 7}}],
    )
    (done,) = load_tasks(ResolvedRun(config), buffer)
    rows = buffer.sql(
        "SELECT payload ->> 'prompt' AS p, status::text AS s, features -> 'quality' AS q, (features ->> 'parent_task_id')::int AS parent"
        " FROM rft.task ORDER BY task_id"
    ).to_pylist()
    assert [(row["p"], row["s"], row["parent"]) for row in rows[2:]] == [
        ("How much is one? How much is two", "active", 1),
        ("Say it", "excluded", 1),
        ("A task", "excluded", 2),
        ("B task", "excluded", 2),
        ("C task", "excluded", 2),
    ]
    assert all(row["q"] is not None for row in rows)
    assert (done.num_decided, done.num_active) == (7, 1)
    assert load_tasks(ResolvedRun(config), buffer)[0].num_decided == 0
    (again,) = load_tasks(ResolvedRun(config), buffer, again=True)
    assert (again.num_decided, count(buffer, "rft.task")) == (7, 7)
    assert list_tasksets(buffer.database)[0]["num_tasks"] == 7


def test_scores_do_not_stand_in_the_way_of_an_import_of_the_same_tasks(buffer: Buffer, tmp_path: Path) -> None:
    roles = Roles(buffer, num_tasks=2, steps=1)
    buffer.sql('UPDATE rft.task SET payload = \'{"prompt": "How much?", "answer": "2"}\', features = \'{"level": 1}\'')
    roles.attempt()
    roles.work()
    exchange.export(buffer, tmp_path / "before.jsonl")
    decide(buffer, configuration(tmp_path, ["quality_score"], tasks=[{"name": "set0", "source": "none"}]))
    exchange.export(buffer, tmp_path / "after.jsonl")
    for name in ("before", "after"):
        rows = [json.loads(line) for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        assert rows and all(row["task_features"] == {"level": 1} for row in rows if "task_features" in row)
        exchange.load(buffer, tmp_path / f"{name}.jsonl", run=name)


def test_a_grade_that_failed_is_not_kept(buffer: Buffer, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(GRADE)
    write(tmp_path, ROWS[:4])
    config = configuration(tmp_path, ["./mine.py:Grade"])
    load_tasks(ResolvedRun(config), buffer)
    assert count(buffer, "rft.task_score WHERE error IS NULL") == 3
    assert count(buffer, "rft.task_score WHERE error = 'no answer'") == 1
    assert features(buffer)[2] == {"error": "no answer"}
    (tmp_path / "up").touch()
    load_tasks(ResolvedRun(config), buffer, again=True)
    assert count(buffer, "rft.task_score WHERE error IS NULL") == 4
    assert features(buffer)[2] == {"grade": 1.0}
