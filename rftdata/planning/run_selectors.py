"""A run's selectors, as one process keeps them between two plans.

Their memory is in the database (see selectors/base.py): outcomes with the plan that applied them, and a small state. Any process
therefore arrives at the same selectors. A new process gives a new selector all outcomes in the order of plans. A process that planned
before gives its selectors the outcomes that others applied since. Both then load the newest state. All this happens under the run's
planning lock and in the transaction of the plan. If that is rolled back, this object is ahead of the database and the planner discards it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from psycopg.types.json import Jsonb

from rftdata.config import SelectorConfig, TasksetConfig
from rftdata.errors import ConfigError, TaskSourceError
from rftdata.limits import check_json, may_be_unstorable
from rftdata.planning.active_tasks import ActiveTasks
from rftdata.planning.config import PlanConfig
from rftdata.planning.mixing import mix
from rftdata.postgres.database import Connection, Row, execute, fetch
from rftdata.postgres.values import storable
from rftdata.run import Run
from rftdata.selectors import Observation, Selector, build_selector
from rftdata.selectors.base import Ids

_MIXTURE = "*"
_MIXTURE_KIND = "credit"


@dataclass
class _SelectorOfSet:
    """One taskset's selector.

    Attributes:
        task_ids: the active tasks for which it was built.
        state: as stored in the database.
        retired: tasks that have reached their maximum number of groups.
        room: number of groups that may still be planned; None for any number.
    """

    selector: Selector
    task_ids: Ids
    state: dict[str, Any] | None
    retired: set[int]
    room: int | None


class RunSelectors:
    """All selectors of a run.

    Args:
        run_id: the run.
        attempt_id: its current attempt. When another one begins, which may have gone back, this object is no longer valid.
        active: the process's active tasks.
    """

    def __init__(self, run_id: int, attempt_id: int, config: PlanConfig, active: ActiveTasks) -> None:
        self._run_id = run_id
        self.attempt_id = attempt_id
        self._config = config
        self._active = active
        self._held: dict[str, _SelectorOfSet] = {}
        self._seq = 0  # the newest plan whose outcomes the kept selectors have learned
        self._ordinal = 0  # groups before it are counted in `_planned`
        self._planned: Counter[int] = Counter()

    def choose(
        self, connection: Connection, steps: Sequence[int], next_ordinal: int
    ) -> list[tuple[TasksetConfig, int]]:
        """Return taskset and task of each place, given its explorer step; fewer if nothing is left to try.

        First learns all new outcomes. Also stores the selectors' new states.

        Args:
            next_ordinal: ordinal of the first place; groups of other processes before it count as tries.
        """
        states = {row["taskset"]: row for row in fetch(connection, "selector_states", run_id=self._run_id)}
        self._count_planned(connection, next_ordinal)
        self._catch_up(connection, states)
        mixture = states.get(_MIXTURE)
        credit = dict(mixture["state"]) if mixture is not None and mixture["selector"] == _MIXTURE_KIND else {}
        sizes = {name: len(held.task_ids) for name, held in self._held.items()}
        room = {name: held.room for name, held in self._held.items()}
        names = mix(steps, self._config.tasksets, self._config.mixing, sizes, room, credit)
        tasksets = {t.name: t for t in self._config.tasksets}
        chosen = {name: iter(self._choose_of(connection, tasksets[name], n)) for name, n in Counter(names).items()}
        self._ordinal = next_ordinal + len(names)
        self._save(connection, credit)
        return [(tasksets[name], next(chosen[name])) for name in names]

    # Learning

    def _catch_up(self, connection: Connection, states: dict[str, Row]) -> None:
        """Bring the selectors to the state after the last plan, then apply newer outcomes."""
        newest: int = fetch(connection, "newest_applied", run_id=self._run_id)[0]["seq"]
        new = []
        for taskset in self._config.tasksets:
            held = self._held.get(taskset.name)
            if held is None or held.task_ids is not self._active.task_ids(connection, taskset.name):
                self._held[taskset.name] = self._make(connection, taskset)
                new.append(taskset.name)
        self._learn(connection, new, after=0, until=newest)
        self._learn(connection, self._held.keys() - new, after=self._seq, until=newest)
        self._seq = newest
        for name, held in self._held.items():
            saved = states.get(name)
            if (
                saved is not None
                and saved["selector"] == self._selector_config(name).type
                and saved["state"] != held.state
            ):
                held.selector.load_state_dict(saved["state"])
                held.state = saved["state"]
        if execute(connection, "apply_observations", run_id=self._run_id, seq=newest + 1):
            self._learn(connection, self._held, after=newest, until=newest + 1)
            self._seq = newest + 1

    def _make(self, connection: Connection, taskset: TasksetConfig) -> _SelectorOfSet:
        """Create a selector that has learned nothing yet."""
        task_ids = self._active.task_ids(connection, taskset.name)
        full, room = self._repeated(taskset, task_ids)
        made = self._build(connection, taskset, task_ids)
        if made is not None and full and room != 0 and not made.retire(sorted(full)):
            made = self._build(connection, taskset, task_ids, without=full)
        if made is None:
            return self._make(connection, taskset)
        return _SelectorOfSet(made, task_ids, None, full, room)

    def _build(
        self, connection: Connection, taskset: TasksetConfig, task_ids: Ids, without: Iterable[int] = ()
    ) -> Selector | None:
        """Build a selector for these tasks; return None if they changed meanwhile."""
        config = self._selector_config(taskset.name)
        kept = (
            ~np.isin(task_ids, np.array(sorted(without), dtype=np.int64))
            if without
            else np.ones(len(task_ids), dtype=bool)
        )
        selector = build_selector(config.type, config.args, task_ids[kept], self._config.seed, self._config.base_dir)
        selector.groups_per_step = self._config.batch_groups * self._config.fresh_share
        if selector.feature_keys:
            of_ids, features = self._active.features(connection, taskset.name, selector.feature_keys)
            if of_ids is not task_ids:
                return None
            selector.set_features({key: numbers[kept] for key, numbers in features.items()})
        return selector

    def _learn(self, connection: Connection, names: Iterable[str], *, after: int, until: int) -> None:
        """Pass the outcomes of plans `after` < seq <= `until` to these tasksets' selectors, one plan after the other."""
        learning = [name for name in names if self._held[name].selector.learns]
        if not learning or after >= until:
            return
        rows = fetch(
            connection, "applied_observations", run_id=self._run_id, after=after, until=until, tasksets=learning
        )
        by_name: dict[str, list[Observation]] = {}
        for row in rows:
            observation = Observation(
                row["task_id"],
                row["successes"],
                row["trials"],
                kind=row["kind"],
                group=row["ordinal"],
                seq=row["seq"],
                corrects=row["corrects"],
            )
            by_name.setdefault(row["taskset"], []).append(observation)
        for name, observations in by_name.items():
            for _, of_plan in groupby(observations, key=lambda o: o.seq):
                self._held[name].selector.observe(list(of_plan))

    # Choosing

    def _choose_of(self, connection: Connection, taskset: TasksetConfig, count: int) -> list[int]:
        held = self._held[taskset.name]
        if taskset.max_repeats is None:
            return held.selector.select(count)
        chosen: list[int] = []
        while len(chosen) < count:
            num_open = len(held.task_ids) - len(held.retired)
            before = len(chosen)
            for task_id in held.selector.select(min(count - before, num_open)):
                if self._planned[task_id] < taskset.max_repeats:
                    self._planned[task_id] += 1
                    chosen.append(task_id)
            self._close_repeated(connection, taskset)
            held = self._held[taskset.name]
            if len(chosen) == before:
                raise ConfigError(
                    f"the selector {self._selector_config(taskset.name).type!r} chooses only tasks that were retired",
                    todo=f"correct it, or remove max_repeats from the taskset {taskset.name!r}",
                )
        return chosen

    def _count_planned(self, connection: Connection, next_ordinal: int) -> None:
        """Count the groups planned by other processes, or written unplanned, since the last plan."""
        if all(t.max_repeats is None for t in self._config.tasksets) or self._ordinal >= next_ordinal:
            return
        rows = fetch(
            connection, "planned_tasks", run_id=self._run_id, from_ordinal=self._ordinal, to_ordinal=next_ordinal
        )
        self._planned.update(row["task_id"] for row in rows)
        self._ordinal = next_ordinal
        for taskset in self._config.tasksets:
            if taskset.name in self._held and taskset.max_repeats is not None:
                self._close_repeated(connection, taskset)

    def _close_repeated(self, connection: Connection, taskset: TasksetConfig) -> None:
        """Retire the tasks that have reached their maximum number of groups, and count what is left."""
        held = self._held[taskset.name]
        full, held.room = self._repeated(taskset, held.task_ids)
        new = full - held.retired
        held.retired = full
        if not new or held.room == 0 or held.selector.retire(sorted(new)):
            return
        # The selector cannot retire tasks: build a new one for the others, which learns the same outcomes and loads its state.
        state = json.loads(json.dumps(held.selector.state_dict()))
        self._held[taskset.name] = self._make(connection, taskset)
        self._learn(connection, [taskset.name], after=0, until=self._seq)
        self._held[taskset.name].selector.load_state_dict(state)

    def _repeated(self, taskset: TasksetConfig, task_ids: Ids) -> tuple[set[int], int | None]:
        """Return the tasks that have reached their maximum number of groups, and how many groups may still be planned."""
        limit = taskset.max_repeats
        if limit is None:
            return set(), None
        tried = np.fromiter(self._planned.keys(), dtype=np.int64, count=len(self._planned))
        times = np.fromiter(self._planned.values(), dtype=np.int64, count=len(self._planned))
        mine = np.isin(tried, task_ids)
        room = limit * len(task_ids) - int(np.minimum(times[mine], limit).sum())
        return set(tried[mine & (times >= limit)].tolist()), room

    def _selector_config(self, name: str) -> SelectorConfig:
        own = next(t.selector for t in self._config.tasksets if t.name == name)
        return own or self._config.selector

    def _save(self, connection: Connection, credit: dict[str, float]) -> None:
        names, kinds, states, metrics = [_MIXTURE], [_MIXTURE_KIND], [Jsonb(credit)], [Jsonb({})]
        for name, held in self._held.items():
            text = json.dumps(held.selector.state_dict())
            held.state, kind = json.loads(text), self._selector_config(name).type
            if may_be_unstorable(text):  # rarely, and there may be a number for every task
                check_json(f"the state of the selector {kind} of {name!r}", held.state)
            names.append(name)
            kinds.append(kind)
            states.append(Jsonb(held.state))
            metrics.append(Jsonb(storable(held.selector.metrics())))
        execute(
            connection,
            "save_selector_states",
            run_id=self._run_id,
            tasksets=names,
            selectors=kinds,
            states=states,
            metrics=metrics,
        )


def refuse_exhausted(tasksets: Sequence[TasksetConfig]) -> TaskSourceError:
    """Return the error that nothing is left to try."""
    capped = ", ".join(f"{t.name} {t.max_repeats}" for t in tasksets if t.max_repeats is not None)
    return TaskSourceError(
        "every task with a weight above 0 has reached max_repeats",
        value=capped,
        todo="raise max_repeats, load more tasks, or end the run earlier (steps)",
    )


def selector_metrics(run: Run) -> dict[str, float]:
    """What the selectors of a run reported of their last choice: `TASKSET/NAME` -> value."""
    rows = run.database.fetch("selector_metrics", run_id=run.run_id)
    return {
        f"{row['taskset']}/{name}": value for row in rows for name, value in row["metrics"].items() if value is not None
    }
