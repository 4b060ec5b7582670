"""Planning groups: which step may run, how many groups it lacks, and which tasks they try.

Any explorer may plan; an advisory lock lets one do so at a time. Nothing is queued: how many groups a step lacks is derived
from the groups there are, so a place freed by a drop, an abandonment or ageing out is seen by whoever plans next, and
planning is the same after a crash. Selector states and planned groups are written in one transaction.

Pacing (design: "Freshness and synchronization as one rule"): explorer step s may start once the policy stands at trainer
step >= floor((s - offset) / interval) * interval. Explorer step s feeds trainer step s + 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from psycopg.types.json import Jsonb

from rftdata import wake
from rftdata.config import SelectorConfig, TasksetConfig
from rftdata.database import Connection, Row, execute, fetch
from rftdata.errors import TaskSourceError
from rftdata.failpoints import failpoint
from rftdata.outage import ride_out
from rftdata.selectors import Observation, Selector, build_selector

if TYPE_CHECKING:
    from rftdata.database import Database

_MIXTURE = "*"


@dataclass(frozen=True)
class PlanConfig:
    """What planning needs of a run's configuration.

    Attributes:
        fresh_share: new groups per group of a batch.
        max_waiting_groups: nothing is planned while this many groups wait for the pipeline; None is no limit.
    """

    tasksets: tuple[TasksetConfig, ...]
    selector: SelectorConfig
    seed: int
    batch_groups: int
    group_size: int
    max_refill: int
    interval: int
    offset: int
    source: str = "explorer"
    fresh_share: float = 1.0
    base_dir: Path | None = None
    max_waiting_groups: int | None = None


def last_startable_step(policy_step: int, interval: int, offset: int) -> int:
    """The highest explorer step that may start while the policy stands at `policy_step`."""
    return (policy_step // interval + 1) * interval - 1 + offset


class Planner:
    """Plans the groups of one run; one per explorer process."""

    def __init__(self, database: Database, run_id: int, config: PlanConfig) -> None:
        self._database = database
        self._run_id = run_id
        self._config = config
        self._active: dict[str, tuple[Row, list[int]]] = {}

    def plan(self) -> int:
        """Plan what is lacking; the number of groups planned. Returns 0 while another explorer plans.

        What is lacking is derived from the groups there are, so a restart of the database is ridden out.
        """
        return ride_out(self._plan)

    def _plan(self) -> int:
        with self._database.transaction() as connection:
            if not fetch(connection, "try_plan_lock", run_id=self._run_id)[0]["locked"]:
                return 0
            if self._pipeline_is_behind(connection):
                return 0
            steps = fetch(
                connection,
                "planning_state",
                run_id=self._run_id,
                interval=self._config.interval,
                offset=self._config.offset,
                per_step=self._config.batch_groups * self._config.fresh_share,
                enough=self._config.batch_groups * (self._config.interval + self._config.offset + 1),
            )
            lacking = self._lacking(steps)
            if lacking:
                execute(
                    connection, "insert_selector_snapshot", run_id=self._run_id, policy_step=steps[0]["policy_step"]
                )
                self._insert(connection, steps[0], lacking)
                failpoint("planner.inserted")
        if lacking:
            wake.notify(self._database, wake.PLANNED)
        return len(lacking)

    def _pipeline_is_behind(self, connection: Connection) -> bool:
        limit = self._config.max_waiting_groups
        if limit is None:
            return False
        return bool(fetch(connection, "pipeline_backlog", run_id=self._run_id, enough=limit)[0]["n"] >= limit)

    def _lacking(self, steps: list[Row]) -> list[tuple[int, bool]]:
        """(explorer step, is it a refill) of every group to plan."""
        config = self._config
        # Leftovers of earlier steps are drawn first, so they count for the first open step.
        spare = steps[0]["spare"] if steps else 0
        lacking: list[tuple[int, bool]] = []
        for row in steps:
            base = max(row["due"] - row["base"], 0)
            missing = row["due"] - row["live"] - base - spare
            refills = max(min(missing, config.max_refill - row["refills"]), 0)
            lacking += [(row["explore_step"], False)] * base + [(row["explore_step"], True)] * refills
            spare = max(-missing, 0)
        return lacking

    def _insert(self, connection: Connection, state: Row, lacking: list[tuple[int, bool]]) -> None:
        tasks = self._select(connection, len(lacking))
        ordinal = fetch(connection, "next_ordinal", run_id=self._run_id)[0]["ordinal"]
        for i, ((step, is_refill), task_id) in enumerate(zip(lacking, tasks, strict=True)):
            execute(
                connection, "insert_group", run_id=self._run_id, attempt_id=state["current_attempt_id"], ordinal=ordinal + i,
                task_id=task_id, explore_step=step, group_size=self._config.group_size, is_refill=is_refill,
                source=self._config.source, planned_policy_step=state["policy_step"],
            )  # fmt: skip
        execute(connection, "mark_selected", run_id=self._run_id, task_ids=sorted(set(tasks)))

    def _select(self, connection: Connection, count: int) -> list[int]:
        """Task ids of the next groups, tasksets mixed by weight."""
        states = {row["taskset"]: row for row in fetch(connection, "selector_states", run_id=self._run_id)}
        selectors = {t.name: self._selector(connection, t, states.get(t.name)) for t in self._config.tasksets}
        self._observe(connection, selectors)
        planned: dict[str, int] = dict(states[_MIXTURE]["state"]) if _MIXTURE in states else {}
        names = []
        for _ in range(count):
            # The taskset that is furthest behind its weight: exact proportions without randomness.
            name = min(self._config.tasksets, key=lambda t: (planned.get(t.name, 0) + 1) / t.weight).name
            planned[name] = planned.get(name, 0) + 1
            names.append(name)
        chosen = {name: iter(selector.select(names.count(name))) for name, selector in selectors.items()}
        for name, selector in selectors.items():
            self._save(connection, name, self._config.selector.type, selector.state_dict())
        self._save(connection, _MIXTURE, "weights", planned)
        return [next(chosen[name]) for name in names]

    def _selector(self, connection: Connection, taskset: TasksetConfig, saved: Row | None) -> Selector:
        task_ids = self._active_tasks(connection, taskset.name)
        if not task_ids:
            raise TaskSourceError(
                f"the taskset {taskset.name!r} has no active task",
                todo="load it with `rft tasks load`, or activate some of its tasks",
            )
        selector = build_selector(
            self._config.selector.type, self._config.selector.args, task_ids, self._config.seed, self._config.base_dir
        )
        if saved is not None and saved["selector"] == self._config.selector.type:
            selector.load_state_dict(saved["state"])
        return selector

    def _active_tasks(self, connection: Connection, taskset: str) -> list[int]:
        """Their ids, ascending; read again only when they have changed: there may be millions."""
        stamp = fetch(connection, "active_tasks_stamp", taskset=taskset)[0]
        known = self._active.get(taskset)
        if known is None or known[0] != stamp:
            stamp = fetch(connection, "active_task_ids", taskset=taskset)[0]
            task_ids = stamp.pop("task_ids")
            known = self._active[taskset] = (stamp, task_ids)
        return known[1]

    def _observe(self, connection: Connection, selectors: dict[str, Selector]) -> None:
        seen: dict[str, list[Observation]] = {}
        for row in fetch(connection, "new_observations", run_id=self._run_id):
            observation = Observation(row["task_id"], row["successes"], row["trials"], row["kind"])
            seen.setdefault(row["taskset"], []).append(observation)
        for name, selector in selectors.items():
            if name in seen:
                selector.observe(seen[name])

    def _save(self, connection: Connection, taskset: str, selector: str, state: dict[str, Any]) -> None:
        execute(
            connection,
            "save_selector_state",
            run_id=self._run_id,
            taskset=taskset,
            selector=selector,
            state=Jsonb(state),
        )
