"""`/saved-queries`: keep a condition or a query under a name, and remove it."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Form
from fastapi.responses import Response

from rftcore.studio.page import Page
from rftcore.studio.visits import Visit
from rftdata.errors import ConflictError

PAGE = Page("Saved queries", "/saved-queries", order=None)
router = APIRouter()


@router.post("/saved-queries")
def save(
    visit: Visit,
    kind: Annotated[str, Form(pattern="^(condition|query)$")],
    name: Annotated[str, Form(min_length=1, max_length=100)],
    query: Annotated[str, Form(min_length=1, max_length=65_536)],
) -> Response:
    """Keep a query."""
    if not visit.buffer.database.run(
        "studio_save_query", kind=kind, name=name.strip(), query=query, author=visit.author
    ):
        raise ConflictError(
            "a query with this name exists", value=name.strip(), todo="choose another name, or remove that query first"
        )
    return Response(status_code=204, headers={"hx-refresh": "true"})


@router.post("/saved-queries/remove")
def remove(visit: Visit, saved_query_id: Annotated[int, Form()]) -> Response:
    """Remove a query."""
    visit.buffer.database.run("studio_remove_query", saved_query_id=saved_query_id)
    return Response(status_code=204, headers={"hx-refresh": "true"})
