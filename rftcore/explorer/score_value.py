"""The valid results of a workflow: a `Score` of finite numbers, whose roles have answered."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from rftcore.explorer.reward_value import described, is_number
from rftcore.workflows.task import Model, Score, Task
from rftdata.errors import RftError
from rftdata.limits import LARGEST_REWARD


def checked_score(score: object, task: Task, model: Model) -> Score:
    """Return the result of a workflow with plain numbers.

    Raises:
        RftError: it is no `Score`, its reward, a part or the reward of a role is no finite number, or a role has not answered.
    """
    of_task = f"for the task {task.task_key!r} of {task.taskset!r}"
    if not isinstance(score, Score):
        raise RftError(
            f"the workflow returned no score {of_task}",
            value=score,
            allowed="Score(reward) with a finite number",
            todo="return the result of score(turn, task) (awaited in an async workflow), or a Score",
        )
    checked = Score(
        _number(_counted(score.reward), "reward", of_task),
        {str(name): _number(value, f"part {name!r}", of_task) for name, value in _items(score.parts, "parts", of_task)},
        {
            role: _number(_counted(value), f"reward of the role {role!r}", of_task)
            for role, value in _items(score.by_role, "by_role", of_task)
        },
    )
    _refuse_unknown_roles(checked.by_role, model, of_task)
    return checked


def _refuse_unknown_roles(by_role: Mapping[str, float], model: Model, of_task: str) -> None:
    """Refuse rewards of roles that have no answer, while a role that has one has no reward.

    So a role whose first answer the rollout did not reach may have a reward.
    """
    answered = {turn.sequence.role for turn in model.turns}
    unknown = [role for role in by_role if role not in answered]
    if unknown and answered - by_role.keys() and model.stop_reason is None:
        raise RftError(
            f"the workflow returned a score {of_task} with the reward of a role that has not answered",
            value=unknown[0],
            allowed=", ".join(sorted(role for role in answered if role is not None)) or "none: no answer has a role",
            todo="correct the name in by_role, or name the role in model.chat(…, role=…)",
        )


def _items(value: object, name: str, of_task: str) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, Mapping):
        return value.items()
    raise _refused(value, name, of_task, "a mapping of names to finite numbers")


def _counted(reward: object) -> object:
    """Return a reward, a condition as 1 or 0."""
    return float(reward) if isinstance(reward, bool) else reward


def _number(value: object, name: str, of_task: str) -> float:
    if is_number(value) and abs(value) < LARGEST_REWARD:  # type: ignore[operator]  # any real number compares with a float
        return float(value)
    raise _refused(value, name, of_task, f"a finite number, between -{LARGEST_REWARD:g} and {LARGEST_REWARD:g}")


def _refused(value: object, name: str, of_task: str, allowed: str) -> RftError:
    return RftError(
        f"the workflow returned a score {of_task} whose {name} is {described(value).rstrip(',')}",
        allowed=allowed,
        todo="write float(…) of the condition" if isinstance(value, bool) else "correct the workflow",
    )
