"""`/runs`: all runs, and up to four of them in one picture, with the differences of their configurations."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query
from fastapi.responses import JSONResponse, Response

from rftcore.studio import curves
from rftcore.studio.config_differences import differences
from rftcore.studio.failures import NotFoundError
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit, VisitOf
from rftdata.errors import QueryError

PAGE = Page("Runs", "/runs", order=40)
router = APIRouter()
_ON_A_PAGE = 40
_MOST_COMPARED = 4
Ids = Annotated[list[int], Query()]


@router.get("/runs")
def runs_page(visit: Visit, before: int | None = None, name: str = "") -> Response:
    """Show runs, newest first."""
    return visit.render("runs.html", **_runs(visit, before, name))


@router.get("/runs/rows")
def run_rows(visit: Visit, before: int | None = None, name: str = "") -> Response:
    """Return the rows alone, to show them again."""
    return visit.render("run_rows.html", **_runs(visit, before, name))


@router.get("/runs/compare")
def compare(visit: Visit, id: Ids, smooth: int = 10) -> Response:
    """Show curves of several runs in one picture, and how their configurations differ."""
    rows = _chosen(visit, id)
    return visit.render(
        "runs_compared.html",
        runs=rows,
        query="&".join(f"id={row['run_id']}" for row in rows),
        smooth=max(1, min(smooth, 500)),
        differences=differences([row["config"] for row in rows]),
    )


@router.get("/runs/curve.json")
def curve(visit: Visit, id: Ids, of: str = curves.REWARD, smooth: int = 1) -> Response:
    """Return a curve of each of some runs."""
    series: list[dict[str, Any]] = []
    rows = _chosen(visit, id)
    for number, row in enumerate(rows):
        found = curves.curves_of(visit.buffer.find_run(row["run_id"]), of, max(1, min(smooth, 500)))
        prefix = f"{row['name']}: " if len(rows) > 1 else ""
        series += [{**each, "label": prefix + each["label"], "colour": number if prefix else None} for each in found]
    return JSONResponse({"x": visit.text("trainer step"), "series": series})


def _runs(visit: VisitOf, before: int | None, name: str) -> dict[str, Any]:
    rows = visit.fetch("studio_run_page", before=before, name=name.strip() or None, limit=_ON_A_PAGE + 1)
    more = rows[_ON_A_PAGE - 1]["run_id"] if len(rows) > _ON_A_PAGE else None
    return {"runs": rows[:_ON_A_PAGE], "more": more, "before": before, "name": name}


def _chosen(visit: VisitOf, ids: list[int]) -> list[dict[str, Any]]:
    wanted = list(dict.fromkeys(ids))
    if len(wanted) > _MOST_COMPARED:
        raise QueryError(
            "too many runs in one picture", value=len(wanted), allowed=f"up to {_MOST_COMPARED}", todo="choose fewer"
        )
    rows = visit.fetch("studio_runs_by_id", run_ids=wanted)
    missing = set(wanted) - {row["run_id"] for row in rows}
    if missing:
        raise NotFoundError("there is no such run", value=min(missing))
    return rows
