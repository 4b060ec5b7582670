"""Questions about a database, which the policy answers with queries that DuckDB runs.

Each answer is one SELECT. Its result, or its error, is the next observation. A query whose rows are those of the right query, as a
multiset, ends the episode. Names of columns and the order of rows do not count.

The database is in memory, and a query can neither change it nor leave it: only a single SELECT is run, in a read-only transaction, without access
to files and extensions, with the configuration locked, one thread and limits on time, memory and rows.
"""

from __future__ import annotations

import re
import resource
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

import duckdb

from rftcore.environments.base import Environment, Observation, Step
from rftcore.environments.sql_questions import LEVELS, Question, question
from rftdata.errors import ConfigError

_LOCKED = {
    "threads": 1,
    "enable_external_access": "false",
    "autoinstall_known_extensions": "false",
    "autoload_known_extensions": "false",
    "max_temp_directory_size": "0B",
}
_MAX_COMPARED = 10_000
_MAX_CELL = 80
_SPARE_MIB = 256  # for the result in Python
_FENCE = re.compile(r"```(?:sql)?\s*(.*?)(?:```|\Z)", re.DOTALL | re.IGNORECASE)


class Sql(Environment):
    """A database and a question from the seed, or from the task.

    A task has a database of its own if its metadata contains `database`, the statements that create it; its prompt is then the question
    and its answer the right query. `seed` in the metadata takes the place of the group's seed, so that a task is always the same question.

    Args:
        levels: difficulty of generated questions: 1 one table, 2 groups, 3 both tables.
        people: number of rows of the first table, 2 to 30.
        max_queries: number of answers.
        retry_factor: by which a later right answer counts less than the one before, at each query.
        max_rows: of a result that are shown.
        timeout_s: limit of a query, in seconds.
        memory_mib: limit of a query.
    """

    deterministic = True

    def __init__(
        self,
        levels: list[int] | None = None,
        people: int = 12,
        max_queries: int = 5,
        retry_factor: float = 1.0,
        max_rows: int = 10,
        timeout_s: float = 5.0,
        memory_mib: int = 256,
    ) -> None:
        self.levels = tuple(LEVELS if levels is None else levels)
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise ConfigError("environment_args: levels of sql", value=levels, allowed="some of 1, 2 and 3")
        if not 2 <= people <= 30 or max_queries < 1 or max_rows < 1 or timeout_s <= 0 or not 0 < retry_factor <= 1:
            raise ConfigError(
                "environment_args of sql",
                allowed="people 2 to 30, max_queries and max_rows of 1 or more, timeout_s above 0, retry_factor above 0 and up to 1",
            )
        self.people, self.max_queries, self.retry_factor = people, max_queries, retry_factor
        self.max_rows, self.timeout_s, self.memory_mib = max_rows, timeout_s, memory_mib
        self._queries: list[str] = []
        self._duckdb: Any = None

    def reset(self, task: Any, seed: int) -> Observation:
        metadata = getattr(task, "metadata", {})
        if "database" in metadata:
            database = str(metadata["database"])
            asked = Question((database,), database, str(task.prompt), str(task.answer))
        else:
            asked = question(int(metadata.get("seed", seed)), self.levels, self.people)
        self._open(asked.database)
        wanted = self._run(asked.query)
        if isinstance(wanted, str):
            raise ConfigError(
                f"the right query of task {task.task_key!r} of {task.taskset!r} fails: {wanted}", value=asked.query
            )
        self._wanted = _multiset(wanted[1])
        return Observation(f"{asked.tables}\n\n{asked.text}\nAnswer with one SQL query.", state="")

    def step(self, action: Any, role: str = "agent") -> Step:
        query = _query_in(str(action))
        self._queries.append(query)
        result = self._run(query)
        is_right = not isinstance(result, str) and _multiset(result[1]) == self._wanted
        left = self.max_queries - len(self._queries)
        if is_right:
            text = "That is right."
        else:
            shown = f"Error: {result}" if isinstance(result, str) else self._table(*result)
            text = f"{shown}\nThat is not the answer." + (f" You have {left} more." if left else "")
        reward = self.retry_factor ** (len(self._queries) - 1) if is_right else 0.0
        return Step(
            Observation(text, state="\n".join(self._queries)),
            reward,
            terminated=is_right or left == 0,
            info={"error": result} if isinstance(result, str) else {},
        )

    def close(self) -> None:
        if self._duckdb is not None:
            self._duckdb.close()

    def _open(self, statements: tuple[str, ...]) -> None:
        self._duckdb = duckdb.connect(":memory:")
        for statement in statements:
            self._duckdb.execute(statement)
        for name, value in {**_LOCKED, "memory_limit": f"{self.memory_mib}MiB", "lock_configuration": "true"}.items():
            self._duckdb.execute(f"SET {name} = '{value}'")

    def _run(self, query: str) -> tuple[list[str], list[tuple[Any, ...]]] | str:
        """Return columns and rows of a query, or its error."""
        try:
            statements = self._duckdb.extract_statements(query)
        except duckdb.Error as error:
            return _first_line(error)
        if len(statements) != 1 or statements[0].type != duckdb.StatementType.SELECT:
            return "only one SELECT is allowed"
        timer = threading.Timer(self.timeout_s, self._duckdb.interrupt)
        self._duckdb.execute("BEGIN TRANSACTION READ ONLY")
        timer.start()
        try:
            with _address_space(self.memory_mib + _SPARE_MIB):
                found = self._duckdb.execute(statements[0])
                rows = found.fetchmany(_MAX_COMPARED + 1)
            return [column[0] for column in found.description], rows
        except MemoryError:
            return f"the query needs more than {self.memory_mib} MiB of memory"
        except duckdb.InterruptException:
            return f"the query took longer than {self.timeout_s:g} s"
        except duckdb.Error as error:
            return _first_line(error)
        finally:
            timer.cancel()
            timer.join()
            self._duckdb.execute("ROLLBACK")

    def _table(self, columns: list[str], rows: list[tuple[Any, ...]]) -> str:
        lines = [" | ".join(columns), *(" | ".join(map(_cell, row)) for row in rows[: self.max_rows])]
        if len(rows) > self.max_rows:
            more = f"more than {_MAX_COMPARED:,}" if len(rows) > _MAX_COMPARED else f"{len(rows):,}"
            lines.append(f"({more} rows)")
        return "\n".join(lines)


@contextmanager
def _address_space(more_mib: int) -> Iterator[None]:
    """Let this process grow by so much at most. DuckDB's own limit does not count the values that functions make, such as `repeat('x', 1000000000)`."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    num_pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = num_pages * resource.getpagesize() + (more_mib << 20)
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _query_in(answer: str) -> str:
    fenced = _FENCE.findall(answer)
    return (fenced[-1] if fenced else answer).strip()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:300]


def _cell(value: object) -> str:
    text = "NULL" if value is None else str(value)
    return text if len(text) <= _MAX_CELL else text[: _MAX_CELL - 1] + "…"


def _multiset(rows: list[tuple[Any, ...]]) -> Counter[tuple[Any, ...]]:
    return Counter(tuple(map(_comparable, row)) for row in rows)


def _comparable(value: Any) -> Any:
    """Return a value so that equal numbers of different types are equal, and every value can be counted."""
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int | float | Decimal):
        return round(float(value), 6)
    return str(value)
