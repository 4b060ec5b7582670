"""Planning of groups: which step may run, how many groups it lacks, and which tasks they try.

Any explorer may plan; a lock admits one at a time. Nothing is queued. The number of groups that a step lacks is derived
from the existing groups, so the next plan sees places freed by a drop, an abandonment or ageing out, and planning is the same after
a crash. Selector states and planned groups are written in one transaction.

A step that may start (`rftdata.planning.pacing`) has as many groups as its trainer step takes. With over-sampling the first step has more:
the trainer takes the groups that are ready first, the others serve the next step, and so on, so that slow groups are not waited for.
"""

from __future__ import annotations

import math

from rftdata.failpoints import failpoint
from rftdata.planning.active_tasks import ActiveTasks
from rftdata.planning.config import PlanConfig
from rftdata.planning.mixing import check_weights
from rftdata.planning.run_selectors import RunSelectors, refuse_exhausted
from rftdata.postgres import notify
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.postgres.retry import ride_out
from rftdata.run import Run


class Planner:
    """Plans the groups of one run; one per explorer process."""

    def __init__(self, run: Run, config: PlanConfig) -> None:
        self._database = run.database
        self._run_id = run.run_id
        self._config = config
        self._active = ActiveTasks()
        self._selectors: RunSelectors | None = None
        check_weights(config.tasksets)

    def plan(self) -> int:
        """Plan the missing groups and return their number, or 0 while another explorer plans.

        The missing groups are derived from the existing ones, so planning is repeated safely after a restart of the database.
        """
        return ride_out(self._plan)

    def _plan(self) -> int:
        try:
            return self._plan_once()
        except BaseException:
            self._selectors = None  # their choices were not stored, or it is unknown whether they were
            raise

    def _plan_once(self) -> int:
        config = self._config
        with self._database.transaction() as connection:
            if not fetch(connection, "try_plan_lock", run_id=self._run_id)[0]["locked"]:
                return 0
            if self._pipeline_is_behind(connection):
                return 0
            steps = fetch(
                connection,
                "planning_state",
                run_id=self._run_id,
                interval=config.pacing.interval,
                offset=config.pacing.offset,
                window=config.pacing.window,
                per_step=config.batch_groups * config.fresh_share,
                over_sampling=config.over_sampling,
                enough=math.ceil(
                    config.batch_groups * (config.pacing.interval + config.pacing.offset + config.over_sampling + 1)
                ),
            )
            lacking = self._lacking(steps)
            if not lacking:
                return 0
            execute(connection, "insert_selector_snapshot", run_id=self._run_id, policy_step=steps[0]["policy_step"])
            planned = self._insert(connection, steps[0], lacking)
            if not planned:
                first = steps[0]
                if lacking[0][0] == first["explore_step"] and first["live"] + first["spare"] < first["taken"]:
                    raise refuse_exhausted(self._config.tasksets)
                return 0  # the steps that have their groups continue
            failpoint("planner.inserted")
        notify.notify(self._database, notify.PLANNED)
        return planned

    def _pipeline_is_behind(self, connection: Connection) -> bool:
        limit = self._config.max_waiting_groups
        if limit is None:
            return False
        return bool(fetch(connection, "pipeline_backlog", run_id=self._run_id, enough=limit)[0]["n"] >= limit)

    def _lacking(self, steps: list[Row]) -> list[tuple[int, bool]]:
        """Return (explorer step, is it a refill) of every group to plan."""
        config = self._config
        # Leftovers of earlier steps are drawn first, so they count towards the first open step.
        spare = steps[0]["spare"] if steps else 0
        lacking: list[tuple[int, bool]] = []
        for row in steps:
            base = max(row["due"] - row["base"], 0)
            there = row["live"] + base + spare
            refills = max(min(row["taken"] + row["surplus"] - there, config.max_refill - row["refills"]), 0)
            lacking += [(row["explore_step"], False)] * base + [(row["explore_step"], True)] * refills
            spare = max(there + refills - row["taken"], 0)
        return lacking

    def _insert(self, connection: Connection, state: Row, lacking: list[tuple[int, bool]]) -> int:
        """Plan as many of the places as there are tasks for; return their number."""
        if self._selectors is None or self._selectors.attempt_id != state["current_attempt_id"]:
            self._selectors = RunSelectors(self._run_id, state["current_attempt_id"], self._config, self._active)
        ordinal = fetch(connection, "next_ordinal", run_id=self._run_id)[0]["ordinal"]
        chosen = self._selectors.choose(connection, [step for step, _ in lacking], ordinal)
        if not chosen:
            return 0
        places = lacking[: len(chosen)]
        execute(
            connection,
            "insert_groups",
            run_id=self._run_id,
            attempt_id=state["current_attempt_id"],
            ordinal=ordinal,
            task_ids=[task_id for _, task_id in chosen],
            explore_steps=[step for step, _ in places],
            group_sizes=[taskset.group_size or self._config.group_size for taskset, _ in chosen],
            are_refills=[is_refill for _, is_refill in places],
            source=self._config.source,
            planned_policy_step=state["policy_step"],
        )
        execute(connection, "mark_selected", run_id=self._run_id, task_ids=sorted({task_id for _, task_id in chosen}))
        return len(chosen)
