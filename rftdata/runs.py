"""The runs of an open buffer: creation, look-up, rewinding and forking."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftdata.attempts import stored_selection
from rftdata.attempts.rewind import fork, rewind
from rftdata.attempts.stored_selection import Selection
from rftdata.config_errors import did_you_mean
from rftdata.errors import QueryError
from rftdata.limits import MAX_COUNT, check_flag, check_integer, check_kind, check_text
from rftdata.postgres.database import Database, Row
from rftdata.postgres.locks import Lock, holding
from rftdata.run import NewRun, Run


class Runs:
    """The runs of an open buffer; the base class of `Buffer`.

    Attributes:
        location: the value for the option `--buffer`, without password.
        runs_folder: the folder in which runs keep files other than experiences, each in its own folder (`Run.folder`).
    """

    def __init__(self, database: Database, location: str, runs_folder: Path) -> None:
        self.database = database
        self.location = location
        self.runs_folder = runs_folder

    def create_run(
        self,
        *,
        name: str,
        config: dict[str, Any],
        seed: int,
        steps: int,
        pipeline_version: str,
        mode: str = "both",
        selected: Selection | None = None,
        parent: Run | None = None,
    ) -> Run:
        """Store a new run; a number is appended to a name that is taken.

        Args:
            selected: the rows that the run trains on instead of its own groups, from `rftdata.attempts.stored_selection.select`.
            parent: the run from whose checkpoint the new one starts, as its next stage.

        Raises:
            QueryError: the name, mode, seed, number of steps or configuration cannot be stored.
        """
        if selected is not None:
            check_kind("selected", selected, Selection, "what stored_selection.select returns, or None")
        if parent is not None:
            check_kind("parent", parent, Run, "a Run or None")
        new = NewRun(
            name=name, mode=mode, config=config, seed=seed, planned_steps=steps, pipeline_version=pipeline_version
        )
        with self.database.transaction() as connection:
            row = new.insert(connection, parent_run_id=parent.run_id if parent else None)
            if selected is not None:
                row = stored_selection.store(connection, row["run_id"], selected)
        return self._run(row)

    def find_run(self, name_or_id: str | int | None = None) -> Run:
        """Return a run by name or id; a string may be either, None is the newest run.

        Raises:
            QueryError: the run does not exist; the message suggests the nearest names.
        """
        if name_or_id is None:
            rows = self._fetch_runs(limit=1)
        else:
            rows = self.database.fetch("find_run", run=str(name_or_id), by_name=isinstance(name_or_id, str))
        if rows:
            return self._run(rows[0])
        names = [str(row["name"]) for row in self.database.fetch("run_names")]
        if not names:
            raise QueryError(f"the buffer {self.location} contains no run", todo="start one with `rft run CONFIG`")
        raise QueryError(
            f"the buffer {self.location} contains no such run",
            value=name_or_id,
            allowed=", ".join(names),
            todo=did_you_mean(str(name_or_id), names, "name one of these, or another buffer with --buffer"),
        )

    def runs(self, name: str | None = None, *, imported: bool = True, at_work: bool = False) -> list[Run]:
        """Return the runs, newest first.

        Args:
            name: only those of this configured name, which a number may follow in their own names.
            imported: also those that an import created.
            at_work: only those with a live process.
        """
        if name is not None:
            check_text("the name of a run", name)
        check_flag("imported", imported)
        check_flag("at_work", at_work)
        return [self._run(row) for row in self._fetch_runs(name, imported=imported, at_work=at_work)]

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Lock out other processes that look for a run and create a missing one."""
        with holding(self.database, Lock("join"), wait_s=math.inf):
            yield

    def rewind(self, run: Run | str | int, step: int, *, keep_rollouts: bool = False) -> None:
        """Take a run back to the checkpoint of an earlier step, from which its next trainer continues.

        Groups planned since then stay stored but are no longer used. Task statistics and selectors are reset to that step. Labels stay
        as they are.

        Args:
            step: a trainer step with a kept checkpoint, or 0 for the initial weights.
            keep_rollouts: undo only the draws, so that every group unused by the remaining steps can be drawn.

        Raises:
            ConfigError: there is no such checkpoint.
            FencedError: a live process trains the run.
        """
        check_integer("step", step, (0, MAX_COUNT))
        check_flag("keep_rollouts", keep_rollouts)
        rewind(self._own(run), step, keep_rollouts=keep_rollouts)

    def fork(
        self,
        run: Run | str | int,
        *,
        name: str,
        step: int | None = None,
        keep_rollouts: bool = False,
        config: dict[str, Any] | None = None,
        steps: int | None = None,
        pipeline_version: str | None = None,
    ) -> Run:
        """Create a run that continues from a step of another run, which is not changed.

        Groups that the history up to the step did not draw are copied, and the new run's pipeline decides on them. Copies share the
        arrays, and each experience has its origin in `parent_id`.

        Args:
            name: of the new run; a number is appended if it is taken.
            step: a trainer step with a kept checkpoint, 0 for the initial weights, None for the newest.
            keep_rollouts: also copy the groups planned after the step.
            config, steps, pipeline_version: of the new run; None for those of the old one.

        Raises:
            ConfigError: there is no such checkpoint.
            QueryError: the name, number of steps or configuration cannot be stored.
        """
        if step is not None:
            check_integer("step", step, (0, MAX_COUNT))
        check_flag("keep_rollouts", keep_rollouts)
        parent = self._own(run).refreshed()
        new = NewRun(
            name=name,
            mode=parent.mode,
            config=parent.config if config is None else config,
            seed=parent.seed,
            planned_steps=parent.planned_steps if steps is None else steps,
            pipeline_version=pipeline_version or parent.pipeline_version,
        )
        return self._run(fork(parent, new, step, keep_rollouts=keep_rollouts))

    def _fetch_runs(
        self, name: str | None = None, *, imported: bool = True, at_work: bool = False, limit: int | None = None
    ) -> list[Row]:
        return self.database.fetch("runs", name=name, imported=imported, at_work=at_work, limit=limit)

    def _run(self, row: Row) -> Run:
        return Run.of_row(self.database, self.runs_folder, row)

    def _own(self, run: Run | str | int) -> Run:
        """Return a run with this buffer's database, for a name, an id or another buffer's run."""
        if isinstance(run, Run):
            return run if run.database is self.database else self.find_run(run.run_id)
        return self.find_run(run)
