"""The greedy rollout of a group: stored once with it, read by draws, copied by forks, and the reason of a drop where it failed."""

from __future__ import annotations

import numpy as np
import pytest

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.algorithm import Algorithm
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftcore.trainer.batches.train_batch import TrainBatch
from rftdata import Buffer, Group, Rollout
from rftdata.attempts.attempt import Attempt
from rftdata.errors import RftError, RoleFailedError
from rftdata.experience import Baseline
from tests.support.store_roles import Roles, own_group, publish_versions, tokens

GREEDY = Baseline.of(Rollout(2, "ok", 0.5, [tokens(0.5, 7, response="greedy")], seconds=1.5))


@pytest.fixture(autouse=True)
def policies(buffer: Buffer) -> None:
    """The policy versions up to that of the greedy rollout."""
    publish_versions(buffer, 7)


def drawn(attempt: Attempt, algorithm: Algorithm, num_groups: int = 2) -> TrainBatch:
    batch = attempt.draw(1, num_groups, ARRAYS, timeout_s=5)
    assert batch is not None
    return train_batch(batch, algorithm)


def test_a_baseline_is_stored_with_its_group_and_drawn_with_its_experiences(buffer: Buffer) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a", baseline=GREEDY), own_group(task_key="b"))
    stored = buffer.sql(
        "SELECT response, reward, num_turns, num_response_tokens, policy_version_min, seconds FROM rft.group_baseline"
    )
    assert stored.to_pylist() == [
        {
            "response": "greedy",
            "reward": 0.5,
            "num_turns": 1,
            "num_response_tokens": 2,
            "policy_version_min": 7,
            "seconds": 1.5,
        }
    ]
    rows = buffer.sql(
        "SELECT task_key, response, baseline_reward FROM rft.v_experience ORDER BY experience_id"
    ).to_pylist()
    assert [(row["task_key"], row["response"], row["baseline_reward"]) for row in rows] == [
        ("a", "2", 0.5),
        ("a", "2", 0.5),
        ("b", "2", None),
        ("b", "2", None),
    ]
    with buffer.attempt(run) as attempt:
        assert drawn(attempt, build_algorithm("grpo")).baseline_rewards_B is None, "only what reads it gets it"
        attempt.record_step(
            1, attempt.draw(1, 2, (), timeout_s=5), wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={}
        )


def test_remax_names_the_experience_without_a_baseline(buffer: Buffer) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a", baseline=GREEDY), own_group(task_key="b"))
    with buffer.attempt(run) as attempt, pytest.raises(RoleFailedError) as raised:
        drawn(attempt, build_algorithm("remax"))
    assert "2 of 4 experiences of step 1 have no baseline rewards" in str(raised.value)
    assert "the first is experience 3" in str(raised.value) and "explorer.greedy_baseline: true" in str(raised.value)


def test_a_group_whose_greedy_rollout_failed_is_dropped_with_the_reason(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=2)
    failed = Baseline.of(Rollout(2, "failed", None, [], error="ValueError: no board"))
    with roles.attempt() as attempt:
        roles.plan()
        first, second = roles.claim()
        for claimed, baseline in ((first, failed), (second, GREEDY)):
            group = roles.result(claimed, [0.0, 1.0])
            roles.insert(Group(group.rollouts, group.group_id, group.claim_token, baseline=baseline))
        roles.decide()
        assert (
            roles.group(first.group_id)["closed_reason"]
            == "dropped by baseline: the greedy rollout failed: ValueError: no board"
        )
        batch = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert batch is not None and set(batch.rows["baseline_reward"].to_pylist()) == {0.5}
        assert set(batch.rows["group_id"].to_pylist()) == {second.group_id}


