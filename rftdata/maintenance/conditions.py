"""Choice of experiences by a condition over `rft.v_experience`, in SQL, and optionally by run."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from rftdata.postgres.database import Connection
from rftdata.postgres.written_text import check_condition, condition_error, in_parentheses


def chosen(
    connection: Connection, where: str, run_ids: Sequence[int] | None, among: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """Return (group_id, experience_id) of every experience that meets a condition, in ascending order of both.

    Args:
        connection: of `Database.reading`, since a condition may call any function.
        where: over the columns of `rft.v_experience`.
        run_ids: limits the choice to these runs.
        among: limits the choice to these experiences.

    Raises:
        QueryError: the text is not one condition, or the database rejected it.
    """
    check_condition(connection, where)
    limits = [("run_id", run_ids), ("experience_id", among)]
    conditions = [
        sql.SQL("{} = ANY ({}::bigint[])").format(sql.Identifier(name), sql.Literal(list(ids)))
        for name, ids in limits
        if ids is not None
    ]
    query = sql.SQL("SELECT group_id, experience_id FROM rft.v_experience WHERE {} ORDER BY 1, 2").format(
        sql.SQL(" AND ").join([*conditions, in_parentheses(where)])
    )
    try:
        cursor = connection.cursor(row_factory=tuple_row, binary=True)
        rows = cursor.execute(query.as_bytes(connection)).fetchall()
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:  # of some row, such as a division by zero
        raise condition_error(error, where) from error
    return [(int(group), int(experience)) for group, experience in rows]
