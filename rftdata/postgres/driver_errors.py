"""Conversion of the driver's errors that a user can correct to errors of this package."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psycopg
import psycopg.errors
from psycopg_pool import PoolTimeout

from rftdata.errors import (
    ArchivedError,
    BufferUnavailableError,
    ConflictError,
    DiskFullError,
    PurgedError,
    QueryError,
    RftError,
)
from rftdata.postgres.retry import is_unavailable
from rftdata.uri import redacted

# SQLSTATEs of the schema's own refusals: a change of an archived run, a label for what was purged, and one for what was changed since it was shown.
_OWN: dict[str, type[RftError]] = {"RFT02": ArchivedError, "RFT03": PurgedError, "RFT04": ConflictError}


@contextmanager
def translated(uri: str) -> Iterator[None]:
    """Convert driver errors that a user can correct to errors of this package."""
    try:
        yield
    except psycopg.errors.DiskFull as error:
        raise DiskFullError(
            "the database's disk is full", todo="free some space; nothing was partly written"
        ) from error
    except (
        psycopg.errors.DeadlockDetected,
        psycopg.errors.SerializationFailure,
        psycopg.errors.LockNotAvailable,
    ) as error:
        raise ConflictError(
            f"the database aborted a transaction: {one_line(error)}", todo="run it again; nothing of it was stored"
        ) from error
    except psycopg.errors.QueryCanceled as error:
        raise QueryError(f"the database canceled a query: {one_line(error)}") from error
    except (psycopg.OperationalError, psycopg.errors.IdleInTransactionSessionTimeout, PoolTimeout) as error:
        if not is_unavailable(error):
            raise _refused("the database cannot carry out a statement", error) from error
        raise BufferUnavailableError(
            f"the database at {redacted(uri)} cannot be used: {one_line(error)}",
            todo="start it, or correct buffer.uri (host, port, user, password, database name)",
        ) from error
    except UnicodeEncodeError as error:
        if "surrogates" not in error.reason:
            raise
        raise QueryError(
            "a text has half a surrogate pair, which PostgreSQL cannot hold",
            value=error.object[:200],
            todo="correct the text",
        ) from error
    except psycopg.DataError as error:
        raise _refused("the database rejected a value", error) from error
    except psycopg.errors.InsufficientPrivilege as error:
        raise QueryError(
            f"this account lacks the right: {one_line(error)}",
            todo="connect with an account that has it: `rft docs roles` lists the rights of rft_reader, rft_labeler, rft_worker and the owner",
        ) from error
    except (psycopg.errors.UndefinedTable, psycopg.errors.InvalidSchemaName) as error:
        raise QueryError(one_line(error)) from error
    except psycopg.DatabaseError as error:
        own = _OWN.get(error.sqlstate or "")
        if own is None:
            raise
        raise own(str(error.diag.message_primary), todo=error.diag.message_hint) from error


def _refused(what: str, error: Exception) -> QueryError:
    """Return the server's answer to a statement as an error of this package."""
    diagnostic = error.diag if isinstance(error, psycopg.Error) else None
    message = diagnostic.message_primary if diagnostic else None
    return QueryError(f"{what}: {message or one_line(error)}", todo=diagnostic.message_hint if diagnostic else None)


def one_line(error: Exception) -> str:
    """Return the text of an error, without its line breaks."""
    return " ".join(str(error).split())
