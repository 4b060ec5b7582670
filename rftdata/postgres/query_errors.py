"""Conversion of PostgreSQL's errors about a user's query."""

from __future__ import annotations

import re

import psycopg

from rftdata.errors import QueryError
from rftdata.limits import LARGEST_REWARD


def query_error(error: psycopg.Error) -> QueryError:
    """Return the database's error as one paragraph."""
    diagnostic = error.diag
    if diagnostic.constraint_name in ("experience_reward_check", "experience_reward_trainable"):
        return _bad_reward(diagnostic.message_detail or "")
    message = diagnostic.message_primary or " ".join(str(error).split())
    detail = f" ({diagnostic.message_detail.rstrip('.')})" if diagnostic.message_detail else ""
    return QueryError(f"the database rejected the query: {message}{detail}", todo=diagnostic.message_hint)


def _bad_reward(row: str) -> QueryError:
    """Return the error of an UPDATE that sets a reward with which no trainer can compute; the server shows the row to accounts that may read it."""
    which = re.match(r"Failing row contains \((\d+),", row)
    values = set(re.findall(r", (NaN|-?Infinity|-?[\d.]+e\+\d+)(?=[,)])", row))
    return QueryError(
        f"the reward of {f'experience {which[1]}' if which else 'an experience'} cannot be {values.pop() if len(values) == 1 else 'NaN or as great'}",
        allowed=f"a finite number between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}, or NULL while it is awaited",
        todo="correct the statement; it changed nothing",
    )
