"""Runs of a configuration as its page shows them: what the database has, put together with the processes that the studio has started."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import yaml

from rftcore.config.run import STAGES
from rftcore.config.sections import RUN_NAME
from rftcore.studio.run_processes import Process, RunProcesses, RunStart
from rftcore.studio.visits import VisitOf
from rftdata.errors import ConfigError
from rftdata.yaml_text import read_yaml

_MOST = 20
_MOST_STARTS = 5  # one of a file is at work, and the newest may have failed


@dataclass(frozen=True)
class ConfigRun:
    """A run, or a start that has not stored one.

    Attributes:
        state: `starting` and `failed` have no run; a run that `stops` was asked to.
        run_id, name, outcome: of the run; None without one.
        process: the `rft run` that supervises it; None if there never was one.
        start: how it was started here; None if it was started elsewhere.
        stopped_by: who has stopped the process here.
        can_resume: whether it has stopped before its end.
    """

    state: Literal["starting", "failed", "live", "stops", "ended"]
    run_id: int | None
    name: str | None
    status: str | None
    outcome: str | None
    process: Process | None
    start: RunStart | None
    stopped_by: str | None
    can_resume: bool

    @property
    def is_live(self) -> bool:
        """Whether its process is at work."""
        return self.state in ("starting", "live", "stops")


def mapping_of(text: str) -> dict[str, Any]:
    """Return the mapping of a configuration's text; an empty one if it has none."""
    with contextlib.suppress(yaml.YAMLError, ConfigError):
        found = read_yaml(text, "the file")
        if isinstance(found, dict):
            return found
    return {}


def run_names(text: str) -> list[str]:
    """Return the names that the runs of a configuration have: one, or one for each stage. What no run can be named is left out."""
    config = mapping_of(text)
    run, stages = config.get("run"), config.get(STAGES)
    name = str(run.get("name", "")) if isinstance(run, dict) else ""
    if not isinstance(stages, list):
        names = [name]
    else:
        names = [f"{name}-{stage['name']}" for stage in stages if isinstance(stage, dict) and "name" in stage]
    return [each for each in names if RUN_NAME.fullmatch(each)]


def config_runs(visit: VisitOf, processes: RunProcesses, file: str | None, names: Sequence[str]) -> list[ConfigRun]:
    """Return starts without a run, and then runs, newest first.

    Args:
        file: the configuration; None for all that are at work.
        names: of its runs.
    """
    starts = processes.starts(file)[: _MOST_STARTS if file else _MOST]
    rows = visit.fetch("studio_supervised_runs", names=list(names), at_work=file is None, limit=_MOST)
    by_process = {each.process: each for each in processes.starts()}
    runs = [_of_row(row, processes, by_process) for row in rows]
    seen = {run.process for run in runs}
    without = [
        _without_run(each, processes) for each in starts if each.process not in seen and not _has_run(visit, each)
    ]
    newest = starts[0] if starts else None  # an earlier failure is past
    shown = [each for each in without if each.is_live or each.start == newest]
    return [each for each in (*shown, *runs) if file is not None or each.is_live]


def _has_run(visit: VisitOf, start: RunStart) -> bool:
    """Return whether a process has supervised a run, perhaps one that a later process supervises now."""
    process = start.process
    values = {
        "host": process.host,
        "pid": process.pid,
        "pid_space": process.pid_space,
        "pid_started": process.pid_started,
    }
    return bool(visit.fetch("studio_supervised_by", **values))


def _without_run(start: RunStart, processes: RunProcesses) -> ConfigRun:
    process = start.process
    stopped_by = processes.stopped_by(process)
    state: Any = "failed" if not start.is_at_work else "stops" if stopped_by else "starting"
    return ConfigRun(state, None, None, None, None, process, start, stopped_by, can_resume=False)


def _of_row(row: dict[str, Any], processes: RunProcesses, starts: dict[Process, RunStart]) -> ConfigRun:
    process = None if row["pid"] is None else Process.of_row(row)
    is_live = process is not None and row["is_supervised"] and _is_at_work(process, beats=row["beats"])
    stopped_by = None if process is None else processes.stopped_by(process)
    can_resume = (
        not is_live
        and not row["is_imported"]
        and not row["is_archived"]
        and row["status"] in ("created", "running", "interrupted", "failed")
    )
    return ConfigRun(
        ("stops" if stopped_by else "live") if is_live else "ended",
        row["run_id"],
        row["name"],
        row["status"],
        row["outcome"],
        process,
        None if process is None else starts.get(process),
        stopped_by,
        can_resume,
    )


def _is_at_work(process: Process, *, beats: bool) -> bool:
    return not process.has_ended if process.is_here else beats
