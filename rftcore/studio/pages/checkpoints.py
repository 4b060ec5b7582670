"""`/checkpoints`: the checkpoints of a run, where they went, and what people have corrected since of what they were trained on."""

from __future__ import annotations

import bisect

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.studio.page import Page
from rftcore.studio.visits import Visit

PAGE = Page("Checkpoints", "/checkpoints", order=60)
router = APIRouter()
_ON_A_PAGE = 25
_MOST_CORRECTED = 2000
_SHOWN = 100


@router.get("/checkpoints")
def checkpoints_page(visit: Visit, run: int | None = None, before: int | None = None) -> Response:
    """Show the checkpoints of a run; of the newest run that has some by default."""
    runs = visit.fetch("studio_runs_with_checkpoints")
    run_id = run if run is not None else runs[0]["run_id"] if runs else None
    if run_id is None:
        return visit.render("checkpoints.html", run=None, runs=runs, checkpoints=[], corrected={}, more=None)
    rows = visit.fetch("studio_checkpoints", run_id=run_id, before=before, limit=_ON_A_PAGE + 1)
    newest = rows[0]["trainer_step"] if rows else 0
    corrected = visit.fetch("studio_corrected", run_id=run_id, up_to=newest, limit=_MOST_CORRECTED + 1)
    steps = [row["trainer_step"] for row in corrected]
    counts = {row["checkpoint_id"]: bisect.bisect_right(steps, row["trainer_step"]) for row in rows}
    return visit.render(
        "checkpoints.html",
        run=visit.buffer.find_run(run_id),
        runs=runs,
        checkpoints=rows[:_ON_A_PAGE],
        corrected={
            key: f"{_MOST_CORRECTED:,}+" if count > _MOST_CORRECTED else f"{count:,}"
            for key, count in counts.items()
            if count
        },
        more=rows[_ON_A_PAGE - 1]["trainer_step"] if len(rows) > _ON_A_PAGE else None,
    )


@router.get("/checkpoints/corrected")
def corrected(visit: Visit, run: int, step: int) -> Response:
    """Show the experiences that the checkpoint of a step was trained on, and that were corrected since."""
    rows = visit.fetch("studio_corrected", run_id=run, up_to=step, limit=_SHOWN + 1)
    return visit.render(
        "corrected.html", run=visit.buffer.find_run(run), step=step, rows=rows[:_SHOWN], is_cut=len(rows) > _SHOWN
    )
