"""`/tasks`: tasks with their verdicts and pass rates, the state of selectors, the history of a task, and tasks that resemble it."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.studio.failures import NotFoundError
from rftcore.studio.numbers import whole_from
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit

PAGE = Page("Tasks", "/tasks", order=80)
router = APIRouter()
_ON_A_PAGE = 40


@router.get("/tasks")
def tasks_page(visit: Visit, taskset: str | None = None, run: str = "", after: int = 0, status: str = "") -> Response:
    """Show the tasks of a taskset; statistics are those of a run."""
    tasksets = visit.fetch("studio_tasksets")
    chosen = taskset or (tasksets[0]["taskset"] if tasksets else None)
    runs = visit.fetch("studio_run_page", before=None, name=None, limit=50)
    run_id = whole_from(run) or (runs[0]["run_id"] if runs else None)
    limit, state = _ON_A_PAGE + 1, status or None
    rows = visit.fetch("studio_tasks", taskset=chosen, run_id=run_id, after=after, status=state, limit=limit)
    return visit.render(
        "tasks.html",
        tasksets=tasksets,
        taskset=chosen,
        runs=runs,
        run_id=run_id,
        tasks=rows[:_ON_A_PAGE],
        more=rows[_ON_A_PAGE - 1]["task_id"] if len(rows) > _ON_A_PAGE else None,
        selectors=visit.fetch("studio_selectors", run_id=run_id),
        status_of_tasks=status,
    )


@router.get("/task/{task_id}")
def task_page(visit: Visit, task_id: int, run: int | None = None) -> Response:
    """Show a task, its outcomes in a run, and tasks that resemble it."""
    found = visit.fetch("studio_task", task_id=task_id)
    if not found:
        raise NotFoundError("there is no such task", value=task_id)
    history = visit.fetch("studio_task_history", run_id=run, task_id=task_id) if run is not None else []
    return visit.render(
        "task.html",
        task=found[0],
        run=None if run is None else visit.buffer.find_run(run),
        history=history,
        similar=visit.fetch("studio_similar_tasks", task_id=task_id),
    )
