"""The public names of rftdata exist, and only rftdata runs named queries: everywhere else a database is only passed on. Pages have queries of their own,
sql/queries/studio*.sql."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rftdata
from rftdata.postgres.database import queries

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("rftcore", "operators", "examples", "scripts")
ASKS = {"fetch", "fetch_by_index", "run", "execute", "send"}
PAGES = ROOT / "rftcore" / "studio"
OF_PAGES = re.compile(r"^[\w.]*\.((fetch|fetch_by_index|run)(\('studio_\w+'.*)?|reading)$", re.DOTALL)


def uses(source: str) -> Iterator[tuple[int, str]]:
    """Yield (line, code) of every use of a database: a named query, or an attribute of a database."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", None)
            constants = (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))
            if name in ASKS and any(constant in queries() for constant in constants):
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Attribute):
            owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", "")
            if owner.lstrip("_") == "database":
                yield node.lineno, ast.unparse(node)


def test_every_public_name_is_there() -> None:
    """They are imported on first use, by names of modules that nothing else checks."""
    assert [name for name in rftdata.__all__ if getattr(rftdata, name).__name__ != name] == []


@pytest.mark.parametrize(
    "source",
    [
        'buffer.database.fetch("run_names")',
        'database.run("finish_run", run_id=1)',
        'fetch(connection, "run_names")',
        'execute(connection, "lock_run_names")',
        "with buffer.database.transaction() as connection: pass",
        "self._database.dedicated()",
    ],
)
def test_what_asks_a_database_itself_is_found(source: str) -> None:
    assert list(uses(source))


@pytest.mark.parametrize(
    "source", ["list_tasksets(buffer.database)", 'connection.execute("LOAD icu")', 'worker.set_state("run_names")']
)
def test_what_passes_a_database_on_or_asks_another_one_is_not(source: str) -> None:
    assert not list(uses(source))


def test_named_queries_are_used_inside_rftdata_only() -> None:
    files = [file for folder in FOLDERS for file in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 150
    found = [
        f"{file.relative_to(ROOT)}:{line}: {code}"
        for file in files
        for line, code in uses(file.read_text("utf-8"))
        if not (file.is_relative_to(PAGES) and OF_PAGES.match(code))
    ]
    assert not found, "\n".join(found)
