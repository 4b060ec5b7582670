"""`/pairs`: preference pairs, with their texts side by side."""

from __future__ import annotations

from fastapi import APIRouter
from fastapi.responses import Response

from rftcore.studio.numbers import whole_from
from rftcore.studio.page import Page
from rftcore.studio.visits import Visit

PAGE = Page("Pairs", "/pairs", order=90)
router = APIRouter()
_ON_A_PAGE = 20


@router.get("/pairs")
def pairs_page(visit: Visit, run: str = "", before: int | None = None) -> Response:
    """Show pairs, newest first."""
    run_id = whole_from(run)
    ids = [row["pair_id"] for row in visit.fetch("studio_pair_ids", run_id=run_id, before=before, limit=_ON_A_PAGE + 1)]
    return visit.render(
        "pairs.html",
        runs=visit.fetch("studio_run_page", before=None, name=None, limit=50),
        run_id=run_id,
        pairs=visit.buffer.database.fetch_by_index("studio_pairs", pair_ids=ids[:_ON_A_PAGE]),
        more=ids[_ON_A_PAGE - 1] if len(ids) > _ON_A_PAGE else None,
    )