def test_a_failed_baseline_sends_a_group_to_the_pipeline_of_a_run_without_stages(buffer: Buffer) -> None:
    run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    failed = Baseline.of(Rollout(2, "timeout", None, [], error="took too long"))
    with buffer.writer(run) as writer:
        writer.insert(own_group(task_key="a", baseline=failed), own_group(task_key="b", baseline=GREEDY))
    states = buffer.sql("SELECT status::text AS status FROM rft.rollout_group ORDER BY group_id")["status"].to_pylist()
    assert states == ["sealed", "ready"]


def test_a_fork_copies_baselines(buffer: Buffer) -> None:
    roles = Roles(buffer, batch_groups=1)
    with roles.attempt() as attempt:
        roles.plan()
        [claimed] = roles.claim()
        group = roles.result(claimed, [0.0, 1.0])
        roles.insert(Group(group.rollouts, group.group_id, group.claim_token, baseline=GREEDY))
        roles.decide()
        attempt.commit_checkpoint(0, "/checkpoint", policy_version_id=roles.version or 0, num_bytes=1)
    fork = buffer.fork(roles.run, name="other", step=0, keep_rollouts=True)
    found = buffer.sql("SELECT run_id, baseline_reward FROM rft.v_group ORDER BY run_id").to_pylist()
    assert [(row["run_id"], row["baseline_reward"]) for row in found] == [(roles.run_id, 0.5), (fork.run_id, 0.5)]


class TestRecordedArrays:
    """`state_hash` and `step_reward` of gigpo, from what the writer stored."""

    def stored(self, buffer: Buffer, *recorded: dict[str, np.ndarray | None]) -> Attempt:  # type: ignore[type-arg]
        run = buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
        rollouts = [
            Rollout(i, "ok", 1.0, [tokens(1.0, arrays={k: v for k, v in arrays.items() if v is not None}, **more)])
            for i, (arrays, more) in enumerate(
                (dict(each), {} if "expert" not in each else {"behavior_logprobs": None}) for each in recorded
            )
        ]
        with buffer.writer(run) as writer:
            writer.insert(Group(rollouts, source="import", taskset="mine", task_key="one"))
        return buffer.attempt(run)

    state = np.array([-(2**62)], np.int64)
    reward = np.array([0.25], np.float32)

    def test_are_read_as_they_were_recorded(self, buffer: Buffer) -> None:
        with self.stored(buffer, *[{"state_hash": self.state, "step_reward": self.reward}] * 2) as attempt:
            found = drawn(attempt, build_algorithm("gigpo"), 1)
        assert found.state_BA is not None and found.state_BA.tolist() == [[-(2**62)]] * 2
        assert found.step_rewards_BA is not None and found.step_rewards_BA.tolist() == [[0.25]] * 2

    def test_may_be_missing_where_an_expert_has_a_loss_of_its_own(self, buffer: Buffer) -> None:
        expert = {"expert": {"loss": "sft"}}
        with self.stored(buffer, {"state_hash": self.state}, {"expert": None}) as attempt:
            found = drawn(attempt, build_algorithm("gigpo", expert), 1)
        assert found.expert_B.tolist() == [False, True] and found.step_rewards_BA is None

    @pytest.mark.parametrize(
        ("second", "message"),
        [
            ({}, "1 of 2 experiences of step 1 have no state .*experience 2.*turn.record\\(state=…\\)"),
            (
                {"state_hash": state},
                "1 of 2 experiences of step 1 have no step rewards .*experience 2.*turn.record\\(step_reward=…\\)",
            ),
            ({"state_hash": np.array([1, 2])}, "the array 'state_hash' of experience 2 has not one value"),
        ],
    )
    def test_are_refused_where_some_experiences_lack_them(
        self,
        second: dict[str, np.ndarray],
        message: str,
        buffer: Buffer,  # type: ignore[type-arg]
    ) -> None:
        attempt = self.stored(buffer, {"state_hash": self.state, "step_reward": self.reward}, second)
        with attempt, pytest.raises(RftError, match=rf"(?s){message}"):
            drawn(attempt, build_algorithm("gigpo"), 1)
