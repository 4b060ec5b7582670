"""`/experiences`: experiences that meet a condition in SQL, their histograms, and one new reward for all of them."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Form, Request
from fastapi.responses import Response

from rftcore.studio.numbers import number_from, whole_from
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit, VisitOf
from rftdata import labels
from rftdata.errors import ConflictError, QueryError
from rftdata.reports.experience_search import NUM_SUMMARIZED, Bar, Selection, histograms, matching_ids, select_all

PAGE = Page("Experiences", "/experiences", order=30)
router = APIRouter()
_ON_A_PAGE = 30
_LONGEST = 65_536
_ALL = "true"
Where = Annotated[str, Form(max_length=_LONGEST)]


@router.get("/experiences")
def experiences_page(
    visit: Visit, request: Request, where: str = "", run: str = "", before: int | None = None, saved: str = ""
) -> Response:
    """Show the newest experiences that match."""
    queries = visit.fetch("studio_saved_queries", kind="condition")
    chosen = next((row for row in queries if str(row["saved_query_id"]) == saved), None)
    where = (chosen["query"] if chosen else where).strip()
    run_id = whole_from(run)
    ids, problem = [], None
    try:
        ids = visit.readers.read(
            request,
            visit.session,
            lambda connection: matching_ids(connection, where or _ALL, run_id, before, _ON_A_PAGE + 1),
        )
    except QueryError as error:
        problem = f"{error.what}. {error.todo or ''}"
    rows = visit.buffer.database.fetch_by_index("studio_found", experience_ids=ids[:_ON_A_PAGE]) if ids else []
    return visit.render(
        "experiences.html",
        where=where,
        run_id=run_id,
        runs=visit.fetch("studio_run_page", before=None, name=None, limit=50),
        rows=rows,
        problem=problem,
        more=urlencode({"where": where, "run": run, "before": ids[_ON_A_PAGE - 1]}) if len(ids) > _ON_A_PAGE else None,
        query=urlencode({"where": where, "run": run}),
        queries=queries,
        saved=chosen["saved_query_id"] if chosen else None,
        before=before,
        status=200 if problem is None else 422,
    )


@router.get("/experiences/histograms")
def histogram_part(visit: Visit, request: Request, where: str = "", run: str = "") -> Response:
    """Return histograms of the newest experiences that match."""
    run_id = whole_from(run)
    count, found = visit.readers.read(
        request, visit.session, lambda connection: histograms(connection, where or _ALL, run_id)
    )
    pictures = [
        {"name": name, "bars": [_drawn(bar, bars, where, run) for bar in bars]} for name, bars in found.items() if bars
    ]
    return visit.render("histograms.html", pictures=pictures, count=count, is_cut=count == NUM_SUMMARIZED)


@router.post("/experiences/relabel/preview")
def preview(
    visit: Visit,
    request: Request,
    reward: Annotated[str, Form()],
    where: Where = "",
    run: Annotated[str, Form()] = "",
    reason: Annotated[str, Form(max_length=20_000)] = "",
) -> Response:
    """Show what a new reward for all that match would change."""
    value, selection = number_from(reward), _selection(visit, request, where, run)
    unchanged = sum(num for old, num in selection.rewards if old == value)
    return visit.render(
        "relabel_preview.html",
        selection=selection,
        reward=value,
        where=where,
        run=run,
        reason=reason,
        unchanged=unchanged,
    )


@router.post("/experiences/relabel")
def relabel(
    visit: Visit,
    request: Request,
    reward: Annotated[float, Form()],
    digest: Annotated[str, Form()],
    where: Where = "",
    run: Annotated[str, Form()] = "",
    reason: Annotated[str, Form(max_length=20_000)] = "",
) -> Response:
    """Set the reward of all that match, if they are the ones of the preview, as one batch."""
    selection = _selection(visit, request, where, run)
    if selection.digest != digest:
        raise ConflictError(
            "other experiences match now than in the preview",
            value=len(selection.ids),
            todo="look at the preview again; nothing was changed",
        )
    batch = labels.set_rewards(
        visit.buffer, dict.fromkeys(selection.ids, reward), author=visit.author, reason=reason.strip() or None
    )
    visit.live.hint()
    return visit.render("relabelled.html", batch=batch, is_undo=False)


@router.post("/experiences/undo")
def undo(visit: Visit, label_batch_id: Annotated[int, Form()]) -> Response:
    """Undo a batch."""
    batch = labels.undo(visit.buffer, label_batch_id, author=visit.author)
    visit.live.hint()
    return visit.render("relabelled.html", batch=batch, is_undo=True)


def _selection(visit: VisitOf, request: Request, where: str, run: str) -> Selection:
    run_id = whole_from(run)
    return visit.readers.read(
        request, visit.session, lambda connection: select_all(connection, where.strip() or _ALL, run_id)
    )


def _drawn(bar: Bar, bars: list[Bar], where: str, run: str) -> dict[str, Any]:
    most = max(each.count for each in bars)
    narrowed = f"({where}\n) AND {bar.condition}" if where.strip() else bar.condition
    return {
        "label": bar.label,
        "count": bar.count,
        "height": max(1, round(100 * bar.count / most)) if bar.count else 0,
        "address": "/experiences?" + urlencode({"where": narrowed, "run": run}),
    }
