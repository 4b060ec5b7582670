"""Groups that stages made, as they are stored: whose task they belong to, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from operators.base import CreatedAnswer, CreatedGroup, CreatedTask
from rftcore.config.run import RunConfig, parse_config
from rftcore.pipeline.created_groups import CreatedGroups
from rftcore.resolved import ResolvedRun
from rftdata import Buffer
from tests.support.models import make_tiny_model
from tests.support.store_roles import Roles, two_sealed_groups


@pytest.fixture
def roles(buffer: Buffer) -> Roles:
    return two_sealed_groups(buffer)


def rows(buffer: Buffer, query: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = buffer.sql(query).to_pylist()
    return found


def sft(buffer: Buffer, model: str, **algorithm: Any) -> RunConfig:
    return parse_config(
        {
            "run": {"name": "t"},
            "buffer": {"uri": buffer.config.uri, "segments": buffer.config.segments},
            "model": {"path": model},
            "tasks": [{"name": "t", "source": "./none.py:none"}],
            "algorithm": {"name": "sft", "group_size": 1, **algorithm},
            "explorer": {},
            "trainer": {},
            "steps": 1,
        },
        Path(),
        "the test",
    )


def test_answers_that_stages_create_belong_to_the_task_of_their_parent(
    buffer: Buffer, roles: Roles, tmp_path: Path
) -> None:
    """No task is made that a planner would try, and the selector learns nothing from what the policy did not sample."""
    make_tiny_model(tmp_path)
    config = sft(buffer, str(tmp_path))
    chat = [{"role": "system", "content": "be short"}, {"role": "user", "content": "1 + 1 ="}]
    answer = CreatedAnswer(chat, "2", 1.0, {"generation": 1.0})
    counts = "SELECT (SELECT count(*) FROM rft.task) AS tasks, (SELECT count(*) FROM rft.task_observation) AS outcomes"
    before = rows(buffer, counts)
    with buffer.writer(roles.run) as writer:
        created = CreatedGroups(ResolvedRun(config), buffer, writer)
        assert created.store([CreatedGroup(None, 1, [answer], "k1"), CreatedGroup(None, 1, [answer], "k1")]) == []
        assert "no longer exists" in str(created.store([CreatedGroup(None, 999, [answer], "k1")])[0].error)
    buffer.sql("UPDATE rft.experience SET reward = 0 WHERE source = 'synthesis'")
    assert rows(buffer, counts) == before
    made = rows(
        buffer,
        "SELECT parent_id, prompt, metrics, (SELECT task_id FROM rft.rollout_group g WHERE g.group_id = e.group_id) ="
        " (SELECT task_id FROM rft.rollout_group g JOIN rft.experience p USING (group_id) WHERE p.experience_id = 1) AS same_task"
        " FROM rft.v_experience e WHERE source = 'synthesis'",
    )
    assert made == [
        {"parent_id": 1, "prompt": "s:be short\nu:1 + 1 =\na:", "metrics": {"generation": 1.0}, "same_task": True}
    ]


def test_a_task_whose_first_group_cannot_be_stored_is_not_created(buffer: Buffer, roles: Roles, tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    with buffer.writer(roles.run) as writer:
        created = CreatedGroups(ResolvedRun(sft(buffer, str(tmp_path))), buffer, writer)
        for reward, key in ((float("nan"), "bad"), (1.0, "good")):
            task = CreatedTask("made", key, {"prompt": "1", "answer": None, "metadata": {}}, 1, {"n": 1})
            created.store([CreatedGroup(task, 1, [CreatedAnswer([{"role": "user", "content": "1"}], "2", reward)])])
    assert rows(buffer, "SELECT task_key, features FROM rft.task WHERE taskset = 'made'") == [
        {"task_key": "good", "features": {"n": 1, "parent_experience_id": 1}}
    ]


def test_answers_that_no_policy_sampled_are_not_stored_for_an_algorithm_that_needs_samples(
    buffer: Buffer, roles: Roles, tmp_path: Path
) -> None:
    make_tiny_model(tmp_path)
    config = sft(buffer, str(tmp_path), name="grpo", group_size=2)
    answer = CreatedAnswer([{"role": "user", "content": "1"}], "2", 1.0)
    with buffer.writer(roles.run) as writer:
        (refused,) = CreatedGroups(ResolvedRun(config), buffer, writer).store(
            [CreatedGroup(None, 1, [answer, answer], "k")]
        )
    assert "grpo needs the log-probabilities of samples" in str(refused.error)
