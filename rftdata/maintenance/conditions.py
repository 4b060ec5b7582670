"""The choice of experiences by a condition over `rft.v_experience`, in SQL, and optionally by run."""

from __future__ import annotations

import psycopg
from psycopg.rows import tuple_row

from rftdata.errors import QueryError
from rftdata.postgres.database import Connection


def chosen(connection: Connection, where: str | None, run_ids: list[int] | None) -> list[tuple[int, int]]:
    """Return (group_id, experience_id) of every experience that meets a condition, in ascending order of both.

    Args:
        connection: in a read-only transaction, since a condition may call any function.
        where: over the columns of `rft.v_experience`; None for all.
        run_ids: limits the choice to these runs.

    Raises:
        QueryError: the database rejected the condition.
    """
    from rftdata.postgres.query_errors import query_error

    runs = "true" if run_ids is None else f"run_id IN ({', '.join(str(int(i)) for i in run_ids) or 'NULL'})"
    # On separate lines, so that a comment at the end of the condition ends there.
    text = (
        f"SELECT group_id, experience_id FROM rft.v_experience WHERE {runs} AND (\n{where or 'true'}\n) ORDER BY 1, 2"
    )
    try:
        # Binary, which allows only one statement, whatever the condition contains.
        cursor = connection.cursor(row_factory=tuple_row, binary=True)
        return [(int(group), int(experience)) for group, experience in cursor.execute(text.encode()).fetchall()]
    except psycopg.OperationalError:
        raise
    except psycopg.DatabaseError as error:
        refused = query_error(error)
        raise QueryError(
            f"the condition cannot be used: {refused.what}", value=where,
            allowed="SQL over the columns of rft.v_experience, such as: reward < 0.5 AND taskset = 'gsm8k'", todo=refused.todo,
        ) from error  # fmt: skip
