"""Features that a person sets: they override those of the source and of task pipelines, and do not count as a change of the source."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import psycopg
import pytest

from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer, exchange
from rftdata.config import TasksetConfig
from rftdata.errors import TaskSourceError
from rftdata.tasks import load_taskset, show_tasks
from tests.store.tasks.test_task_pipeline import LEVELS, configuration, features, write
from tests.store.tasks.test_tasks import plan_a_group
from tests.support.store_roles import Roles

ROWS = [
    {"question": f"How much is {i} plus {i}?", "answer": str(2 * i), "level": i, "features": {"n": i}} for i in range(4)
]
FILE = TasksetConfig(name="sums", source="sums.jsonl")
BY_HAND = "UPDATE rft.task SET features = features || '{\"weak\": 0.5}'"


def load_file(buffer: Buffer, folder: Path, rows: list[dict[str, Any]]) -> int:
    write(folder, rows)
    return load_taskset(buffer.database, FILE, folder)


def columns(buffer: Buffer, *names: str) -> dict[str, Any]:
    """Of the first task."""
    row = buffer.sql(f"SELECT {', '.join(f'{n}::text AS {n}' for n in names)} FROM rft.task ORDER BY task_id LIMIT 1")
    return {name: value and json.loads(value) for name, value in row.to_pylist()[0].items()}


@pytest.mark.parametrize("is_used", [False, True])
def test_a_source_that_grows_leaves_them_and_is_not_said_to_differ(
    buffer: Buffer, tmp_path: Path, is_used: bool
) -> None:
    load_file(buffer, tmp_path, ROWS[:2])
    buffer.sql(BY_HAND)
    if is_used:
        plan_a_group(buffer)
    assert load_file(buffer, tmp_path, ROWS[:3]) == 3
    assert features(buffer) == [{"n": 0, "weak": 0.5}, {"n": 1, "weak": 0.5}, {"n": 2}]


@pytest.mark.parametrize("is_used", [False, True])
def test_a_query_that_is_asked_again_leaves_them(buffer: Buffer, tmp_path: Path, is_used: bool) -> None:
    config = TasksetConfig(name="sums", source="sql: SELECT n || ' + 1' AS question FROM generate_series(1, 2) n")
    load_taskset(buffer.database, config, tmp_path)
    buffer.sql(BY_HAND)
    if is_used:
        plan_a_group(buffer)
    assert load_taskset(buffer.database, config, tmp_path) == 2
    assert features(buffer) == [{"weak": 0.5}] * 2


def test_they_lie_over_those_of_every_pipeline_version_and_stages_see_them(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[:2])
    first = configuration(tmp_path, [{"difficulty_score": {"features": {"n": [0, 4]}}}])
    load_tasks(ResolvedRun(first), buffer)
    buffer.sql('UPDATE rft.task SET features = features || \'{"n": 2, "level": 3}\' WHERE task_key = task_key')
    assert features(buffer) == [{"n": 2, "level": 3, "difficulty": level / 4} for level in (0, 1)]
    load_tasks(ResolvedRun(first), buffer, again=True)
    assert features(buffer) == [{"n": 2, "level": 3, "difficulty": 0.5}] * 2
    buffer.sql("UPDATE rft.task SET features = features || '{\"difficulty\": 1}'")
    for stages in ([LEVELS], [LEVELS, "quality_score"], ["quality_score"]):
        load_tasks(ResolvedRun(configuration(tmp_path, stages)), buffer)
        assert all(f.items() >= {"n": 2, "level": 3, "difficulty": 1}.items() for f in features(buffer))
    assert columns(buffer, "source_features", "manual_features") == {
        "source_features": {"n": 0},
        "manual_features": {"n": 2, "level": 3, "difficulty": 1},
    }
    shown = show_tasks(buffer.database, "sums")[0]
    assert shown["manual_features"] == {"n": 2, "level": 3, "difficulty": 1}


def test_removing_one_by_hand_shows_the_pipelines_or_the_sources_again(buffer: Buffer, tmp_path: Path) -> None:
    write(tmp_path, ROWS[:2])
    load_tasks(ResolvedRun(configuration(tmp_path, [{"difficulty_score": {"features": {"n": [0, 1]}}}])), buffer)
    buffer.sql('UPDATE rft.task SET features = features || \'{"n": 7, "difficulty": 7, "mine": 7, "too": null}\'')
    assert features(buffer) == [{"n": 7, "difficulty": 7, "mine": 7, "too": None}] * 2
    buffer.sql("UPDATE rft.task SET features = features - 'difficulty' - 'mine'")
    assert features(buffer) == [{"n": 7, "difficulty": float(i), "too": None} for i in (0, 1)]
    buffer.sql("UPDATE rft.task SET manual_features = '{}' WHERE features ->> 'difficulty' = '0.0'")
    buffer.sql("UPDATE rft.task SET features = '{}' WHERE features ->> 'difficulty' = '1.0'")
    assert features(buffer) == [{"n": i, "difficulty": float(i)} for i in (0, 1)]
    assert buffer.sql("SELECT count(*) AS n FROM rft.task WHERE manual_features = '{}'")["n"].to_pylist() == [2]


def test_a_corrected_source_changes_its_own_features_and_not_those(buffer: Buffer, tmp_path: Path) -> None:
    load_file(buffer, tmp_path, ROWS[:2])
    buffer.sql(BY_HAND)
    load_file(buffer, tmp_path, [{**ROWS[0], "features": {"n": 5, "weak": 0.1}}, {**ROWS[1], "answer": "two"}])
    assert features(buffer) == [{"n": 5, "weak": 0.5}, {"n": 1, "weak": 0.5}]
    buffer.sql("UPDATE rft.task SET features = features - 'weak'")
    assert features(buffer) == [{"n": 5, "weak": 0.1}, {"n": 1}]
    plan_a_group(buffer)
    with pytest.raises(TaskSourceError, match=r"2 of the tasks stored as 'sums' now differ"):
        load_file(buffer, tmp_path, ROWS[:2])


def test_features_that_are_no_object_are_refused(buffer: Buffer, tmp_path: Path) -> None:
    load_file(buffer, tmp_path, ROWS[:1])
    with (
        psycopg.connect(buffer.config.uri) as connection,
        pytest.raises(psycopg.errors.CheckViolation, match="features of task 1 are not an object of names and values"),
    ):
        connection.execute("UPDATE rft.task SET features = '[3]'")
    assert features(buffer) == [{"n": 0}]


def test_a_purge_removes_them(buffer: Buffer, tmp_path: Path) -> None:
    load_file(buffer, tmp_path, ROWS[:2])
    plan_a_group(buffer)
    buffer.sql(BY_HAND)
    buffer.sql("UPDATE rft.task SET payload = '{\"purged\": true}', features = '{}', status = 'excluded'")
    assert columns(buffer, "features", "manual_features", "source_features") == {
        "features": {},
        "manual_features": {},
        "source_features": None,
    }
    # Its source still has it, which brings nothing back and is no change.
    assert load_file(buffer, tmp_path, ROWS[:3]) == 3
    assert features(buffer) == [{}, {}, {"n": 2}]


def test_they_travel_with_an_export_and_are_no_difference_at_an_import(buffer: Buffer, tmp_path: Path) -> None:
    roles = Roles(buffer, num_tasks=2, steps=1)
    roles.attempt()
    roles.work()
    exchange.export(buffer, tmp_path / "before.jsonl")
    buffer.sql(BY_HAND)
    exchange.export(buffer, tmp_path / "after.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "after.jsonl").read_text().splitlines()]
    assert {json.dumps(row["task_features"]) for row in rows if "task_features" in row} == {'{"weak": 0.5}'}
    for name in ("before", "after"):
        exchange.load(buffer, tmp_path / f"{name}.jsonl", run=name)
