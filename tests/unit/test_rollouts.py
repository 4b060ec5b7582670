"""Where a failure becomes data: what a user's code raises is an outcome, what ends the run is not."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rftcore.explorer.engines.base import Decoding
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.task import Model, Score, Scorer, Task
from rftdata.claims import ClaimedGroup
from rftdata.errors import EngineStoppedError, ModelError
from rftdata.groups import Group, Rollout, successes_and_trials
from rftdata.selectors import Screening

TASK = Task(1, "sums", "one", "1+1=", "2")


def tried(workflow: Any, *, timeout_s: float = 10.0, slots: int = 8, count: int = 1) -> list[Rollout]:
    """Rollouts of a workflow that needs neither engine nor reward."""

    async def run() -> list[Rollout]:
        async def no_score(*_: object) -> Score:
            raise AssertionError("not asked for")

        runner = RolloutRunner(None, workflow, {}, no_score, timeout_s, "explorer", asyncio.Semaphore(slots))  # type: ignore[arg-type]
        return await asyncio.gather(*(runner.rollout(TASK, index, Decoding()) for index in range(count)))

    return asyncio.run(run())


def raising(error: BaseException) -> Any:
    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        raise error

    return workflow


async def slow(task: Task, model: Model, score: Scorer) -> Score:
    await asyncio.sleep(0.2)
    return Score(1.0)


def test_what_a_workflow_raises_is_the_rollouts_outcome() -> None:
    (rollout,) = tried(raising(KeyError("answer")))
    assert (rollout.outcome, rollout.reward, rollout.error) == ("failed", None, "KeyError: 'answer'")


def test_a_rollout_that_takes_too_long_is_timed_out() -> None:
    (rollout,) = tried(slow, timeout_s=0.05)
    assert rollout.outcome == "timeout" and "explorer.rollout_timeout_s = 0.05 s" in str(rollout.error)


def test_a_timeout_of_the_users_own_is_not_reported_as_ours() -> None:
    (rollout,) = tried(raising(TimeoutError("the sandbox did not answer")))
    assert (rollout.outcome, rollout.error) == ("failed", "TimeoutError: the sandbox did not answer")


def test_time_counts_from_the_moment_a_rollout_begins() -> None:
    assert {rollout.outcome for rollout in tried(slow, timeout_s=0.5, slots=2, count=8)} == {"ok"}


@pytest.mark.parametrize(
    "error",
    [
        EngineStoppedError("out of memory"),
        ModelError("no such model"),
        ExceptionGroup("two requests at once", [ValueError("cut short"), EngineStoppedError("out of memory")]),
    ],
)
def test_what_ends_the_run_is_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        tried(raising(error))


def test_an_engine_that_was_stopped_says_so_by_its_class(tmp_path: Path) -> None:
    from rftcore.explorer.engines.base import EngineConfig
    from rftcore.explorer.engines.transformers_engine import TransformersEngine
    from tests.models import make_tiny_model

    class Exploding(TransformersEngine):
        def _step(self) -> Any:
            raise RuntimeError("CUDA out of memory")

    engine = Exploding(make_tiny_model(tmp_path), EngineConfig(dtype="float32"))
    prompt = engine.tokenizer.encode("1+1=")
    for _ in range(2):  # the request that met it, and every later one
        with pytest.raises(EngineStoppedError, match="CUDA out of memory"):
            asyncio.run(engine.generate(prompt, Decoding()))
    engine.close()


def screened(first: list[float | None], rule: Screening, size: int = 6) -> tuple[Group, list[int]]:
    """A group whose first rollouts end so (None fails); the others succeed. The group, and the rollouts that were begun."""
    begun: list[int] = []

    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        index = len(begun)
        begun.append(index)
        await asyncio.sleep(0)
        reward = first[index] if index < len(first) else 1.0
        if reward is None:
            raise KeyError("answer")
        return Score(reward)

    async def run() -> Group:
        async def no_score(*_: object) -> Score:
            raise AssertionError("not asked for")

        runner = RolloutRunner(None, workflow, {}, no_score, 10.0, "explorer", asyncio.Semaphore(8))  # type: ignore[arg-type]
        claimed = ClaimedGroup(1, 1, 0, 0, size, 1, "sums", "one", {"prompt": "1+1=", "answer": "2"})
        return await runner.group(claimed, Decoding(), rule)

    return asyncio.run(run()), begun


@pytest.mark.parametrize(("reward", "side"), [(0.0, "not above 0"), (1.0, "not below 1")])
def test_a_group_whose_first_rollouts_all_end_alike_is_given_up(reward: float, side: str) -> None:
    group, begun = screened([reward] * 3, Screening(3, 0.0, 1.0))
    assert len(begun) == 3, "no more rollouts were run"
    assert [(r.index, r.outcome) for r in group.rollouts] == [(i, "ok" if i < 3 else "cancelled") for i in range(6)]
    assert {r.error for r in group.rollouts[3:]} == {
        f"screened out: {3 * reward:g} of 3 first rollouts succeeded, a pass rate {side}"
    }
    assert successes_and_trials(group) == (3 * reward, 3), "the trials that were made count"


@pytest.mark.parametrize("first", [[0.0, 1.0, 0.0], [None, None, None], [None, 1.0, 0.5]])
def test_a_group_that_is_neither_solved_nor_hopeless_goes_on(first: list[float | None]) -> None:
    group, begun = screened(first, Screening(3, 0.0, 1.0))
    assert len(begun) == 6 and [r.outcome for r in group.rollouts[3:]] == ["ok"] * 3
    assert [r.index for r in group.rollouts] == list(range(6))


def test_the_bounds_of_the_pass_rate_are_excluded() -> None:
    assert Screening(4, 0.25, 0.75).refusal(1, 4) and Screening(4, 0.25, 0.75).refusal(3, 4)
    assert Screening(4, 0.25, 0.75).refusal(2, 4) is None and Screening(4, 0.2, 0.8).refusal(1, 4) is None
