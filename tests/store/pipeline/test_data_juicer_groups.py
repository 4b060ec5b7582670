"""A grouping in `pipelines.task` on a real database: tasks created from groups, their parents, and a set that grows."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftcore.task_pipeline.pipeline import load_tasks
from rftdata import Buffer
from rftdata.errors import OperatorError
from tests.store.tasks.test_task_pipeline import configuration, write
from tests.support.chat_server import Body, ChatServer, Says
from tests.support.models import make_tiny_model

ROWS = [
    {"question": "Rain fell on the hills.", "topic": "river"},
    {"question": "The river rose.", "topic": "river"},
    {"question": "A bell rang.", "topic": "bell"},
    {"question": "The clock struck.", "topic": "bell"},
]


@pytest.fixture
def chat() -> Iterator[ChatServer]:
    def answer(_: int, body: Body) -> str:
        return f"A story of {body['messages'][-1]['content'].count('* ')} parts."

    server = ChatServer(answer)
    yield server
    server.close()


def config(folder: Path, chat: ChatServer, *more: Any) -> RunConfig:
    params = {"base_url": chat.url, "api_key": "none", "max_retries": 0}
    nested = {
        "api_model": "tiny",
        "input_key": "prompt",
        "output_key": "story",
        "sub_doc_template": "* {text}",
        "model_params": params,
    }
    stages = [
        {"text_length_filter": {"min_len": 5}},
        {"key_value_grouper": {"group_by_keys": ["metadata.topic"]}},
        {"nested_aggregator": nested},
        *more,
    ]
    return configuration(folder, stages, model={"path": str(make_tiny_model(folder / "model"))})


def tasks(buffer: Buffer) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = buffer.sql(
        """SELECT task_id, prompt, status::text AS status, stage, reason, features -> 'parent_task_ids' AS parents,
                  features -> 'made_by' AS made_by, payload #>> '{metadata,group,metadata.topic}' AS topic
           FROM rft.v_task JOIN rft.task USING (task_id, status, features) ORDER BY task_id"""
    ).to_pylist()
    return found


def test_a_task_of_every_group_is_selected_in_place_of_its_rows(
    buffer: Buffer, tmp_path: Path, chat: ChatServer
) -> None:
    write(tmp_path, [*ROWS, {"question": "Hm?", "topic": "bell"}])
    # Stages behind it see what was made.
    stages = config(tmp_path, chat, {"clean_ip_mapper": {}}, {"words_num_filter": {"min_num": 3}})
    (done,) = load_tasks(ResolvedRun(stages), buffer)
    assert (done.num_active, done.dropped_by) == (2, {"nested_aggregator": 4, "text_length_filter": 1})
    rows = tasks(buffer)
    assert [
        (row["prompt"], row["parents"], row["made_by"], row["topic"]) for row in rows if row["status"] == "active"
    ] == [
        ("A story of 2 parts.", [1, 2], ["nested_aggregator"], "river"),
        ("A story of 2 parts.", [3, 4], ["nested_aggregator"], "bell"),
    ]
    assert rows[0]["reason"] == "nested_aggregator made one task of its group of 2"
    counts = buffer.sql(
        "SELECT stage, rows_in, rows_kept, rows_created FROM rft.operator_run WHERE rows_created > 0"
    ).to_pylist()
    assert counts == [{"stage": "nested_aggregator", "rows_in": 4, "rows_kept": 0, "rows_created": 2}]
    asked = len(chat.requests)
    assert asked == 2
    (again,) = load_tasks(ResolvedRun(stages), buffer)
    assert (again.num_decided, len(tasks(buffer)), len(chat.requests)) == (0, 7, asked)


def test_a_group_that_grows_becomes_another_task_and_the_others_stay(
    buffer: Buffer, tmp_path: Path, chat: ChatServer
) -> None:
    write(tmp_path, ROWS)
    stages = config(tmp_path, chat)
    load_tasks(ResolvedRun(stages), buffer)
    before = tasks(buffer)
    write(tmp_path, [*ROWS, {"question": "The bridge held.", "topic": "river"}])
    (done,) = load_tasks(ResolvedRun(stages), buffer)
    new = [row for row in tasks(buffer) if row["task_id"] not in {old["task_id"] for old in before}]
    assert [(row["prompt"], row["parents"]) for row in new if row["status"] == "active"] == [
        ("A story of 3 parts.", [1, 2, new[0]["task_id"]])
    ]
    assert done.num_active == 3  # what was made of the smaller group was decided on, and stays
    assert len(chat.requests) == 3  # the other group is unchanged and not asked about


def test_an_unresponsive_endpoint_is_reported_at_once_and_its_tasks_wait_for_the_next_load(
    buffer: Buffer, tmp_path: Path
) -> None:
    is_up = False
    server = ChatServer(lambda number, body: "A story." if is_up else Says("busy", 500))
    write(tmp_path, ROWS)
    stages = config(tmp_path, server)
    try:
        with pytest.raises(
            OperatorError, match=r"'sums': stage 3 .*nested_aggregator got no answer .* for any of 2 groups"
        ):
            load_tasks(ResolvedRun(stages), buffer)
        assert len(server.requests) == 2 * 3  # both groups, as often as try_num says
        assert {row["status"] for row in tasks(buffer)} == {"pending"}
        is_up = True
        (done,) = load_tasks(ResolvedRun(stages), buffer)
        assert done.num_active == 2
    finally:
        server.close()
