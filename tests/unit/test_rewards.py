"""Several rewards are one: every value counts, and every part keeps a name."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from rftcore.explorer.rewards import build_scorer
from rftcore.explorer.task import Score, Task, Turn
from rftdata.errors import RftError
from rftdata.groups import Sequence

TASK = Task(1, "sums", "one", "1+1=", "2")
TURN = Turn([], "2", "stop", Sequence("1+1=", "2", [1, 2], 1, "stop"))


def scored(folder: Path, names: list[str], **files: str) -> Score:
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return asyncio.run(build_scorer(names, folder)(TURN, TASK))


def test_values_of_functions_and_mappings_are_summed(tmp_path: Path) -> None:
    a = "def score(turn, task):\n    return {'length': 0.25, 'form': 0.5}"
    found = scored(tmp_path, ["exact_match", "./a.py:score"], a=a)
    assert found == Score(1.75, {"exact_match": 1.0, "length": 0.25, "form": 0.5})


def test_two_functions_of_one_name_both_count(tmp_path: Path) -> None:
    a, b = "def score(turn, task):\n    return 1", "async def score(turn, task):\n    return 2"
    found = scored(tmp_path, ["./a.py:score", "./b.py:score"], a=a, b=b)
    assert found == Score(3.0, {"score": 1.0, "./b.py:score": 2.0})


def test_two_parts_of_one_name_both_count(tmp_path: Path) -> None:
    a, b = "def f(turn, task):\n    return {'form': 1}", "def g(turn, task):\n    return {'form': 2}"
    found = scored(tmp_path, ["./a.py:f", "./b.py:g"], a=a, b=b)
    assert found == Score(3.0, {"form": 1.0, "./b.py:g.form": 2.0})


def test_no_reward_is_zero(tmp_path: Path) -> None:
    assert scored(tmp_path, []) == Score(0.0, {})


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_value_that_is_not_finite_is_refused(value: str, tmp_path: Path) -> None:
    with pytest.raises(RftError, match="not finite"):
        scored(tmp_path, ["./a.py:score"], a=f"def score(turn, task):\n    return float('{value}')")
