"""Prompts stored once per group: every text and chat is read as it was written, and a purge removes prompts without experiences."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rftdata import Buffer, Group, Rollout, exchange
from rftdata import Sequence as Experience
from rftdata.errors import FencedError
from rftdata.maintenance import purge
from rftdata.postgres.database import queries
from rftdata.postgres.values import storable
from tests.support import text_bytes
from tests.support.store_roles import Roles, own_group, tokens

# Equal in Python, different in JSON; and what text and jsonb cannot hold.
CONTENTS: list[Any] = [
    "",
    "2",
    "Füße 🦶",
    "a\x00b",
    "a\ufffdb",
    "\ud800",
    1,
    1.0,
    True,
    None,
    [{"type": "text", "text": "2"}],
    float("nan"),
]
TEXTS = ["", "2", "1 + 1 =", "a\x00b", "a\ufffdb", "\ud800", "long " * 500]
MESSAGES = st.builds(
    lambda role, content, extra: {**extra, "role": role, "content": content},
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.sampled_from(CONTENTS),
    st.sampled_from([{}, {"tool_calls": []}, {"reasoning_content": "so"}]),
)


@st.composite
def experiences(draw: st.DrawFn) -> Experience:
    prompt, response = draw(st.sampled_from(TEXTS)), draw(st.sampled_from(TEXTS))
    plain = {"role": "assistant", "content": response}
    messages = draw(
        st.one_of(
            st.none(),
            st.lists(MESSAGES, max_size=3),
            st.lists(MESSAGES, max_size=3).map(lambda chat: [*chat, plain]),
            st.just([{"role": "user", "content": prompt}, plain]),
            st.sampled_from([{"role": "user"}, "no list", 3, {}]),  # an imported file may have that
        )
    )
    return tokens(1.0, prompt=prompt, response=response, messages=messages)


@pytest.fixture
def run(buffer: Buffer) -> Buffer:
    buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    return buffer


def group_of(rollouts: list[list[Experience]], task_key: str = "one") -> Group:
    made = [Rollout(index, "ok", 1.0, turns) for index, turns in enumerate(rollouts)]
    return Group(made, source="import", taskset="mine", task_key=task_key)


def chat(prompt: str, response: str, **more: Any) -> Experience:
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": response, **more}]
    return tokens(1.0, prompt=prompt, response=response, messages=messages)


def texts_of(buffer: Buffer, condition: str = "true") -> list[tuple[Any, ...]]:
    rows = buffer.sql(
        f"SELECT prompt, response, messages::text AS messages FROM rft.v_experience WHERE {condition} ORDER BY group_id, rollout_index, turn_index"
    )
    return [tuple(row.values()) for row in rows.to_pylist()]


def num_prompts(buffer: Buffer) -> int:
    return int(buffer.sql("SELECT count(*) AS n FROM rft.group_prompt")["n"][0].as_py())


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(rollouts=st.lists(st.lists(experiences(), min_size=1, max_size=3), min_size=1, max_size=5))
def test_every_text_and_chat_is_read_as_it_was_written(run: Buffer, rollouts: list[list[Experience]]) -> None:
    with run.writer("r") as writer:
        (group_id,) = writer.insert(group_of(rollouts))
    written = [e for turns in rollouts for e in turns]
    with run.database.connection() as connection:
        # What jsonb makes of the value: its own order of keys, and 1.0 apart from 1.
        expected = [
            connection.execute(
                "SELECT %s::jsonb::text AS messages",
                [None if e.messages is None else json.dumps(storable(e.messages))],
            ).fetchall()[0]["messages"]
            for e in written
        ]
    wanted = [
        (storable(e.prompt), storable(e.response), messages) for e, messages in zip(written, expected, strict=True)
    ]
    assert texts_of(run, f"group_id = {group_id}") == wanted
    # A text has a row for its chats and one for those without a chat, at most.
    rows = run.sql("SELECT prompt, messages FROM rft.group_prompt WHERE group_id = %s", [group_id]).to_pylist()
    assert sorted((row["prompt"], row["messages"] is not None) for row in rows) == sorted(
        {(storable(e.prompt), isinstance(e.messages, list)) for e in written}
    )


def test_what_all_rollouts_share_is_stored_once(run: Buffer) -> None:
    agent = [
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "call"},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": "three"},
    ]
    other = [*agent[:2], {"role": "tool", "content": "4"}, {"role": "assistant", "content": "four"}]
    with run.writer("r") as writer:
        writer.insert(group_of([[chat("p", f"answer {i}")] for i in range(16)]))
        writer.insert(group_of([[chat("p", "3", reasoning_content="1 + 2")], [chat("p", "4")]], "two"))
        writer.insert(
            group_of([[tokens(prompt="?", response="call 3 three", messages=m)] for m in (agent, other)], "three")
        )

    def stored(messages: str, table: str, order: str) -> list[Any]:
        found = run.sql(f"SELECT {messages}::text AS m FROM rft.{table} ORDER BY {order}")["m"].to_pylist()
        return [text and json.loads(text) for text in found]

    question = [{"role": "user", "content": "p"}]
    assert stored("messages", "group_prompt", "group_id") == [question, question, agent[:2]]
    own = stored("response_messages", "experience", "experience_id")
    assert own[:16] == [None] * 16
    assert own[16:18] == [[{"role": "assistant", "content": "3", "reasoning_content": "1 + 2"}], None]
    assert own[18:] == [agent[2:], other[2:]]


@pytest.mark.parametrize(("kind", "sizes", "limit"), [("chats", (2000, 4000), 0.45), ("turns", (500, 1000), 1.0)])
def test_a_database_of_chats_takes_much_less_than_one_with_all_texts_in_rows(
    buffer: Buffer, kind: str, sizes: tuple[int, int], limit: float
) -> None:
    found = text_bytes.measure(buffer, kind, 4, *sizes)
    assert found["experiences"] >= 64 and found["ratio"] <= limit, found
    # The table that it is compared with has every text.
    assert found["bytes_per_experience_texts_in_rows"] > 2 * 4 * sum(sizes) / (4 if kind == "turns" else 1), found


def test_a_prompt_stays_until_its_last_experience_is_purged(run: Buffer) -> None:
    with run.writer("r") as writer:
        writer.insert(
            group_of([[chat("secret", "a"), chat("secret a", "b")], [chat("secret", "c")]]), own_group(task_key="two")
        )
    before = texts_of(run)
    purged_row = ("[purged]", "[purged]", None)

    def purged(experience_id: int) -> list[tuple[Any, ...]]:
        assert purge.purge(run, f"experience_id = {experience_id}", reason="x", author="ada").num_experiences == 1
        return texts_of(run)

    assert purged(1) == [purged_row, *before[1:]] and num_prompts(run) == 4  # with that of purged ones
    assert purged(2) == [purged_row, purged_row, *before[2:]] and num_prompts(run) == 3
    assert purged(3) == [purged_row, purged_row, purged_row, *before[3:]]
    rows = run.sql("SELECT prompt, prompt_digest FROM rft.group_prompt ORDER BY group_id").to_pylist()
    assert rows[0] == {"prompt": "[purged]", "prompt_digest": b""} and [row["prompt"] for row in rows[1:]] == [
        "1 + 1 ="
    ]


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_texts_go_out_and_in_and_into_a_fork_as_they_are(
    run: Buffer, other: Buffer, tmp_path: Path, suffix: str
) -> None:
    odd = tokens(prompt="q", response="2", messages=[{"n": 1.0}, {"n": [1, None]}])
    with run.writer("r") as writer:
        writer.insert(
            group_of(
                [
                    [chat("q", "1"), chat("q 1", "2", tool_calls=[])],
                    [odd],
                    [tokens(prompt="q", response="3")],
                    [chat("q", "4")],
                ]
            )
        )
    exchange.export(run, tmp_path / f"x.{suffix}")
    exchange.load(other, tmp_path / f"x.{suffix}")
    assert texts_of(other) == texts_of(run)
    assert num_prompts(other) == num_prompts(run) == 3
    fork = run.fork("r", name="fork", step=0, keep_rollouts=True)
    assert texts_of(run, f"run_id = {fork.run_id}") == texts_of(other) and num_prompts(run) == 6


def test_writers_at_once_share_no_prompt_and_no_group_is_written_twice(buffer: Buffer) -> None:
    roles = Roles(buffer)
    with roles.attempt():
        roles.plan()
        claimed = roles.claim()
        with ThreadPoolExecutor(len(claimed)) as threads:
            list(threads.map(roles.insert, [roles.result(group, [0.0, 1.0]) for group in claimed]))
        prompts = buffer.sql("SELECT group_id, prompt FROM rft.group_prompt ORDER BY 1").to_pylist()
        assert prompts == [
            {"group_id": group.group_id, "prompt": "1 + 1 ="} for group in sorted(claimed, key=lambda g: g.group_id)
        ]
        with pytest.raises(FencedError):
            roles.insert(roles.result(claimed[0], [0.0, 1.0]))
    assert num_prompts(buffer) == len(claimed)


@pytest.mark.parametrize(
    ("columns", "text", "rest"),
    [
        ("avg(reward)", "min(prompt)", "rft.v_experience"),
        ("state, count(*)", "count(messages)", "rft.v_experience GROUP BY state"),
        ("experience_id, response", "prompt", "rft.v_experience WHERE run = 'r'"),
        ("chosen_id, rejected_id, margin", "prompt", "rft.v_pair WHERE stands"),
        ("review_id, deadline", "prompt", "rft.v_review_queue"),
    ],
)
def test_a_query_that_reads_no_prompt_does_not_join_prompts(buffer: Buffer, columns: str, text: str, rest: str) -> None:
    assert "group_prompt" not in _plan(buffer, f"SELECT {columns} FROM {rest}")
    assert "group_prompt" in _plan(buffer, f"SELECT {columns}, {text} FROM {rest}")


def test_chats_are_joined_without_a_call_per_row(buffer: Buffer) -> None:
    plan = _plan(buffer, "SELECT messages FROM rft.v_experience")
    assert "rft.chat" not in plan and "coalesce(e.response_messages" in plan.lower()


def _plan(buffer: Buffer, statement: str) -> str:
    with buffer.database.connection() as connection:
        return "\n".join(
            str(row["QUERY PLAN"]) for row in connection.execute(f"EXPLAIN (VERBOSE) {statement}").fetchall()
        )


@pytest.mark.parametrize(("columns", "reads"), [("{response}", False), ("{prompt}", True), ("{messages}", True)])
def test_a_stage_that_reads_no_prompt_loads_none(buffer: Buffer, columns: str, reads: bool) -> None:
    statement = queries()["batch_of_groups"].replace("%(columns)s", f"'{columns}'").replace("%(group_ids)s", "'{1,2}'")
    plan = _plan(buffer, statement.replace("%(as_sealed)s", "false").replace("%%", "%"))
    assert ("group_prompt" in plan) == reads
