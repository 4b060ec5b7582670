"""Whatever a caller passes to a method of `Buffer`: it works, or the error says what is wrong with which argument."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest

import rftdata
from rftdata import Buffer, RftError
from rftdata.errors import QueryError
from tests.support.store_roles import own_group

# Arguments that work. Each is replaced by every wrong value, one at a time.
CALLS: dict[str, dict[str, Any]] = {
    "sql": {"query": "SELECT 1 AS a", "parameters": None},
    "query": {"text": "SELECT 1 AS a", "run": None, "limit_bytes": None},
    "scan": {"columns": ["reward"], "where": None, "run": None, "share": (0, 1)},
    "writer": {"run": "r", "max_rows": 10, "max_bytes": 1000, "linger_ms": 0.0},
    "attempt": {"run": "r", "lease_s": 30.0, "sampling": None, "max_refill": 0, "tasksets": ()},
    "join_attempt": {"run": "r", "attempt_id": 1, "max_refill": 0},
    "read_arrays": {"experience_ids": [1], "columns": ["token_ids"], "purged": "refuse"},
    "arrays": {"experience_ids": [1], "name": "token_ids"},
    "create_run": {
        "name": "n",
        "config": {},
        "seed": 1,
        "steps": 1,
        "pipeline_version": "p",
        "mode": "both",
        "selected": None,
        "parent": None,
    },
    "find_run": {"name_or_id": "r"},
    "runs": {"name": None, "imported": True, "at_work": False},
    "rewind": {"run": "r", "step": 0, "keep_rollouts": False},
    "fork": {
        "run": "r",
        "name": "f",
        "step": 0,
        "keep_rollouts": False,
        "config": None,
        "steps": None,
        "pipeline_version": None,
    },
}
WRONG = [None, -1, 1.5, "x", b"x", [1.5], {"a": object()}, object(), "\x00", 2**70, float("nan"), True]


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    buffer.create_run(name="r", config={}, seed=1, steps=3, pipeline_version="none")
    with buffer.writer("r") as writer:
        writer.insert(own_group())
    return buffer


@pytest.mark.parametrize("method", CALLS)
def test_a_wrong_argument_is_a_clear_error(stored: Buffer, method: str) -> None:
    for name in CALLS[method]:
        for value in WRONG:
            with contextlib.suppress(RftError):  # others are an error here: of the driver, of Python, …
                result = getattr(stored, method)(**{**CALLS[method], name: value})
                if hasattr(result, "read_all"):
                    result.read_all()
                if hasattr(result, "close"):
                    result.close()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda b: b.sql(5), r"the statement is not valid: it is of type int \(got 5\); allowed: a text"),
        (lambda b: b.sql("SELECT 1", "x"), "the parameters of the statement .* a list, a dictionary or None"),
        (lambda b: b.scan("reward"), "columns is not valid: it is of type str .* a sequence of texts, such as a list"),
        (lambda b: b.scan(["reward"], share=3), "share is not valid"),
        (lambda b: b.read_arrays([1, 1.5], ["token_ids"]), r"a value of experience_ids is not valid \(got 1.5"),
        (lambda b: b.read_arrays([1], []), "no column is named"),
        (lambda b: b.writer("r", linger_ms="1"), "linger_ms is not valid .* a number from 0"),
        (lambda b: b.attempt("r", lease_s=None), "lease_s is not valid"),
        (lambda b: b.attempt("r", sampling={"order": "fifo"}), "sampling is not valid: it is of type dict .* a SamplingConfig"),
        (lambda b: b.create_run(name="n", config={"a": b"x"}, seed=1, steps=1, pipeline_version="p"), "at a, is not valid"),
        (lambda b: b.create_run(name="n", config={}, seed=1, steps=1, pipeline_version="p", parent="r"), "parent .* a Run"),
        (lambda b: b.runs(imported="no"), "imported is not valid: it is of type str .* True or False"),
        (lambda b: b.rewind("r", "1"), "step is not valid"),
    ],
)  # fmt: skip
def test_the_error_names_argument_value_and_what_is_allowed(stored: Buffer, call: Any, message: str) -> None:
    with pytest.raises(QueryError, match=message):
        call(stored)


@pytest.mark.parametrize("uri", [None, 5, b"x", Path("x"), "\x00"])
def test_a_place_of_a_buffer_is_a_text(uri: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for opens in (rftdata.open, rftdata.create):
        with pytest.raises(QueryError, match="the place of a buffer"):
            opens(uri)
    assert list(tmp_path.iterdir()) == []
