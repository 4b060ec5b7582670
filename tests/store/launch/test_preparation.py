"""A run that goes back, and a fork: mistakes that only preparing finds leave neither a fork nor a run without its later steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.config.run import parse_config
from rftcore.launch.preparation import GoBack, prepare_at_step, prepare_run
from rftcore.resolved import ResolvedRun
from rftdata import Buffer
from rftdata.errors import RftError
from rftdata.run import Run

pytestmark = pytest.mark.usefixtures("beside_a_model")

FORK = GoBack(step=0, fork="other")


def resolved(**changes: Any) -> ResolvedRun:
    raw = {
        "run": {"name": "sums"},
        "model": {"path": "./model"},
        "tasks": [{"name": "sums", "source": "sums.jsonl"}],
        "algorithm": {"name": "grpo", "group_size": 2},
        "explorer": {"engine": "transformers", "reward": "exact_match", "max_tokens": 8},
        "trainer": {"batch_groups": 1},
        "steps": 4,
    }
    return ResolvedRun(parse_config({**raw, **changes}, Path(), "test"))


@pytest.fixture
def run(buffer: Buffer) -> Run:
    Path("sums.jsonl").write_text('{"question": "1+1=", "answer": "2"}\n')
    run = prepare_run(resolved(), buffer)
    buffer.attempt(run).close()
    return run


def names(buffer: Buffer) -> list[str]:
    return [run.name for run in buffer.runs()]


@pytest.mark.parametrize(
    "changes",
    [
        {"sampling": {"priority": {"formula": "reward_of_nothing"}, "order": "prioritized"}},
        {"tasks": [{"name": "sums", "source": "sums.jsonl"}, {"name": "more", "source": "absent.jsonl"}]},
        {"pipelines": {"task": [{"./absent.py:Stage": {}}]}},
    ],
    ids=["formula", "tasks", "stage"],
)
@pytest.mark.parametrize("go_back", [FORK, GoBack(step=0)], ids=["fork", "rewind"])
def test_a_mistake_that_preparing_finds_stores_nothing(
    buffer: Buffer, run: Run, go_back: GoBack, changes: dict[str, Any]
) -> None:
    before, stored = run.refreshed(), list[str]()
    with pytest.raises(RftError):
        prepare_at_step(resolved(**changes), buffer, run, go_back, before_storing=lambda: stored.append("begins"))
    assert names(buffer) == ["sums"] and not stored
    assert run.refreshed() == before


def test_a_fork_is_stored_once_everything_is_in_order(buffer: Buffer, run: Run) -> None:
    of_fork, fork = prepare_at_step(resolved(steps=6), buffer, run, FORK)
    assert (of_fork.config.run.name, fork.name, fork.planned_steps) == ("other", "other", 6)
    assert {*names(buffer)} == {"sums", "other"} and run.refreshed().planned_steps == 4
