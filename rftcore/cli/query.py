"""`rft query`: DuckDB on the buffer, including token arrays."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import TYPE_CHECKING, Annotated

import typer

from rftcore.cli.session import BufferOption, JsonOption, opened
from rftdata.errors import QueryError

if TYPE_CHECKING:
    import pyarrow as pa

    from rftdata.buffer import Buffer

# Token arrays by the type of their elements.
ARRAYS = {"token_ids": "int32", "loss_mask": "uint8", "behavior_logprobs": "float32"}
INPUTS = {"token_rewards": "float32", "teacher_logprobs": "float32", "step_reward": "float32", "state_hash": "int64"}
_ARROW_TYPES = {
    "bigint": "int64",
    "integer": "int32",
    "double precision": "float64",
    "boolean": "bool",
}


def query(
    text: Annotated[str, typer.Argument(metavar="QUERY", help="DuckDB SQL.")],
    buffer: BufferOption = None,
    as_json: JsonOption = False,
    run: Annotated[
        str | None, typer.Option("--run", metavar="RUN", help="Load only the experiences of this run.")
    ] = None,
) -> None:
    """Query experiences with their token arrays in DuckDB: `rft query "select avg(len(token_ids)) from experience"`.

    This is DuckDB, read-only, for token arrays and analysis. `rft sql` is PostgreSQL, live, for rows and changes.

    `experience` has the columns of rft.v_experience and token_ids, loss_mask, behavior_logprobs, and if a query names them
    token_rewards, teacher_logprobs, step_reward and state_hash (lists, NULL where a workflow recorded none). All other tables and
    views of schema rft have their own names (run, draw, verdict, task, evaluation, v_group, …). Arrays of purged experiences are
    NULL. Only what the query names is loaded:
    `rft query "select avg(list_sum(behavior_logprobs)) from experience where reward = 1"`.
    """
    from rftcore.cli.output import print_rows
    from rftdata.buffer import unique_names

    with opened(buffer, "rft query") as found:
        table = run_query(found, text, found.find_run(run).run_id if run else None)
    columns = dict(zip(unique_names(table.column_names), table.column_names, strict=True))
    print_rows(table.rename_columns(list(columns)).to_pylist(), columns, as_json=as_json)


def run_query(buffer: Buffer, text: str, run_id: int | None = None) -> pa.Table:
    """Return the result of a DuckDB query as an Arrow table.

    Raises:
        QueryError: DuckDB rejected it, or it is not a single statement that returns rows.
    """
    import duckdb

    from rftdata.inspection import tables

    with duckdb.connect() as connection:
        try:
            if len(connection.extract_statements(text)) != 1:
                raise QueryError(
                    "rft query runs one statement at a time",
                    value=text,
                    todo="join them with WITH, or run it again for each",
                )
            connection.execute("CREATE SCHEMA rft")
            known = tables(buffer.database)
            for name in _named(text, known):
                if name == "experience":
                    rows = _experiences(buffer, text, known, run_id)
                else:
                    rows = _rows(buffer, name, known)
                connection.register(name, rows)
                connection.execute(f'CREATE VIEW rft."{name}" AS FROM memory.main."{name}"')
            result = connection.sql(text)
            if result is None:
                raise QueryError(
                    "the statement returns no rows",
                    value=text,
                    todo="write a SELECT; use `rft sql` to change rewards and tasks",
                )
            return result.to_arrow_table()
        except duckdb.Error as error:
            message = " ".join(str(error).split("\n\nLINE")[0].split())
            names = "tables are those of schema rft: experience, run, draw, verdict, task, evaluation, …"
            raise QueryError(
                f"DuckDB rejected the query: {message}",
                todo=f'{names}; `rft query "describe experience"` lists columns',
            ) from error


def _named(text: str, known: Collection[str]) -> list[str]:
    """Return the tables that the query may name. A word that is also a column only causes an unnecessary load."""
    words = {word.lower() for word in re.findall(r"\w+", text)}
    return sorted(words & set(known))


def _rows(buffer: Buffer, name: str, known: dict[str, dict[str, str]], where: str = "") -> pa.Table:
    # JSON is passed as text (DuckDB reads it with its json functions), because Arrow has no type for arbitrary JSON.
    columns = ", ".join(
        f'"{column}"::text' if kind == "jsonb" else f'"{column}"' for column, kind in known[name].items()
    )
    rows = buffer.sql(f'SELECT {columns} FROM rft."{name}"{where}')
    # A column without values has no type in Arrow.
    for i, (column, kind) in enumerate(known[name].items()):
        if str(rows.schema.field(i).type) == "null":
            rows = rows.set_column(i, column, rows.column(i).cast(_ARROW_TYPES.get(kind, "string")))
    return rows


def _experiences(buffer: Buffer, text: str, known: dict[str, dict[str, str]], run_id: int | None) -> pa.Table:
    import pyarrow as pa

    where = "" if run_id is None else f" WHERE run_id = {int(run_id)}"
    rows = _rows(buffer, "v_experience", known, where)
    columns = _wanted_arrays(text)
    arrays = (
        buffer.read_arrays(rows["experience_id"].to_pylist(), columns, purged="null")
        if columns and rows.num_rows
        else None
    )
    for column in columns:
        rows = rows.append_column(column, arrays[column] if arrays else _no_arrays(column))
    for column in (name for name in INPUTS if _is_named(text, name)):
        values = buffer.arrays(rows["experience_id"].to_pylist(), column)
        rows = rows.append_column(column, pa.array(values, pa.list_(pa.type_for_alias(INPUTS[column]))))
    return rows


def _no_arrays(column: str) -> pa.Array:
    import pyarrow as pa

    return pa.array([], pa.list_(pa.type_for_alias(ARRAYS[column])))


def _wanted_arrays(text: str) -> list[str]:
    """Return the array columns that the query may read: those it names, or all if it selects everything."""
    star = re.search(r"(?<!count\()\*", re.sub(r"\s", "", text), re.IGNORECASE)
    everything = star or not re.search(r"\bselect\b", text, re.IGNORECASE)
    return [name for name in ARRAYS if everything or _is_named(text, name)]


def _is_named(text: str, column: str) -> bool:
    return re.search(rf"\b{column}\b", text, re.IGNORECASE) is not None
