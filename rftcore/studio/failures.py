"""Errors as people at a browser see them: what is wrong and what to do, never a stack trace."""

from __future__ import annotations

import logging

import psycopg
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from rftcore.studio.config_files import FileRefusedError
from rftcore.studio.visits import visit_of
from rftdata.errors import (
    ArchivedError,
    BufferUnavailableError,
    ConfigError,
    ConflictError,
    PurgedError,
    QueryError,
    RftError,
)

_log = logging.getLogger(__name__)
_STATUS: dict[type[RftError], int] = {
    BufferUnavailableError: 503,
    ConflictError: 409,
    PurgedError: 410,
    ArchivedError: 410,
    QueryError: 422,
    ConfigError: 422,
    FileRefusedError: 422,
}


class NotFoundError(RftError):
    """What an address names does not exist."""


def add_failure_handlers(app: FastAPI) -> None:
    """Turn exceptions of routes into answers."""
    app.add_exception_handler(RftError, _of_ours)
    app.add_exception_handler(psycopg.Error, _of_the_database)
    app.add_exception_handler(RequestValidationError, _of_values)
    app.add_exception_handler(HTTPException, _of_http)
    app.add_exception_handler(Exception, _defect)


def answer(request: Request, status: int, sentence: str, todo: str | None = None) -> Response:
    """Return an error as a page, as a part of one (htmx), or as JSON (scripts)."""
    if "application/json" in request.headers.get("accept", ""):
        return JSONResponse({"problem": sentence, "todo": todo}, status_code=status)
    visit = visit_of(request)
    template = "problem.html" if "hx-request" in request.headers else "problem_page.html"
    return visit.render(template, status=status, sentence=sentence, todo=todo, code=status)


async def _of_ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, RftError)
    if isinstance(error, BufferUnavailableError):
        text = visit_of(request).text
        return answer(
            request,
            503,
            text("The database cannot be reached. Nothing was changed."),
            text("This page tries again by itself. What you have entered is kept in this tab."),
        )
    status = (
        404
        if isinstance(error, NotFoundError)
        else next((_STATUS[kind] for kind in type(error).__mro__ if kind in _STATUS), 500)
    )
    value = "" if error.value is None else f" ({error.value!r})"
    allowed = "" if error.allowed is None else f"; allowed: {error.allowed}"
    return answer(request, status, f"{error.what}{value}{allowed}", error.todo)


async def _of_the_database(request: Request, error: Exception) -> Response:
    assert isinstance(error, psycopg.Error)
    return answer(request, 422, error.diag.message_primary or str(error), error.diag.message_hint)


async def _of_values(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    wrong = "; ".join(f"{each['loc'][-1]}: {each['msg']}" for each in error.errors())
    return answer(request, 422, wrong)


async def _of_http(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    text = visit_of(request).text
    return answer(
        request, error.status_code, text("There is no such page.") if error.status_code == 404 else error.detail
    )


async def _defect(request: Request, error: Exception) -> Response:
    _log.error("%s %s: %s", request.method, request.url.path, error, exc_info=error)
    text = visit_of(request).text
    return answer(request, 500, text("This is a defect of the studio. Its log has the details."))
