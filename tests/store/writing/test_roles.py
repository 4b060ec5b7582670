"""Roles of one policy: the column of an experience, wherever it is read, and the groups in which algorithms compare."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rftcore.algorithms import build_algorithm
from rftcore.algorithms.base import Signals
from rftcore.trainer.batches.drawn import ARRAYS, train_batch
from rftdata import Buffer, Group, Rollout, exchange
from rftdata.errors import RftError
from rftdata.experience import Sequence
from rftdata.experience_checks import validate
from tests.support.store_roles import publish_versions

TASK: dict[str, Any] = {"taskset": "games", "task_key": "one", "source": "import"}


def played(index: int, won: float) -> Rollout:
    """A game that x wins with 1 or loses with -1, an experience of one turn for each role."""
    sides = [
        Sequence("go", name, [1, 2, 3], 2, "stop", reward=reward, behavior_logprobs=[-1.0], turn_index=turn, role=name)
        for turn, (name, reward) in enumerate((("x", won), ("o", -won)))
    ]
    return Rollout(index, "ok", won, sides)


@pytest.fixture
def stored(buffer: Buffer) -> Buffer:
    publish_versions(buffer, 1)
    run = buffer.create_run(name="games", config={}, seed=1, steps=3, pipeline_version="none")
    plain = Sequence("go", "y", [1, 2, 3], 2, "stop", reward=0.0, behavior_logprobs=[-1.0])
    with buffer.writer(run) as writer:
        writer.insert(Group([played(0, 1.0), played(1, -1.0), Rollout(2, "ok", 0.0, [plain])], **TASK))
    return buffer


def test_a_role_is_read_wherever_an_experience_is(stored: Buffer, other: Buffer, tmp_path: Path) -> None:
    roles = ["x", "o", "x", "o", None]
    assert stored.sql("SELECT role FROM rft.v_experience ORDER BY experience_id")["role"].to_pylist() == roles
    found = stored.query("SELECT role, turn FROM turn ORDER BY experience_id").read_all()
    assert (found["role"].to_pylist(), found["turn"].to_pylist()) == (roles, [0, 1, 0, 1, 0])
    assert stored.scan(["response"], where="role = 'o'").read_all()["response"].to_pylist() == ["o", "o"]
    with pytest.raises(RftError, match="holds facts"):
        stored.sql("UPDATE rft.experience SET role = 'z'")
    path = tmp_path / "games.jsonl"
    exchange.export(stored, path)
    exchange.load(other, path)
    copied = other.sql("SELECT role FROM rft.v_experience ORDER BY rollout_index, turn_index")
    assert copied["role"].to_pylist() == roles


def test_a_fork_copies_roles(stored: Buffer) -> None:
    with stored.attempt("games"):
        pass
    stored.fork("games", name="fork", step=0, keep_rollouts=True)
    copied = stored.sql("SELECT role FROM rft.v_experience WHERE run = 'fork' ORDER BY experience_id")
    assert copied["role"].to_pylist() == ["x", "o", "x", "o", None]


def test_each_role_of_a_group_is_compared_with_itself(stored: Buffer) -> None:
    with stored.attempt("games") as attempt:
        drawn = attempt.draw(1, 1, ARRAYS, timeout_s=5)
        assert drawn is not None
        algorithm = build_algorithm("grpo")
        plan = algorithm.plan(train_batch(drawn, algorithm).for_algorithm(1), Signals())
    # x: 1 and -1, o: -1 and 1; the row without a role has no other to be compared with. A group for all would have a mean of rewards of 0.
    assert plan.advantages_N.tolist() == pytest.approx([0.7071, -0.7071, -0.7071, 0.7071, 0.0], abs=1e-4)
    assert plan.batch.group_B.tolist() == [0, 1, 0, 1, 2]


@pytest.mark.parametrize("role", ["", "a" * 101, "two\nlines", 3])
def test_the_name_of_a_role_is_checked(role: Any) -> None:
    wrong = Sequence("go", "x", [1, 2, 3], 2, "stop", reward=0.0, role=role)
    with pytest.raises(RftError, match="the name of a role is not valid"):
        validate((Group([Rollout(0, "ok", 0.0, [wrong])], **TASK),))
