"""A small run written into a buffer by SQL: what a report or a progress view reads, with numbers chosen by hand."""

from __future__ import annotations

import json
from typing import Any

import rftdata
from rftdata.postgres.database import Connection


class StoredRun:
    """Inserts rows of one run; every method commits.

    Args:
        buffer: open buffer.
        name: of the run.
        steps: planned trainer steps.
    """

    def __init__(self, buffer: rftdata.Buffer, name: str = "sums", steps: int = 4) -> None:
        self.buffer = buffer
        config = {
            "model": {"path": "tiny"},
            "algorithm": {"name": "grpo"},
            "buffer": {"segments": buffer.config.segments},
        }
        self.run = buffer.create_run(name=name, config=config, seed=7, steps=steps, pipeline_version="v1")
        self.run_id = self.run.run_id
        self.name = name
        self.attempt_id = 0
        self._ordinal = 0

    def attempt(self, parent: int | None = None, checkpoint: int | None = None) -> int:
        self.attempt_id = self._one(
            "INSERT INTO rft.run_attempt (run_id, parent_attempt_id, from_checkpoint_id, host, pid, lease_until)"
            " VALUES (%s, %s, %s, 'here', 1, now() + interval '1 minute') RETURNING attempt_id",
            self.run_id,
            parent,
            checkpoint,
        )
        self._do(
            "UPDATE rft.run SET current_attempt_id = %s, status = 'running' WHERE run_id = %s",
            self.attempt_id,
            self.run_id,
        )
        return self.attempt_id

    def policy(self, step: int) -> int:
        return self._one(
            "INSERT INTO rft.policy_version (run_id, attempt_id, trainer_step, method, uri, num_bytes, checksum)"
            " VALUES (%s, %s, %s, 'memory', '/w', 1, 'x') RETURNING policy_version_id",
            self.run_id,
            self.attempt_id,
            step,
        )

    def evaluation(
        self,
        step: int,
        rewards: dict[int, float],
        purpose: str = "validation",
        taskset: str = "val",
        decoding: str = "greedy",
    ) -> int:
        """An evaluation of a new policy version of `step`, done, with one answer of 3 tokens per task."""
        key = self._one(
            "INSERT INTO rft.evaluation (run_id, policy_version_id, trainer_step, purpose, taskset, decoding, uri,"
            " checksum, status, num_tasks, mean_reward, seconds, finished_at)"
            " VALUES (%s, %s, %s, %s, %s, %s, '/w', 'x', 'done', %s, %s, 0.1, clock_timestamp()) RETURNING evaluation_id",
            self.run_id,
            self.policy(step),
            step,
            purpose,
            taskset,
            decoding,
            len(rewards),
            sum(rewards.values()) / len(rewards),
        )
        for task, reward in rewards.items():
            self._do("INSERT INTO rft.evaluation_answer VALUES (%s, %s, %s, 'a', 3, 'stop')", key, task, reward)
        return key

    def train_step(self, step: int, outcome: str = "trained", reason: str | None = None, **metrics: float) -> None:
        self._do(
            "INSERT INTO rft.train_step VALUES (%s, %s, %s, %s, %s, 2, 8, 100, 1.5, 2, 0.5, %s)",
            self.attempt_id,
            step,
            self.run_id,
            outcome,
            reason,
            json.dumps(metrics),
        )

    def checkpoint(self, step: int) -> int:
        return self._one(
            "INSERT INTO rft.checkpoint (run_id, attempt_id, trainer_step, uri, num_bytes)"
            " VALUES (%s, %s, %s, %s, 1) RETURNING checkpoint_id",
            self.run_id,
            self.attempt_id,
            step,
            f"/c/{step}",
        )

    def group(
        self,
        explore_step: int,
        rewards: list[float | None],
        status: str = "ready",
        parts: dict[str, float] | None = None,
        **columns: Any,
    ) -> int:
        """A group with one experience of 5 response tokens per rollout; a reward of None is a failed rollout without one."""
        task = self._one(
            "INSERT INTO rft.task (taskset, task_key, payload) VALUES (%s, 'k', '{\"answer\": \"3\"}')"
            " ON CONFLICT (taskset, task_key) DO UPDATE SET status = 'active' RETURNING task_id",
            self.name,
        )
        decided_by = "v1" if status == "ready" else None
        extra = {"is_refill": False, "trainable": True, "closed_reason": None, "decided_by": decided_by, **columns}
        key = self._one(
            "INSERT INTO rft.rollout_group (run_id, attempt_id, ordinal, task_id, explore_step, group_size, status,"
            " is_refill, trainable, closed_reason, decided_by)"
            " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s) RETURNING group_id",
            self.run_id,
            self.attempt_id,
            self._ordinal,
            task,
            explore_step,
            max(len(rewards), 1),
            status,
            *extra.values(),
        )
        self._ordinal += 1
        self._do("INSERT INTO rft.group_prompt (group_id, prompt_digest, prompt) VALUES (%s, 'p', '1+2?')", key)
        for index, reward in enumerate(rewards):
            rollout = self._one(
                "INSERT INTO rft.rollout (group_id, rollout_index, outcome, reward, num_turns, seconds)"
                " VALUES (%s, %s, %s, %s, 1, 1) RETURNING rollout_id",
                key,
                index,
                "failed" if reward is None else "ok",
                reward,
            )
            if reward is not None:
                self._one(
                    "INSERT INTO rft.experience (run_id, group_id, rollout_id, prompt_digest, response, reward_sampled, reward,"
                    " num_prompt_tokens, num_response_tokens, num_trained_tokens, finish_reason, segment_id, segment_row, reward_parts)"
                    " VALUES (%s, %s, %s, 'p', '3', %s, %s, 4, 5, 5, 'stop', 1, 0, %s) RETURNING experience_id",
                    self.run_id,
                    key,
                    rollout,
                    reward,
                    reward,
                    json.dumps(parts or {}),
                )
        return key

    def experiences(self) -> list[int]:
        rows = self.buffer.sql("SELECT experience_id FROM rft.experience WHERE run_id = %s ORDER BY 1", [self.run_id])
        return rows["experience_id"].to_pylist() if rows.num_rows else []

    def drop(self, group: int, stage: str, reason: str) -> None:
        self._do(
            "INSERT INTO rft.verdict (experience_id, group_id, pipeline_version, kept, stage, reason)"
            " SELECT experience_id, group_id, 'v1', false, %s, %s FROM rft.experience WHERE group_id = %s",
            stage,
            reason,
            group,
        )

    def worker(self, role: str, seconds_ago: float = 10, seconds: float | None = None, **columns: Any) -> int:
        """A process that joined `seconds_ago`; gone after `seconds`, alive when None."""
        values = {"state": "working", "waiting_for": None, "progress": {}, "error": None, **columns}
        return self._one(
            "INSERT INTO rft.worker (run_id, role, host, pid, started_at, heartbeat_at, stopped_at, state,"
            " waiting_for, progress, error)"
            " SELECT %s, %s, 'here', 42, t, coalesce(t + %s * interval '1 s', now()), t + %s * interval '1 s', %s, %s, %s, %s"
            " FROM (SELECT now() - %s * interval '1 s' AS t) AS x RETURNING worker_id",
            self.run_id,
            role,
            seconds,
            seconds,
            values["state"],
            values["waiting_for"],
            json.dumps(values["progress"]),
            values["error"],
            seconds_ago,
        )

    def _one(self, statement: str, *parameters: Any) -> int:
        with self.buffer.database.connection() as connection:
            row = _run(connection, statement, parameters).fetchone()
        assert row is not None
        return int(next(iter(row.values())))

    def _do(self, statement: str, *parameters: Any) -> None:
        with self.buffer.database.connection() as connection:
            _run(connection, statement, parameters)


def _run(connection: Connection, statement: str, parameters: tuple[Any, ...]) -> Any:
    return connection.execute(statement, parameters)  # type: ignore[call-overload]
