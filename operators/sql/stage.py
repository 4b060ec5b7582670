"""A DuckDB query as a stage: the batch is the table `batch`, and the rows that the query returns stay.

    - sql: "SELECT * FROM batch WHERE length(response) < 2000"
    - sql: "SELECT * REPLACE (reward - 0.1 * (num_response_tokens > 512)::INT AS reward) FROM batch"
    - sql: {query: "SELECT experience_id FROM batch WHERE reward > 0.2", reason: "reward is too low"}
    - sql:
        query: "SELECT b.* FROM batch b ANTI JOIN blocked USING (prompt)"
        tables: {blocked: blocked_prompts.parquet}

Rules: the result has `experience_id`, each at most once and only ids of the batch. Rows missing from it are dropped. Its other
columns replace those of the batch or are added for later stages; columns that it omits keep their values. A query that fails or
names a wrong column is refused when the chain is built, because the query then runs on an empty table.

Sandboxed: one SELECT, no files, no network, no extensions, no settings, no Python variables, 2 GB of memory. The same batch always gives
the same result: one thread, a fixed seed before every query, times in UTC, samples only with a seed, and no function that reads the time
or a setting.

Reference tables are read before the first batch and passed to the query as tables; it does not see the files. `allow` opens files (or
folders) and the network to the query itself. The pipeline's version includes the content of files, but not what the network returns, which
may change unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import Field, field_validator

from operators.base import IDENTITY_COLUMNS, Operator, StageConfig, StageContext, StageOutcome
from operators.sql import reference_files
from operators.sql.query_shape import column_names, refuse_changing, shape
from operators.sql.sandbox import check_sandbox, message, open_sandbox, quoted, registered
from rftdata.errors import ConfigError, OperatorError
from rftdata.user_code.time_limits import interruptible

MAX_QUERY_IN_REASON = 160
_OPEN_FILES = (
    "give it the file as a table (tables: {blocked: blocked.parquet}, then JOIN blocked), or open files to the query "
    "(allow: {files: [blocked.parquet]}; addresses: allow: {network: true})"
)


class Allow(StageConfig):
    """What the query may access in addition to its tables."""

    files: tuple[str, ...] = Field((), description="Files it may read, and folders in which it may read everything.")
    network: bool = Field(
        False, description="Whether it may read http(s) and s3 addresses; needs DuckDB's extension httpfs."
    )


class Sql(Operator, revision=1):
    """Runs `query` on the batch, by the rules above."""

    class Config(StageConfig):
        """The query, written alone or with its tables and permissions."""

        query: str = Field(description="One SELECT from `batch` and the reference tables.")
        reason: str | None = Field(None, description="Reason of dropped rows in their verdicts; the query by default.")
        tables: dict[str, str] = Field(
            default_factory=dict, description="Name of a reference table -> its file (.parquet, .csv or .jsonl)."
        )
        allow: Allow = Field(
            default_factory=Allow, description="Files and network that the query itself may access; none by default."
        )

        @field_validator("tables")
        @classmethod
        def _names(cls, tables: dict[str, str]) -> dict[str, str]:
            for name in tables:
                if not re.fullmatch(r"[A-Za-z_]\w*", name) or name.lower() == "batch":
                    raise ValueError(f"{name!r} cannot be the name of a reference table")
            return tables

    reads = None
    writes = None
    prepare_timeout_s = None  # reference tables may be large

    @classmethod
    def from_args(cls, args: object) -> Operator:
        return super().from_args({"query": args} if isinstance(args, str) else args)

    def __init__(self, config: StageConfig) -> None:
        super().__init__(config)
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._tables: dict[str, pa.Table] | None = None
        self._query: str = self.config.query

    def spec(self) -> dict[str, Any]:
        # A query without references keeps its plain specification, and so its version.
        spec = {key: value for key, value in super().spec().items() if key in ("query", "reason")}
        if self.config.tables:
            files = {
                name: reference_files.digest((self.base_dir / file).resolve())
                for name, file in self.config.tables.items()
            }
            spec["tables"] = files
        if self.config.allow != Allow():
            contents = {
                name: reference_files.digest((self.base_dir / name).resolve()) for name in self.config.allow.files
            }
            spec["allow"] = {**self.config.allow.model_dump(mode="json"), "files": contents}
        return spec

    def label_columns(self) -> frozenset[str]:
        return column_names(self.config.query)

    def validate_schema(self, schema: pa.Schema) -> pa.Schema:
        available = ", ".join(schema.names)
        tables = {name: reference_files.empty(file) for name, file in self._files().items()}
        try:
            with self._check() as connection:
                result = _run(connection, self.config.query, {"batch": schema.empty_table(), **tables}).schema
            columns = {*schema.names, *(name for table in tables.values() for name in table.column_names)}
            refuse_changing(self.config.query, columns)
        except duckdb.PermissionException as error:
            raise ConfigError(f"DuckDB refuses the query: {message(error)}", todo=_OPEN_FILES) from error
        except duckdb.Error as error:
            raise ConfigError(
                f"DuckDB refuses the query: {message(error)}",
                allowed="; ".join(
                    [
                        f"columns of batch: {available}",
                        *(f"of {n}: {', '.join(t.column_names)}" for n, t in tables.items()),
                    ]
                ),
                todo="correct the query",
            ) from error
        except OperatorError as error:
            raise ConfigError(error.what, value=error.value, allowed=error.allowed, todo=error.todo) from error
        _require_experience_id(result)
        self._narrow(schema, result, tables)
        for field in result:
            position = schema.get_field_index(field.name)
            if field.name in IDENTITY_COLUMNS:
                continue
            _require_number(field)
            field = pa.field(field.name, _stored_type(field))
            schema = schema.append(field) if position < 0 else schema.set(position, field)
        return schema

    def _narrow(self, schema: pa.Schema, result: pa.Schema, tables: Mapping[str, pa.Table]) -> None:
        """Run the query only on the columns it reads, and take only those it changes, if the result is certainly the same."""
        self._query, self.reads, self.writes = self.config.query, None, None
        query_shape = shape(self.config.query, schema, result)
        if query_shape is None:
            return
        names = ", ".join(quoted(name) for name in dict.fromkeys(("experience_id", *query_shape.changed)))
        narrow = f"SELECT {names} FROM ({self.config.query.strip().rstrip(';')}\n)"
        reads = query_shape.reads | IDENTITY_COLUMNS
        no_rows = pa.schema([field for field in schema if field.name in reads]).empty_table()
        try:
            with self._check() as connection:
                again = _run(connection, narrow, {"batch": no_rows, **tables})
        except (duckdb.Error, OperatorError):
            return
        if all(again.schema.field(name).type == result.field(name).type for name in again.column_names):
            self._query, self.reads = narrow, reads
            self.writes = frozenset(query_shape.changed) - IDENTITY_COLUMNS

    def prepare(self, context: StageContext) -> None:
        self._connection = self._open()
        self._tables = {name: reference_files.read(file) for name, file in self._files().items()}

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
        self._connection = self._tables = None

    def _check(self) -> duckdb.DuckDBPyConnection:
        """Open a connection for a check, which does not keep it."""
        return check_sandbox() if self.config.allow == Allow() else self._open()

    def _open(self) -> duckdb.DuckDBPyConnection:
        allow: Allow = self.config.allow
        missing = [name for name in allow.files if not (self.base_dir / name).exists()]
        if missing:
            raise ConfigError(
                "an allowed file or folder does not exist",
                value=missing[0],
                todo="paths are relative to the configuration file",
            )
        return open_sandbox([(self.base_dir / name).resolve() for name in allow.files], network=allow.network)

    def _files(self) -> dict[str, Path]:
        return {name: reference_files.resolve(self.base_dir, file) for name, file in self.config.tables.items()}

    def apply(self, table: pa.Table) -> StageOutcome:
        if self._connection is None or self._tables is None:
            self.prepare(StageContext())
        assert self._connection is not None and self._tables is not None
        try:
            result = _run(self._connection, self._query, {"batch": table, **self._tables})
        except duckdb.PermissionException as error:
            raise OperatorError(f"DuckDB refuses the query: {message(error)}", todo=_OPEN_FILES) from error
        except duckdb.Error as error:
            raise OperatorError(
                f"DuckDB refuses the query: {message(error)}",
                allowed=f"columns of batch: {', '.join(table.column_names)}",
            ) from error
        _require_experience_id(result.schema)
        ids = table["experience_id"].combine_chunks()
        returned = result["experience_id"].combine_chunks()
        _refuse_new_rows(ids, returned)
        # Row of the result for each row of the batch; null where the query omitted it.
        place = pc.index_in(ids, value_set=returned)
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


def _run(connection: duckdb.DuckDBPyConnection, query: str, tables: Mapping[str, pa.Table]) -> pa.Table:
    statements = connection.extract_statements(query)
    if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
        raise OperatorError(
            "the query is not one SELECT",
            value=query,
            allowed="a single SELECT (or FROM …) from batch",
            todo="to drop rows, leave them out with WHERE; to change a column use SELECT * REPLACE (…)",
        )
    with registered(connection, tables), interruptible(connection.interrupt):
        connection.execute("SELECT setseed(0.5)").fetchall()
        return connection.sql(query).to_arrow_table()


def _require_experience_id(schema: pa.Schema) -> None:
    names = schema.names
    if names.count("experience_id") != 1:
        raise ConfigError(
            "the query's result must have the column experience_id, which identifies its rows",
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


def _require_number(field: pa.Field) -> None:
    kinds = pa.types
    if field.name in ("reward", "priority") and not (
        kinds.is_integer(field.type)
        or kinds.is_floating(field.type)
        or kinds.is_decimal(field.type)
        or kinds.is_boolean(field.type)
        or kinds.is_null(field.type)
    ):
        raise ConfigError(f"the query makes {field.name} something other than a number", value=str(field.type))


def _refuse_new_rows(ids: pa.Array, returned: pa.Array) -> None:
    unknown = returned.filter(pc.invert(pc.fill_null(pc.is_in(returned, value_set=ids), False)))
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
                f"the query changes {name}, which identifies a row and must not change",
                todo=f"leave {name} out of REPLACE, or give the new column another name",
            )


def _stored_type(field: pa.Field) -> pa.DataType:
    """Return the type with which a result column continues; rewards and priorities become doubles."""
    return pa.float64() if field.name in ("reward", "priority") else field.type
