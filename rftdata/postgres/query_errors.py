"""PostgreSQL's errors about a user's query, in our words."""

from __future__ import annotations

import psycopg

from rftdata.errors import QueryError


def query_error(error: psycopg.Error) -> QueryError:
    """The database's refusal as one paragraph."""
    diagnostic = error.diag
    message = diagnostic.message_primary or " ".join(str(error).split())
    detail = f" ({diagnostic.message_detail.rstrip('.')})" if diagnostic.message_detail else ""
    return QueryError(f"the database refused the query: {message}{detail}", todo=diagnostic.message_hint)
