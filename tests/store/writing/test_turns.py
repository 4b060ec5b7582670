"""Several turns in one row: columns, arrays, views, statistics, export, and what the trainer reads; and rows of one turn, as older buffers have them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.algorithms import build_algorithm
from rftcore.reporting.report import build_report
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftdata import Buffer, Group, Rollout, exchange
from rftdata.errors import RftError, RoleFailedError
from rftdata.experience import TURNS, Baseline, Sequence
from rftdata.experience_checks import validate
from tests.support.store_roles import Roles, publish_versions

TASK: dict[str, Any] = {"taskset": "mine", "task_key": "one", "source": "import"}


def walk(reward: float = 1.0) -> Rollout:
    """Turns 0, 1 and 3 in one row, with observations of two tokens between them, and turn 2 as a branch of its own."""
    sampled = [False, False, True, True, False, False, True, False, False, True, True]
    logprobs = np.where(sampled, -np.arange(11.0), np.nan)
    trunk = Sequence(
        "go",
        "a<obs>b<obs>c",
        list(range(100, 111)),
        2,
        "stop",
        reward=reward,
        behavior_logprobs=logprobs[2:],
        loss_mask=sampled[2:],
        policy_spans=[(2, 7), (6, 7), (9, 8)],
        arrays={
            TURNS: np.array([[2, 4, 0], [6, 7, 1], [9, 11, 3]], np.int32),
            "state_hash": np.array([5, 6, 7]),
            "step_reward": np.array([0.0, 0.5, 1.0], np.float32),
        },
        turn_index=0,
    )
    branch = Sequence(
        "go",
        "d",
        [100, 101, 120],
        2,
        "length",
        reward=reward,
        behavior_logprobs=[-0.5],
        policy_spans=[(2, 8)],
        arrays={"state_hash": np.array([5]), "step_reward": np.array([0.0], np.float32)},
        turn_index=2,
        fork="branch",
    )
    return Rollout(0, "ok", reward, [trunk, branch])


def single(index: int = 1, reward: float = 0.0) -> Rollout:
    """One turn, without an array of turns."""
    arrays = {"state_hash": np.array([5]), "step_reward": np.array([0.25], np.float32)}
    return Rollout(
        index,
        "ok",
        reward,
        [Sequence("go", "x", [1, 2, 3], 2, "stop", reward=reward, behavior_logprobs=[-1.0], arrays=arrays)],
    )


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(Group([walk(), single()], **TASK))
    return buffer


def test_a_row_counts_its_turns_and_the_tokens_that_are_trained_on(stored: Buffer) -> None:
    rows = stored.sql(
        "SELECT turn_index, num_turns, num_response_tokens, num_trained_tokens, fork::text AS fork FROM rft.v_experience ORDER BY experience_id"
    )
    assert [tuple(row.values()) for row in rows.to_pylist()] == [
        (0, 3, 9, 5, None),
        (2, 1, 1, 1, "branch"),
        (0, 1, 1, 1, None),
    ]
    assert stored.sql("SELECT num_turns FROM rft.rollout ORDER BY rollout_id")["num_turns"].to_pylist() == [4, 1]
    with pytest.raises(RftError, match="holds facts"):
        stored.sql("UPDATE rft.experience SET fork = 'history'")


def test_queries_see_a_row_for_each_turn(stored: Buffer) -> None:
    found = stored.query(
        "SELECT experience_id, turn, first_token, end_token, token_ids, state_hash, reward_sampled FROM turn ORDER BY experience_id, turn"
    ).read_all()
    assert [tuple(row.values()) for row in found.to_pylist()] == [
        (1, 0, 2, 4, [102, 103], 5, 0.0),
        (1, 1, 6, 7, [106], 6, 0.5),
        (1, 3, 9, 11, [109, 110], 7, 1.0),
        (2, 2, 2, 3, [120], 5, 0.0),
        (3, 0, 2, 3, [3], 5, 0.25),
    ]
    (flat,) = stored.query("SELECT turns FROM experience WHERE experience_id = 1").read_all()["turns"].to_pylist()
    assert flat == [2, 4, 0, 6, 7, 1, 9, 11, 3]


def test_a_report_counts_forks_by_cause_and_what_was_sampled(stored: Buffer) -> None:
    report = build_report(stored, "walks")
    assert (report.num_experiences, report.num_turns, report.forks) == (3, 5, {"branch": 1})
    assert report.observed_tokens == 4


def test_the_trainer_reads_turns_of_rows_with_and_without_the_array(stored: Buffer) -> None:
    with stored.attempt("walks") as attempt:
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None
        batch = train_batch(drawn, build_algorithm("gigpo")).for_algorithm(1)
    assert batch.turn_BA.tolist() == [[0, 1, 3], [2, -1, -1], [0, -1, -1]]
    assert batch.turn_N.tolist() == [0, 0, 1, 2, 2, 0, 0]
    assert batch.state_BA is not None and batch.state_BA.tolist() == [[5, 6, 7], [5, 0, 0], [5, 0, 0]]
    assert batch.step_rewards_BA is not None and batch.step_rewards_BA.tolist() == [
        [0, 0.5, 1],
        [0, 0, 0],
        [0.25, 0, 0],
    ]
    assert batch.behavior_N.tolist() == [-2.0, -3.0, -6.0, -9.0, -10.0, -0.5, -1.0]


def test_states_that_are_not_one_per_turn_are_refused(buffer: Buffer) -> None:
    publish_versions(buffer, 8)
    run = buffer.create_run(name="walks", config={}, seed=1, steps=3, pipeline_version="none")
    wrong = walk()
    wrong.sequences[0].arrays = {**wrong.sequences[0].arrays, "state_hash": np.array([5])}
    with buffer.writer(run) as writer:
        writer.insert(Group([wrong, single()], **TASK))
    with buffer.attempt(run) as attempt:
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None
        with pytest.raises(
            RoleFailedError, match=r"'state_hash' of experience 1 has not one value per turn.*allowed: 3"
        ):
            train_batch(drawn, build_algorithm("gigpo"))


def test_a_label_of_a_row_of_several_turns_is_one_trial(buffer: Buffer) -> None:
    roles = Roles(buffer, num_tasks=1, batch_groups=1)
    with roles.attempt():
        roles.plan()
        (claimed,) = roles.claim()
        trunk = replace(walk(0.0).sequences[0], policy_spans=[(2, roles.version)])
        rollouts = [Rollout(index, "ok", 0.0, [replace(trunk)]) for index in range(2)]
        roles.insert(Group(rollouts, claimed.group_id, claimed.claim_token))
    buffer.sql("UPDATE rft.experience SET reward = 1 WHERE experience_id = 1")
    assert buffer.sql("SELECT alpha, beta FROM rft.task_stat").to_pylist() == [{"alpha": 2, "beta": 2}]


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_an_export_and_its_import_keep_turns_and_forks(
    stored: Buffer, other: Buffer, tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"walks.{suffix}"
    exchange.export(stored, file)
    exchange.load(other, file)
    rows, turns = [], []
    for buffer in (stored, other):
        columns = "turn_index, num_turns, num_response_tokens, num_trained_tokens, fork::text AS fork, response"
        rows.append(buffer.sql(f"SELECT {columns} FROM rft.v_experience ORDER BY experience_id").to_pylist())
        turns.append(buffer.read_arrays([1], [TURNS])[TURNS][0].as_py())
    assert rows[0] == rows[1] and len(rows[0]) == 3
    assert turns[0] == turns[1]


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (np.array([[2, 4]], np.int32), r"another type or shape.*int32 \[1, 2\]"),
        (np.array([[2, 4, 0]]), r"another type or shape.*int64 \[1, 3\]"),
        (np.zeros((0, 3), np.int32), "another type or shape"),
        (np.array([[1, 4, 0]], np.int32), "ascending places from 2 to 11"),
        (np.array([[2, 12, 0]], np.int32), "ascending places from 2 to 11"),
        (np.array([[2, 6, 0], [5, 7, 1]], np.int32), "not stretches of its response"),
        (np.array([[2, 4, 1], [5, 7, 1]], np.int32), "must have ascending numbers"),
    ],
)
def test_turns_that_do_not_fit_are_refused(turns: Any, message: str) -> None:
    rollout = walk()
    rollout.sequences[0].arrays = {TURNS: turns}
    with pytest.raises(RftError, match=message):
        validate((Group([rollout], **TASK),))


def test_the_last_answer_of_several_turns_is_that_of_the_chat() -> None:
    trunk, branch = walk().sequences
    assert (trunk.last_answer, branch.last_answer) == ("a<obs>b<obs>c", "d")
    chat = [{"role": "user", "content": "go"}, {"role": "assistant", "content": "c"}]
    assert replace(trunk, messages=chat).last_answer == "c"
    greedy = Baseline.of(Rollout(2, "ok", 1.0, [replace(trunk, messages=chat)]))
    assert (greedy.response, greedy.num_turns, greedy.num_response_tokens) == ("c", 3, 5)


def test_an_unknown_cause_and_a_wrong_number_are_refused() -> None:
    for change, message in (({"fork": "whim"}, "allowed: branch, history"), ({"turn_index": -1}, "turn_index")):
        rollout = walk()
        rollout.sequences[1] = replace(rollout.sequences[1], **change)  # type: ignore[arg-type]  # one of the two
        with pytest.raises(RftError, match=message):
            validate((Group([rollout], **TASK),))
