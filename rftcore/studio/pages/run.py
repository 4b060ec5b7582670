"""`/run/N`: one run while it works and afterwards; a step of it, with its rollouts."""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Any

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.reporting.progress_text import (
    describe_drops,
    describe_equal_rewards,
    describe_failures,
    doing,
    worker_progress,
    workers_to_show,
)
from rftcore.reporting.waiting_roles import what_waits
from rftcore.studio.config_differences import flat
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit, VisitOf
from rftdata.reports.progress import Progress, Snapshot
from rftdata.run import Run

PAGE = Page("Run", "/run", order=None)
router = APIRouter()
_STEPS = 6
_GROUPS = 40
_MOST_WATCHED = 64
_WORTH_AN_ALERT = 0.5  # share of the newest rows that a stage drops
_FIRST_METRICS = ("loss", "reward_mean", "grad_norm", "entropy", "kl_reference", "clip_fraction", "learning_rate")


class _Watched:
    """The progress of runs that open pages watch; steps that no longer change are read once for each session. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: OrderedDict[tuple[str, int], tuple[threading.Lock, Progress]] = OrderedDict()

    def snapshot(self, visit: VisitOf, run: Run) -> Snapshot:
        """Return the state of a run. A progress belongs to one session, since it reads with the account's connections."""
        key = visit.session.cookie, run.run_id
        with self._lock:
            lock, progress = self._found.setdefault(key, (threading.Lock(), Progress(run)))
            self._found.move_to_end(key)
            if len(self._found) > _MOST_WATCHED:
                self._found.popitem(last=False)
        with lock:
            return progress.snapshot()


_WATCHED = _Watched()


@router.get("/run/{run_id}")
def run_page(visit: Visit, run_id: int, smooth: int = 10, metric: str = "loss") -> Response:
    """Show a run."""
    run = visit.buffer.find_run(run_id)
    state = _state(visit, run)
    return visit.render(
        "run.html",
        **state,
        smooth=max(1, min(smooth, 500)),
        metric=metric,
        metrics=_metric_names(state["snapshot"], metric),
        settings=sorted(flat(run.config).items()),
    )


@router.get("/run/{run_id}/state")
def run_state(visit: Visit, run_id: int) -> Response:
    """Return what the run and its processes do."""
    return visit.render("run_state.html", **_state(visit, visit.buffer.find_run(run_id)))


@router.get("/run/{run_id}/step/{step}")
def step_page(visit: Visit, run_id: int, step: int, trained: bool = False, after: int = -1) -> Response:
    """Show a step, and the groups that were sampled for it or that it trained on."""
    run = visit.buffer.find_run(run_id)
    query = "studio_trained_groups" if trained else "studio_sampled_groups"
    groups = visit.fetch(query, run_id=run_id, step=step, after=after, limit=_GROUPS + 1)
    return visit.render(
        "step.html",
        run=run,
        step=step,
        is_trained=trained,
        after=after,
        row=next(iter(visit.fetch("studio_step", run_id=run_id, step=step)), None),
        groups=groups[:_GROUPS],
        more=groups[_GROUPS - 1]["ordinal"] if len(groups) > _GROUPS else None,
    )


def _state(visit: VisitOf, run: Run) -> dict[str, Any]:
    snapshot = _WATCHED.snapshot(visit, run)
    workers = [
        {"worker": worker, "doing": doing(worker), "progress": worker_progress(worker.progress)}
        for worker in workers_to_show(snapshot.workers)
    ]
    return {
        "run": run,
        "snapshot": snapshot,
        "workers": workers,
        "waits": what_waits(snapshot, run.config),
        "alerts": _alerts(snapshot),
        "steps": visit.fetch("studio_newest_steps", run_id=run.run_id, limit=_STEPS),
    }


def _alerts(snapshot: Snapshot) -> list[str]:
    """Return sentences about what a person should look at."""
    found = [] if snapshot.equal_rewards is None else [describe_equal_rewards(snapshot.equal_rewards)]
    found += [describe_drops(each) for each in snapshot.dropped if each.share >= _WORTH_AN_ALERT]
    found += [describe_failures(snapshot.failures)] if snapshot.failures else []
    return found + [f"{each.taskset}, {each.decoding}: {each.error}" for each in snapshot.evaluations if each.error]


def _metric_names(snapshot: Snapshot, chosen: str) -> list[str]:
    """Return the names of the newest step's metrics, the best known first, with the chosen one."""
    names = {*snapshot.metrics, chosen}
    return [name for name in _FIRST_METRICS if name in names] + sorted(names - set(_FIRST_METRICS))
