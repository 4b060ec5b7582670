"""Purge of tasks that have no experience, such as those of an evaluation. Other tasks are purged with their experiences."""

from __future__ import annotations

from collections.abc import Sequence

import psycopg
from psycopg import sql
from psycopg.rows import tuple_row

from rftdata.buffer import Buffer
from rftdata.postgres.database import queries
from rftdata.postgres.written_text import check_condition, condition_error, in_parentheses


def unanswered_tasks(buffer: Buffer, where: str) -> list[int]:
    """Return the tasks without an experience that meet a condition and are not purged yet.

    Args:
        where: over the columns of `rft.v_experience`. A task without an experience has only taskset, task_key, prompt and answer, and does not
            meet a condition that names others.

    Raises:
        QueryError: the text is not one condition, or the database rejected it.
    """
    tasks = queries()["unanswered_tasks"].rstrip().removesuffix(";")
    query = sql.SQL("SELECT task_id FROM ({}) v_experience WHERE {} ORDER BY 1").format(
        sql.SQL(tasks), in_parentheses(where)
    )
    with buffer.database.reading() as connection:
        check_condition(connection, where)
        try:
            cursor = connection.cursor(row_factory=tuple_row, binary=True)
            rows = cursor.execute(query.as_bytes(connection)).fetchall()
        except (psycopg.errors.UndefinedColumn, psycopg.errors.UndefinedTable):
            return []
        except psycopg.OperationalError:
            raise
        except psycopg.DatabaseError as error:
            raise condition_error(error, where) from error
    return [int(task_id) for (task_id,) in rows]


def purge_unanswered(buffer: Buffer, purge_id: int, task_ids: Sequence[int]) -> None:
    """Remove the texts of tasks, and of the answers to them in evaluations; abandon their groups, so that no explorer answers them later."""
    buffer.database.fetch("purge_tasks", task_ids=list(task_ids), purge_id=purge_id)
