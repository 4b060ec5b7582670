"""The three roles without a model: what explorer, pipeline worker and trainer do to the buffer, step by step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from rftdata import Buffer, Group, Rollout
from rftdata import Sequence as Tokens
from rftdata.attempts import stored_selection
from rftdata.attempts.attempt import Attempt
from rftdata.attempts.sampling import SamplingConfig
from rftdata.config import SelectorConfig, TasksetConfig
from rftdata.pipeline.queue import claim_sealed_groups
from rftdata.pipeline.records import SealedBatch, Verdicts, concatenated, dropped, kept
from rftdata.pipeline.verdicts import commit_verdicts
from rftdata.planning.claims import ClaimedGroup, claim_groups
from rftdata.planning.config import PlanConfig
from rftdata.planning.pacing import Pacing
from rftdata.planning.planner import Planner
from rftdata.run import Run
from tests.support.waiting import PATIENCE_S

Rewards = Callable[[ClaimedGroup], Sequence[float | None]]
Keep = Callable[[dict[str, Any]], bool]

# Leases of what a test holds outlast it, also on a slow machine, and are not renewed within it: a lease that a test ends stays ended.
LEASE_S = 10 * PATIENCE_S


def mixed(group: ClaimedGroup) -> list[float]:
    """Rewards 0, 1, 0, 1, …"""
    return [float(index % 2) for index in range(group.group_size)]


def keep_all(row: dict[str, Any]) -> bool:
    return True


def tokens(reward: float | None = 1.0, policy_version_id: int | None = None, **changes: Any) -> Tokens:
    """A sequence of three prompt tokens and two sampled ones."""
    spans = [] if policy_version_id is None else [(3, policy_version_id)]
    values: dict[str, Any] = {
        "prompt": "1 + 1 =",
        "response": "2",
        "token_ids": [5, 6, 7, 8, 9],
        "num_prompt_tokens": 3,
        "finish_reason": "stop",
        "reward": reward,
        "behavior_logprobs": [-0.5, -0.25],
        "policy_spans": spans,
    }
    return Tokens(**{**values, **changes})


def own_group(rewards: Sequence[float | None] = (0.0, 1.0), task_key: str = "one", **changes: Any) -> Group:
    """A group that was not planned, as an import writes it."""
    rollouts = [Rollout(index, "ok", reward, [tokens(reward)]) for index, reward in enumerate(rewards)]
    return Group(rollouts, source="import", taskset="mine", task_key=task_key, payload={"answer": "2"}, **changes)


def selecting(buffer: Buffer, sql: str, name: str) -> Run:
    """A run that trains on what a query selects."""
    return buffer.create_run(
        name=name,
        config={},
        seed=1,
        steps=9,
        pipeline_version="none",
        mode="train",
        selected=stored_selection.select(buffer.database, sql),
    )


def publish_versions(buffer: Buffer, count: int) -> None:
    """Policy versions 1 to `count` of an empty buffer, of a run of their own."""
    run = buffer.create_run(name="policies", config={}, seed=1, steps=1, pipeline_version="none")
    with buffer.attempt(run) as attempt:
        for step in range(count):
            attempt.publish(step, method="memory", uri=f"/weights/{step}", num_bytes=1, checksum="0")


class Roles:
    """One run and those who work for it.

    Args:
        buffer: an open buffer.
        num_tasks: tasks of each taskset.
        steps, batch_groups, group_size, interval, offset, max_refill: as in a run's configuration.
        weights: weight of each taskset.
        max_staleness: what the pacing may need by default.
        window: of the pacing; greater, groups are sampled that may age out.
        sampling: keys of the section `sampling`.
    """

    def __init__(
        self,
        buffer: Buffer,
        *,
        num_tasks: int = 40,
        steps: int = 4,
        batch_groups: int = 2,
        group_size: int = 2,
        interval: int = 1,
        offset: int = 0,
        max_refill: int = 0,
        weights: Sequence[float] = (1.0,),
        selector: str = "sequential",
        selector_args: dict[str, Any] | None = None,
        base_dir: Path | None = None,
        max_staleness: int | None = None,
        window: int | None = None,
        sampling: dict[str, Any] | None = None,
    ) -> None:
        self.buffer = buffer
        self.database = buffer.database
        self.max_refill, self.batch_groups = max_refill, batch_groups
        bound = max(4, interval - 1 + offset) if max_staleness is None else max_staleness
        self.sampling = SamplingConfig.model_validate({"max_staleness": bound, **(sampling or {})})
        self.pacing = Pacing(
            interval=interval, offset=offset, window=self.sampling.window if window is None else window
        )
        self.run = buffer.create_run(name="roles", config={}, seed=3, steps=steps, pipeline_version="p1")
        self.run_id: int = self.run.run_id
        self.worker_id: int = self.database.fetch(
            "insert_worker", run_id=self.run_id, role="explorer", host="here", pid=1, pid_space="", pid_started=0
        )[0]["worker_id"]
        tasksets = tuple(
            TasksetConfig(name=f"set{i}", source="none", weight=weight) for i, weight in enumerate(weights)
        )
        for taskset in tasksets:
            buffer.sql(
                "INSERT INTO rft.task (taskset, task_key, payload) SELECT %s, n::text, '{}' FROM generate_series(1, %s) AS n"
                " ON CONFLICT DO NOTHING",
                [taskset.name, num_tasks],
            )
        selector_config = SelectorConfig.model_validate({"type": selector, **(selector_args or {})})
        self.plan_config = PlanConfig(
            tasksets=tasksets,
            selector=selector_config,
            seed=3,
            batch_groups=batch_groups,
            group_size=group_size,
            max_refill=max_refill,
            pacing=self.pacing,
            over_sampling=self.sampling.over_sampling,
            base_dir=base_dir,
            fresh_share=self.sampling.fresh_share(),
        )
        self.planner = Planner(self.run, self.plan_config)
        self.version: int | None = None
        self.policy_step = -1

    def attempt(self, *, lease_s: float = LEASE_S, publish: bool = True, buffer: Buffer | None = None) -> Attempt:
        """Take the run, and publish the weights it starts from."""
        attempt = (buffer or self.buffer).attempt(
            self.run,
            lease_s=lease_s,
            sampling=self.sampling,
            max_refill=self.max_refill,
            tasksets=[taskset.name for taskset in self.plan_config.tasksets],
        )
        if publish:
            self.publish(attempt, attempt.start_step)
        return attempt

    def publish(self, attempt: Attempt, step: int) -> int:
        self.policy_step = step
        self.version = attempt.publish(step, method="memory", uri=f"/weights/{step}", num_bytes=1, checksum="0")
        return self.version

    def plan(self) -> int:
        return self.planner.plan()

    def planned(self, where: str = "true") -> list[tuple[int, int]]:
        """(explorer step, number of groups) of what was planned."""
        rows = self.buffer.sql(
            f"SELECT explore_step, count(*) AS n FROM rft.rollout_group WHERE run_id = %s AND {where} GROUP BY 1 ORDER BY 1",
            [self.run_id],
        )
        return [(row["explore_step"], row["n"]) for row in rows.to_pylist()]

    def task_order(self) -> list[tuple[str, str]]:
        """(taskset, key) of every group planned, in planning order."""
        rows = self.buffer.sql(
            "SELECT taskset, task_key FROM rft.rollout_group JOIN rft.task USING (task_id) WHERE run_id = %s ORDER BY ordinal",
            [self.run_id],
        )
        return [(row["taskset"], row["task_key"]) for row in rows.to_pylist()]

    def claim(self, count: int = 100) -> list[ClaimedGroup]:
        last_step = self.pacing.last_step(self.policy_step)
        return claim_groups(
            self.run, self.worker_id, policy_step=self.policy_step, last_step=last_step, count=count, lease_s=LEASE_S
        )

    def result(self, group: ClaimedGroup, rewards: Sequence[float | None]) -> Group:
        rollouts = [
            Rollout(index, "ok", reward, [tokens(reward, self.version)]) for index, reward in enumerate(rewards)
        ]
        return Group(rollouts, group.group_id, group.claim_token)

    def insert(self, *groups: Group) -> list[int]:
        with self.buffer.writer(self.run) as writer:
            return writer.insert(*groups)

    def explore(self, rewards: Rewards = mixed, count: int = 100) -> list[int]:
        """Claim and seal what is planned; the groups."""
        claimed = self.claim(count)
        return self.insert(*[self.result(group, rewards(group)) for group in claimed]) if claimed else []

    def claim_sealed(self, worker_id: int | None = None) -> SealedBatch | None:
        return claim_sealed_groups(self.run, worker_id or self.worker_id, count=100, lease_s=LEASE_S)

    def commit(
        self, batch: SealedBatch, keep: Keep = keep_all, version: str = "p1", worker_id: int | None = None
    ) -> list[int]:
        wanted = pa.array([keep(row) for row in batch.table.to_pylist()], pa.bool_())
        gone = dropped(batch.table.filter(pc.invert(wanted)), "gate", "not wanted")
        decisions = concatenated([kept(batch.table.filter(wanted)), gone, batch.failed])
        return commit_verdicts(self.run, worker_id or self.worker_id, version, batch, Verdicts(decisions)).decided

    def decide(self, keep: Keep = keep_all, version: str = "p1") -> list[int]:
        """Verdicts on every sealed group; the groups decided."""
        batch = self.claim_sealed()
        return self.commit(batch, keep, version) if batch else []

    def work(self, keep: Keep = keep_all, rewards: Rewards = mixed) -> int:
        """Plan, explore and decide until nothing is left to do; how many groups were sealed."""
        sealed = 0
        while self.plan() or self.claimable():
            sealed += len(self.explore(rewards))
            self.decide(keep)
        return sealed

    def claimable(self) -> int:
        return sum(n for _, n in self.planned("status = 'planned' AND trainable"))

    def train(self, attempt: Attempt, step: int, *, publish: bool = True) -> list[int]:
        """One step of a trainer; the groups it drew."""
        batch = attempt.draw(step, self.batch_groups, timeout_s=5)
        assert batch is not None, f"step {step} got no groups"
        if publish:
            self.publish(attempt, step)
        attempt.record_step(step, batch, wait_seconds=0, train_seconds=0, publish_seconds=0, metrics={"loss": 1.0})
        return sorted(set(batch.rows["group_id"].to_pylist()))

    def group(self, group_id: int) -> dict[str, Any]:
        rows = self.buffer.sql(
            "SELECT status::text AS status, trainable, closed_reason FROM rft.rollout_group WHERE group_id = %s",
            [group_id],
        )
        found: dict[str, Any] = rows.to_pylist()[0]
        return found


def two_sealed_groups(buffer: Buffer) -> Roles:
    """Groups 1 and 2 of two experiences each (1 to 4), sealed."""
    roles = Roles(buffer, batch_groups=2)
    with roles.attempt():
        roles.plan()
        roles.explore()
    return roles


@contextlib.contextmanager
def taken_over(buffer: Buffer, run: Run) -> Iterator[Attempt]:
    """Another trainer holds the run, as after a suspension of the first one that was longer than its lease."""
    buffer.sql("UPDATE rft.run_attempt SET lease_until = now(), ended_at = now() WHERE run_id = %s", [run.run_id])
    with buffer.attempt(run) as attempt:
        yield attempt
