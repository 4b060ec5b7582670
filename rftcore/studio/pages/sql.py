"""`/sql`: a console that only reads."""

from __future__ import annotations

import time
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import Response

from rftcore.studio.page import Page
from rftcore.studio.visits import Visit
from rftdata.query.catalogue import tables
from rftdata.query.text_table import MAX_ROWS, run_query

PAGE = Page("SQL", "/sql", order=100)
router = APIRouter()
_LONGEST = 65_536
_EXAMPLE = "SELECT run, state, count(*) AS experiences, avg(reward) AS reward\nFROM v_experience GROUP BY run, state ORDER BY run, state"


@router.get("/sql")
def sql_page(visit: Visit, saved: int | None = None) -> Response:
    """Show the console, with a saved query if one is chosen."""
    queries = visit.fetch("studio_saved_queries", kind="query")
    text = next((row["query"] for row in queries if row["saved_query_id"] == saved), _EXAMPLE)
    columns = tables(visit.buffer.database)
    views = {name: of for name, of in sorted(columns.items()) if name.startswith("v_")}
    others = {name: of for name, of in sorted(columns.items()) if not name.startswith("v_")}
    return visit.render("sql.html", text=text, queries=queries, tables=views | others, kind="query", saved=saved)


@router.post("/sql")
def run_sql(visit: Visit, request: Request, query: Annotated[str, Form(max_length=_LONGEST)]) -> Response:
    """Return the rows of a query."""
    began = time.monotonic()
    table = visit.readers.read(request, visit.session, lambda connection: run_query(connection, query))
    return visit.render("sql_result.html", table=table, most=MAX_ROWS, seconds=time.monotonic() - began)
