"""A DuckDB query as a stage: the batch is the table `batch`, what the query returns is what stays.

    - sql: "SELECT * FROM batch WHERE length(response) < 2000"
    - sql: "SELECT * REPLACE (reward - 0.1 * (num_response_tokens > 512)::INT AS reward) FROM batch"
    - sql: {query: "SELECT experience_id FROM batch WHERE reward > 0.2", reason: "reward is too low"}

Rules: the result has `experience_id`, each at most once and none that was not in the batch. Rows missing from it are
dropped. Its other columns replace those of the batch or are added for later stages; columns it leaves out stay as
they were. A query that fails, or names a wrong column, is refused when the chain is built: it is run on an empty table.

Sandboxed: one SELECT, no files, no network, no extensions, no settings, no Python variables. One thread and a fixed
seed before every query, so that the same batch gives the same answer even with `random()`.
"""

from __future__ import annotations

import contextlib

import duckdb
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import IDENTITY_COLUMNS, Operator, StageConfig, StageOutcome
from operators.sandbox import message, open_sandbox, registered
from rftdata.errors import ConfigError, OperatorError

MAX_QUERY_IN_REASON = 160


class Sql(Operator):
    """Runs `query` over the batch; see the module's text for the rules."""

    class Config(StageConfig):
        """`query`: one SELECT over `batch`. `reason`: what the verdict of a dropped row says (default: the query)."""

        query: str
        reason: str | None = None

    reads = None
    writes = None

    @classmethod
    def from_args(cls, args: object) -> Operator:
        return super().from_args({"query": args} if isinstance(args, str) else args)

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._connection: duckdb.DuckDBPyConnection | None = None

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        available = ", ".join(schema.names)
        try:
            # A connection of its own: the chain that was only checked keeps none open.
            with contextlib.closing(open_sandbox()) as connection:
                result = _run(connection, self.config.query, schema.empty_table()).schema
        except duckdb.Error as error:
            raise ConfigError(
                f"DuckDB refuses the query: {message(error)}",
                allowed=f"columns of batch: {available}",
                todo="correct the query",
            ) from error
        except OperatorError as error:
            raise ConfigError(error.what, value=error.value, allowed=error.allowed, todo=error.todo) from error
        _require_experience_id(result)
        for field in result:
            position = schema.get_field_index(field.name)
            if field.name in IDENTITY_COLUMNS:
                continue
            field = pa.field(field.name, _stored_type(field))
            schema = schema.append(field) if position < 0 else schema.set(position, field)
        return schema

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._connection is None:
            self._connection = open_sandbox()
        try:
            result = _run(self._connection, self.config.query, table)
        except duckdb.Error as error:
            raise OperatorError(
                f"DuckDB refuses the query: {message(error)}",
                allowed=f"columns of batch: {', '.join(table.column_names)}",
            ) from error
        _require_experience_id(result.schema)
        given = table["experience_id"].combine_chunks()
        returned = result["experience_id"].combine_chunks()
        _refuse_new_rows(given, returned)
        # Row of the result for each row of the batch; null where the query left it out.
        place = pc.index_in(given, value_set=returned)
        query = " ".join(self.config.query.split())
        if len(query) > MAX_QUERY_IN_REASON:
            query = query[: MAX_QUERY_IN_REASON - 1] + "…"
        reason = self.config.reason or f"not in the result of {query}"
        kept = pc.is_valid(place)
        _refuse_changed_identity(table, result, place, kept)
        columns = {
            field.name: pc.cast(result[field.name].combine_chunks(), _stored_type(field)).take(place)
            for field in result.schema
            if field.name not in IDENTITY_COLUMNS
        }
        return StageOutcome(StageOutcome.keep_where(kept, reason).reasons, columns)


def _run(connection: duckdb.DuckDBPyConnection, query: str, table: pa.Table) -> pa.Table:
    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise OperatorError(
            "the query is not one SELECT",
            value=query,
            allowed="a single SELECT (or FROM …) over batch",
            todo="to drop rows, leave them out with WHERE; to change a column use SELECT * REPLACE (…)",
        )
    with registered(connection, {"batch": table}):
        connection.execute("SELECT setseed(0.5)").fetchall()
        return connection.sql(query).to_arrow_table()


def _require_experience_id(schema: pa.Schema) -> None:
    names = schema.names
    if names.count("experience_id") != 1:
        raise ConfigError(
            "the query's result must have the column experience_id, so that its rows are known",
            value=", ".join(names),
            todo="add experience_id to the SELECT list",
        )
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ConfigError(
            "the query's result has a column twice",
            value=repeated[0],
            todo="use SELECT * REPLACE (… AS name) instead of SELECT *, … AS name",
        )


def _refuse_new_rows(given: pa.Array, returned: pa.Array) -> None:
    unknown = returned.filter(pc.invert(pc.fill_null(pc.is_in(returned, value_set=given), False)))
    unknown = pa.concat_arrays([unknown, returned.filter(pc.is_null(returned))]) if returned.null_count else unknown
    if len(unknown):
        raise OperatorError(
            "the query returned an experience_id that is not in the batch",
            value=unknown[0].as_py(),
            todo="a sql stage may keep, drop and change rows, not create them",
        )
    if pc.count_distinct(returned).as_py() != len(returned):
        counts = pc.value_counts(returned).to_pylist()
        twice = next(entry["values"] for entry in counts if entry["counts"] > 1)
        raise OperatorError(
            "the query returned an experience more than once",
            value=twice,
            todo="check its joins, or add QUALIFY row_number() OVER (PARTITION BY experience_id) = 1",
        )


def _refuse_changed_identity(table: pa.Table, result: pa.Table, place: pa.Array, kept: pa.Array) -> None:
    for name in sorted(IDENTITY_COLUMNS - {"experience_id"}):
        if name not in result.column_names:
            continue
        before = table[name].combine_chunks().filter(kept)
        after = result[name].combine_chunks().take(place.filter(kept))
        if not pc.cast(after, before.type, safe=False).equals(before):
            raise OperatorError(
                f"the query changes {name}, which says where a row belongs and is fixed",
                todo=f"leave {name} out of REPLACE, or give the new column another name",
            )


def _stored_type(field: pa.Field) -> pa.DataType:
    """The type a result column continues with: rewards and priorities are doubles whatever arithmetic made them."""
    return pa.float64() if field.name in ("reward", "priority") else field.type
