"""An error of a user's code becomes an outcome, unless it ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rftcore.engines.base import Decoding, Generation
from rftcore.explorer import rollouts
from rftcore.explorer.plain_workflow import PlainModel
from rftcore.explorer.rollout_slots import RolloutSlots
from rftcore.explorer.rollouts import RolloutRunner
from rftcore.explorer.workflow_loop import WorkflowLoop
from rftcore.failures import InfrastructureError
from rftcore.workflows.limits import NO_LIMITS, LimitReachedError, Limits
from rftcore.workflows.task import Model, Score, Scorer, Task, Turn
from rftdata.errors import EngineStoppedError, ModelError
from rftdata.experience import Group, Rollout, successes_and_trials
from rftdata.planning.claims import ClaimedGroup
from rftdata.selectors import Screening
from rftdata.user_code.blocked_process import read_report
from tests.support.chat_tokenizers import chat_tokenizer
from tests.support.models import make_character_tokenizer
from tests.support.waiting import PATIENCE_S, wait_until

TASK = Task(1, "sums", "one", "1+1=", "2")


async def no_score(*_: object) -> Score:
    raise AssertionError("not asked for")


class Writer:
    """The part of an engine that a workflow without samples needs."""

    tokenizer = make_character_tokenizer()


def runner_of(
    workflow: Any,
    *,
    timeout_s: float = PATIENCE_S,
    slots: int = 8,
    engine: Any = None,
    scorer: Any = no_score,
    **options: Any,
) -> RolloutRunner:
    """A runner of a workflow that, by default, needs neither engine nor reward."""
    return RolloutRunner(
        engine=engine,
        workflow=workflow,
        workflow_args={},
        scorer=scorer,
        timeout_s=timeout_s,
        source="explorer",
        slots=RolloutSlots(slots, slots),
        **options,
    )


def tried(
    workflow: Any,
    *,
    timeout_s: float = PATIENCE_S,
    count: int = 1,
    engine: Any = None,
    scorer: Any = no_score,
) -> list[Rollout]:
    """Rollouts of a workflow, by default of one that needs neither engine nor reward."""

    async def run() -> list[Rollout]:
        runner = runner_of(workflow, timeout_s=timeout_s, engine=engine, scorer=scorer)
        return await asyncio.gather(*(runner.rollout(TASK, index, Decoding()) for index in range(count)))

    return asyncio.run(run())


def raising(error: BaseException) -> Any:
    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        raise error

    return workflow


async def slow(task: Task, model: Model, score: Scorer) -> Score:
    await asyncio.sleep(0.2)
    return Score(1.0)


async def endless(task: Task, model: Model, score: Scorer) -> Score:
    await asyncio.Event().wait()
    raise AssertionError("not reached")


def test_an_error_in_a_workflow_is_the_rollouts_outcome() -> None:
    (rollout,) = tried(raising(KeyError("answer")))
    assert (rollout.outcome, rollout.reward) == ("failed", None)
    assert re.fullmatch(r"KeyError: 'answer' \(test_rollouts\.py, line \d+, in workflow\)", str(rollout.error))


@pytest.mark.parametrize("num_lost", [1, 3])
def test_only_a_failure_of_the_infrastructure_is_tried_again(num_lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "_PAUSES_S", (0.01, 0.01))
    tries = 0

    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        nonlocal tries
        tries += 1
        model.write([{"role": "user", "content": "?"}], f"{tries}")
        if tries <= num_lost:
            raise ExceptionGroup("requests", [InfrastructureError(f"lost {tries}")])
        return Score(1.0)

    (rollout,) = tried(workflow, engine=Writer())
    kept = [
        (tried.error.split(" (")[0], [chat["messages"][-1]["content"] for chat in tried.chats])
        for tried in rollout.tries
    ]
    assert kept == [(f"InfrastructureError: lost {number}", [f"{number}"]) for number in range(1, min(tries, 3))]
    assert [sequence.response for sequence in rollout.sequences] == [f"{tries}"]
    assert (rollout.outcome, tries) == (("ok", 2) if num_lost == 1 else ("failed", 3))


def test_a_rollout_that_takes_too_long_is_timed_out() -> None:
    (rollout,) = tried(endless, timeout_s=0.05)
    assert rollout.outcome == "timeout" and "explorer.rollout_timeout_s = 0.05 s" in str(rollout.error)


def test_a_timeout_of_the_users_own_is_not_reported_as_ours() -> None:
    (rollout,) = tried(raising(TimeoutError("the sandbox did not answer")))
    assert rollout.outcome == "failed" and "TimeoutError: the sandbox did not answer" in str(rollout.error)


def test_a_time_out_names_where_the_rollout_was() -> None:
    (rollout,) = tried(endless, timeout_s=0.05)
    assert "(test_rollouts.py, line" in str(rollout.error) and "in endless)" in str(rollout.error)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (None, "returned no score for the task 'one' of 'sums'"),
        (1.0, "returned no score"),
        (Score(float("nan")), "for the task 'one' of 'sums' whose reward is nan, which is not finite"),
        (Score(None), "whose reward is nothing"),  # type: ignore[arg-type]
        (Score(1e39), "whose reward is 1e.39.*between -3.4e.38"),
        (Score(1.0, {"style": "good"}), "whose part 'style' is 'good', a value of type str; allowed: a finite number"),  # type: ignore[dict-item]
        (Score(1.0, {"right": True}), r"whose part 'right' is True.*write float\(…\) of the condition"),
        (Score(1.0, {"length": float("inf")}), "whose part 'length' is inf, which is not finite"),
        (Score(1.0, ["style"]), "whose parts is .*a mapping of names"),  # type: ignore[arg-type]
        (Score(1.0, by_role={"x": None}), "whose reward of the role 'x' is nothing"),  # type: ignore[dict-item]
    ],
)
def test_a_workflow_that_returns_no_valid_score_fails_its_rollout(returned: Any, message: str) -> None:
    async def workflow(task: Task, model: Model, score: Scorer) -> Any:
        return returned

    (rollout,) = tried(workflow)
    assert rollout.outcome == "failed" and re.search(message, str(rollout.error))


def test_numbers_of_other_libraries_in_a_score_are_stored_as_plain_ones() -> None:
    async def workflow(task: Task, model: Model, score: Scorer) -> Any:
        turn = model.write([{"role": "user", "content": "1+1="}], "2")
        assert turn.response == "2"
        return Score(True, {"tries": np.float32(0.5), "tokens": np.int64(3)})  # type: ignore[dict-item]

    (rollout,) = tried(workflow, engine=Writer())
    assert (rollout.outcome, rollout.reward) == ("ok", 1.0)
    assert rollout.sequences[0].reward_parts == {"tries": 0.5, "tokens": 3.0}


@pytest.mark.parametrize(
    ("by_role", "outcome"),
    [({"author": 1.0}, "ok"), ({"author": 1.0, "judge": 0.0}, "ok"), ({"Author": 1.0}, "failed")],
)
def test_a_misspelt_role_is_refused_and_one_that_the_rollout_did_not_reach_is_not(
    by_role: dict[str, float], outcome: str
) -> None:
    async def workflow(task: Task, model: Model, score: Scorer) -> Any:
        model.write([{"role": "user", "content": "1+1="}], "2", role="author")
        return Score(0.0, by_role=by_role)

    (rollout,) = tried(workflow, engine=Writer())
    assert rollout.outcome == outcome
    if outcome == "failed":
        assert re.search(
            "role that has not answered .got 'Author'.; allowed: author; correct the name", str(rollout.error)
        )


def test_a_plain_workflow_runs_in_a_thread_and_calls_model_and_score_without_await() -> None:
    threads = set()

    def workflow(task: Task, model: PlainModel, score: Any) -> Score:
        threads.add(threading.current_thread())
        turn = model.write([{"role": "user", "content": "1+1="}], "2")
        assert model.turns == [turn]
        found: Score = score(turn, task)
        return found

    async def two(turn: Turn, task: Task) -> Score:
        await asyncio.sleep(0)
        return Score(2.0)

    rollouts = tried(workflow, engine=Writer(), scorer=two, count=3)
    assert [(r.outcome, r.reward, len(r.sequences)) for r in rollouts] == [("ok", 2.0, 1)] * 3
    assert len(threads) == 3


def test_plain_workflows_that_wait_do_not_wait_for_each_other() -> None:
    begun = threading.Barrier(8, timeout=PATIENCE_S)

    def workflow(task: Task, model: PlainModel, score: Any) -> Score:
        begun.wait()  # broken unless all eight are here at the same time
        return Score(1.0)

    assert [rollout.outcome for rollout in tried(workflow, count=8, timeout_s=2 * PATIENCE_S)] == ["ok"] * 8


def test_a_plain_workflow_that_never_returns_is_ended_and_named() -> None:
    begun, ended = threading.Event(), threading.Event()

    def workflow(task: Task, model: PlainModel, score: Any) -> Score:
        try:
            begun.set()
            while True:
                with contextlib.suppress(Exception):  # as a careless loop does
                    sum(range(1000))
        finally:
            ended.set()

    async def run() -> Rollout:
        runner = runner_of(workflow, timeout_s=0.3)
        runner.clocks.set_suspended(True)  # until its thread is in the loop
        rollout = asyncio.create_task(runner.rollout(TASK, 0, Decoding()))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        runner.clocks.set_suspended(False)
        return await rollout

    rollout = asyncio.run(run())
    assert rollout.outcome == "timeout" and "in workflow)" in str(rollout.error)
    assert ended.wait(PATIENCE_S), "its thread computes no more"


def test_an_async_workflow_that_blocks_is_ended_and_the_others_continue() -> None:
    said: list[str] = []

    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        if task.task_key == "endless":
            while True:
                pass
        await asyncio.sleep(0.1)
        return Score(1.0)

    loop = WorkflowLoop(block_timeout_s=2.5, on_blocking=said.append)
    runner = runner_of(workflow, scorer=None)

    async def run() -> list[Rollout]:
        tasks = [Task(1, "sums", key, "1+1=", "2") for key in ("endless", "one")]
        return await asyncio.gather(*(loop.run(runner.rollout(task, 0, Decoding())) for task in tasks))

    try:
        endless, one = asyncio.run(run())
        wait_until(lambda: said[-1:] == [""])
    finally:
        loop.close()
    assert endless.outcome == "timeout" and "blocked the event loop" in str(endless.error)
    assert "(test_rollouts.py, line" in str(endless.error)
    assert (one.outcome, one.reward) == ("ok", 1.0)
    assert any("in workflow)" in one for one in said), "it was shown while it lasted"


def test_an_async_workflow_that_no_exception_reaches_is_reported_with_its_stack() -> None:
    stuck: list[tuple[str, str]] = []
    released = threading.Event()

    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        while not released.wait(600):  # in C code
            pass
        return Score(1.0)

    def report(sentence: str, stack: str) -> None:
        stuck.append((sentence, stack))
        released.set()

    loop = WorkflowLoop(block_timeout_s=2.0, on_stuck=report)
    runner = runner_of(workflow, scorer=None)
    try:
        asyncio.run(loop.run(runner.rollout(TASK, 0, Decoding())))
    finally:
        loop.close()
    assert "cannot be stopped" in stuck[0][0] and "while not released.wait(600)" in stuck[0][1]


def test_a_cancelled_caller_cancels_what_runs_in_the_loop() -> None:
    begun, cancelled = threading.Event(), threading.Event()

    async def wait() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    loop = WorkflowLoop(block_timeout_s=PATIENCE_S)

    async def run() -> None:
        waiting = asyncio.create_task(loop.run(wait()))
        await asyncio.to_thread(begun.wait, PATIENCE_S)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(run())
    assert cancelled.wait(PATIENCE_S)
    loop.close()


async def _group(task: Task, model: Model, score: Scorer) -> Score:
    async def loops() -> None:
        while True:
            pass

    async with asyncio.TaskGroup() as group:
        group.create_task(loops())
    raise AssertionError("not reached")


class _PanicError(BaseException):
    """As extensions written in Rust raise it."""


async def _panics(task: Task, model: Model, score: Scorer) -> Score:
    raise _PanicError("unreachable")


async def _exits(task: Task, model: Model, score: Scorer) -> Score:
    await asyncio.gather(asyncio.to_thread(time.sleep, 0), _exit())
    raise AssertionError("not reached")


async def _exit() -> None:
    sys.exit("not today")


def _exits_plainly(task: Task, model: PlainModel, score: Any) -> Score:
    sys.exit("not today")


async def _cancels(task: Task, model: Model, score: Scorer) -> Score:
    own = asyncio.create_task(asyncio.sleep(PATIENCE_S))
    own.cancel()
    await own
    raise AssertionError("not reached")


@pytest.mark.parametrize(
    ("workflow", "outcome", "error"),
    [
        (_group, "timeout", r"blocked the event loop .*\(test_rollouts\.py, line \d+, in loops\)"),
        (_panics, "failed", r"_PanicError: unreachable \(test_rollouts\.py, line \d+, in _panics\)"),
        (_exits, "failed", r"SystemExit: not today \(test_rollouts\.py, line \d+, in _exit\)"),
        (_exits_plainly, "failed", r"SystemExit: not today \(test_rollouts\.py, line \d+, in _exits_plainly\)"),
        (_cancels, "failed", r"CancelledError: .*\(test_rollouts\.py, line \d+, in _cancels\)"),
    ],
)
def test_user_code_that_exits_ends_only_its_rollout(workflow: Any, outcome: str, error: str) -> None:
    # Short only where something blocks.
    loop = WorkflowLoop(block_timeout_s=2.5 if outcome == "timeout" else PATIENCE_S)
    runner, good = runner_of(workflow), runner_of(slow)

    async def run() -> list[Rollout]:
        first = await loop.run(runner.rollout(TASK, 0, Decoding()))
        return [first, await loop.run(good.rollout(TASK, 0, Decoding()))]

    try:
        ended, after = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    finally:
        loop.close()
    assert ended.outcome == outcome and re.search(error, str(ended.error)), ended.error
    assert after.outcome == "ok", "the loop continues"


def test_plain_workflows_that_catch_everything_are_interrupted_again_and_reported_when_too_many() -> None:
    stop, asked, stuck = threading.Event(), [0], []
    begun = threading.Barrier(4, timeout=PATIENCE_S)

    def workflow(task: Task, model: PlainModel, score: Any) -> Score:
        begun.wait()
        while not stop.is_set():
            try:
                # The inner loop is for the test: an exception at an instruction outside the `try` would end the workflow.
                while not stop.is_set():
                    sum(range(1000))
            except BaseException:  # noqa: BLE001 - as a careless loop does
                asked[0] += 1
        return Score(1.0)

    loop = WorkflowLoop(PATIENCE_S, on_stuck=lambda sentence, stack: stuck.append((sentence, stack)), max_left=2)
    runner = runner_of(workflow, timeout_s=0.2)

    async def run() -> list[Rollout]:
        loop.call(lambda: runner.clocks.set_suspended(True))  # until all three are in their loops
        rollouts = [asyncio.create_task(loop.run(runner.rollout(TASK, index, Decoding()))) for index in range(3)]
        await asyncio.to_thread(begun.wait)
        loop.call(lambda: runner.clocks.set_suspended(False))
        return await asyncio.gather(*rollouts)

    try:
        assert {rollout.outcome for rollout in asyncio.run(run())} == {"timeout"}
        wait_until(lambda: stuck and asked[0] >= 6)
    finally:
        stop.set()
        loop.close()
    assert "3 rollouts of a plain workflow were timed out and cannot be stopped (test_rollouts.py" in stuck[0][0]


def test_the_time_in_which_the_engine_sleeps_does_not_count() -> None:
    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        begun.release()
        if task.task_id == TASK.task_id:
            await awake.wait()
        else:
            await asyncio.Event().wait()
        return Score(1.0)

    def fall_asleep() -> None:
        # Their clocks have begun, and run; in one call, so that none of their time passes before they stand still.
        runner.clocks.set_suspended(False)
        runner.clocks.set_suspended(True)

    def wake_up() -> None:
        runner.clocks.set_suspended(False)
        awake.set()  # those that wait for it end before the loop looks at its timers again

    async def run() -> list[Rollout]:
        loop.call(lambda: runner.clocks.set_suspended(True))
        rollouts = [asyncio.create_task(loop.run(runner.rollout(task, 0, Decoding()))) for task in (TASK, other)]
        for _ in rollouts:
            await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
        loop.call(fall_asleep)
        rollouts.append(asyncio.create_task(loop.run(runner.rollout(TASK, 1, Decoding()))))  # begins meanwhile
        await asyncio.to_thread(begun.acquire, timeout=PATIENCE_S)
        await asyncio.sleep(1.0)  # more than twice the limit
        loop.call(wake_up)
        return await asyncio.gather(*rollouts)

    other, begun, awake = Task(2, "sums", "two", "1+2=", "3"), threading.Semaphore(0), asyncio.Event()
    loop, runner = WorkflowLoop(PATIENCE_S), runner_of(workflow, timeout_s=0.4)
    try:
        assert [rollout.outcome for rollout in asyncio.run(run())] == ["ok", "timeout", "ok"]
    finally:
        loop.close()


def test_time_counts_from_the_moment_a_rollout_begins() -> None:
    async def quick(task: Task, model: Model, score: Scorer) -> Score:
        return Score(1.0)

    async def waited(workflow: Any) -> Rollout:
        runner = runner_of(workflow, timeout_s=0.05, slots=1)
        async with runner.slots.rollout():  # as another rollout has it
            rollout = asyncio.create_task(runner.rollout(TASK, 0, Decoding()))
            await asyncio.sleep(0.5)  # ten times the limit
            assert not rollout.done()
        return await rollout

    assert asyncio.run(waited(quick)).outcome == "ok"
    rollout = asyncio.run(waited(endless))
    assert rollout.outcome == "timeout" and "in endless)" in str(rollout.error), "it began after the wait"


@pytest.mark.parametrize(
    "error",
    [
        EngineStoppedError("out of memory"),
        ModelError("no such model"),
        ExceptionGroup("two requests at once", [ValueError("cut short"), EngineStoppedError("out of memory")]),
    ],
)
def test_errors_of_the_run_are_raised(error: Exception) -> None:
    with pytest.raises(type(error)):
        tried(raising(error))


def test_an_engine_that_was_stopped_reports_it_by_its_class(tmp_path: Path) -> None:
    from rftcore.engines.base import EngineConfig
    from rftcore.engines.transformers_engine import TransformersEngine
    from tests.support.models import make_tiny_model

    class Exploding(TransformersEngine):
        def _step(self) -> Any:
            raise RuntimeError("CUDA out of memory")

    engine = Exploding(make_tiny_model(tmp_path), EngineConfig(dtype="float32"))
    prompt = engine.tokenizer.encode("1+1=")
    for _ in range(2):  # the request that met it, and every later one
        with pytest.raises(EngineStoppedError, match="CUDA out of memory"):
            asyncio.run(engine.generate(prompt, Decoding()))
    engine.close()


def _own_array(turn: Turn) -> None:
    turn.sequence.arrays = {**turn.sequence.arrays, "mine": np.zeros(3, np.float32)}


def _other_mask(turn: Turn) -> None:
    turn.sequence.loss_mask = np.ones(1000, np.bool_)


def _object_in_messages(turn: Turn) -> None:
    assert turn.sequence.messages is not None
    turn.sequence.messages[0]["at"] = datetime(2026, 1, 1)


@pytest.mark.parametrize("num_turns", [1, 2])
@pytest.mark.parametrize(
    ("change", "parts", "error"),
    [
        (_own_array, {}, "an array that cannot be joined.*got 'mine'"),
        (_other_mask, {}, "broadcast|loss_mask must have one value per response token"),
        (_object_in_messages, {}, "the messages of a rollout cannot be stored.*datetime.*allowed: texts, numbers"),
        (None, {"a": datetime}, "whose part 'a' is <class 'datetime.datetime'>"),
    ],
)
def test_a_rollout_that_cannot_be_stored_fails_alone(
    num_turns: int, change: Any, parts: dict[str, Any], error: str
) -> None:
    if change is _own_array and num_turns == 1:
        error = ""  # arrays of any name are stored with a single turn

    class Answering:
        tokenizer = chat_tokenizer("qwen2_5")

        async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
            token_ids = [*self.tokenizer.encode("so", add_special_tokens=False), self.tokenizer.eos_token_id]
            return Generation(token_ids, [-1.0] * len(token_ids), "so", "stop", [])

    async def workflow(task: Task, model: Model, score: Scorer) -> Score:
        messages: list[dict[str, Any]] = []
        for _ in range(num_turns):
            messages = [*messages, {"role": "user", "content": "more"}]
            turn = await model.chat(messages)
            messages = [*messages, {"role": "assistant", "content": turn.response}]
            if change is not None:
                change(turn)
        return Score(1.0, parts)

    (rollout,) = tried(workflow, engine=Answering())
    if error:
        kept = 0 if change else 1  # turns that can be stored stay
        assert (rollout.outcome, rollout.reward, len(rollout.sequences)) == ("failed", None, kept)
        assert re.search(error, str(rollout.error))
    else:
        assert (rollout.outcome, rollout.reward) == ("ok", 1.0)


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
        runner = runner_of(workflow)
        claimed = ClaimedGroup(
            group_id=1,
            claim_token=1,
            explore_step=0,
            ordinal=0,
            group_size=size,
            task_id=1,
            taskset="sums",
            task_key="one",
            payload={"prompt": "1+1=", "answer": "2"},
        )
        return await runner.group(claimed, Decoding(), rule)

    return asyncio.run(run()), begun


@pytest.mark.parametrize(("reward", "side"), [(0.0, "not above 0"), (1.0, "not below 1")])
def test_a_group_whose_first_rollouts_all_end_alike_is_screened_out(reward: float, side: str) -> None:
    group, begun = screened([reward] * 3, Screening(3, 0.0, 1.0))
    assert len(begun) == 3, "no more rollouts were run"
    assert [(r.index, r.outcome) for r in group.rollouts] == [(i, "ok" if i < 3 else "cancelled") for i in range(6)]
    assert {r.error for r in group.rollouts[3:]} == {
        f"screened out: {3 * reward:g} of 3 first rollouts succeeded, a pass rate {side}"
    }
    assert successes_and_trials(group) == (3 * reward, 3), "the trials that were made count"


@pytest.mark.parametrize("first", [[0.0, 1.0, 0.0], [None, None, None], [None, 1.0, 0.5]])
def test_a_group_that_is_neither_solved_nor_hopeless_continues(first: list[float | None]) -> None:
    group, begun = screened(first, Screening(3, 0.0, 1.0))
    assert len(begun) == 6 and [r.outcome for r in group.rollouts[3:]] == ["ok"] * 3
    assert [r.index for r in group.rollouts] == list(range(6))


def test_the_bounds_of_the_pass_rate_are_excluded() -> None:
    assert Screening(4, 0.25, 0.75).refusal(1, 4) and Screening(4, 0.25, 0.75).refusal(3, 4)
    assert Screening(4, 0.25, 0.75).refusal(2, 4) is None and Screening(4, 0.2, 0.8).refusal(1, 4) is None


def test_a_workflow_that_keeps_the_interpreters_lock_ends_the_process_with_a_report(
    tmp_path: Path,
) -> None:
    """No thread of the process can run, so only a timer that needs no lock can end it."""
    script = tmp_path / "flow.py"
    script.write_text(
        "import asyncio, os, re, sys\n"
        "from pathlib import Path\n"
        "from rftcore.explorer import workflow_loop\n"
        "from rftdata.user_code.blocked_process import report_path\n"
        "workflow_loop._LOCK_SLACK_S = 3.0\n"
        "workflow_loop._PUT_OFF_S = 0.2\n"
        "async def flow():\n"
        "    return re.match('(a+)+$', 'a' * 40 + 'b')\n"
        "loop = workflow_loop.WorkflowLoop(1.0, report=report_path(Path(sys.argv[1]), os.getpid()))\n"
        "print(os.getpid(), flush=True)\n"
        "asyncio.run(loop.run(flow()))\n"
    )
    done = subprocess.run(
        [sys.executable, script, tmp_path],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    assert done.returncode == 1, done.stderr
    report = read_report(tmp_path, int(done.stdout))
    assert report is not None and "kept the interpreter's lock" in report[0]
    assert report[0].endswith("(flow.py, line 8, in flow)") and 'flow.py", line 8 in flow' in report[1]


class Quick:
    """An engine that answers some questions at once, and the next never."""

    def __init__(self, num_quick: int) -> None:
        self.tokenizer = make_character_tokenizer()
        self.num_quick = num_quick

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        if self.num_quick == 0:
            await asyncio.Event().wait()
        self.num_quick -= 1
        return Generation([5], [0.0], "3", "stop", [(0, 0)])


async def asks_on(task: Task, model: Model, score: Scorer) -> Score:
    while True:
        (await model.chat([{"role": "user", "content": "1+1="}])).record(step_reward=0.25)


async def asks_until_it_may_not(task: Task, model: Model, score: Scorer) -> Score:
    try:
        return await asks_on(task, model, score)
    except LimitReachedError as limit:
        return Score(7.0, {limit.reason: 1.0})


def asks_plainly(task: Task, model: PlainModel, score: Any) -> Score:
    while True:
        model.chat([{"role": "user", "content": "1+1="}]).record(step_reward=0.25)


async def half(turn: Turn, task: Task) -> Score:
    return Score(0.5, {"half": 0.5})


@pytest.mark.parametrize(("workflow", "expected"), [(asks_on, 1.0), (asks_until_it_may_not, 7.0), (asks_plainly, 1.0)])
@pytest.mark.parametrize("limit", ["max_turns", "rollout_timeout"])
def test_a_rollout_that_reaches_a_limit_is_kept_with_the_reason(workflow: Any, expected: float, limit: str) -> None:
    of_turns = limit == "max_turns"
    engine, limits = Quick(99 if of_turns else 2), Limits(max_turns=2) if of_turns else NO_LIMITS
    runner = runner_of(workflow, timeout_s=PATIENCE_S if of_turns else 0.1, engine=engine, scorer=half, limits=limits)
    rollout = asyncio.run(runner.rollout(TASK, 0, Decoding()))
    assert (rollout.outcome, rollout.stop_reason, rollout.reward, rollout.num_turns) == ("ok", limit, expected, 2)


def test_a_rollout_that_reaches_a_limit_fails_if_nothing_scores_it_or_has_no_answer_or_does_not_close() -> None:
    async def nothing(turn: Turn, task: Task) -> Score:
        return Score(0.0)

    async def unscored(task: Task, model: Model, score: Scorer) -> Score:
        while True:
            await model.chat([{"role": "user", "content": "1+1="}])

    async def stubborn(task: Task, model: Model, score: Scorer) -> Score:
        with contextlib.suppress(LimitReachedError):
            await asks_on(task, model, score)
        return await endless(task, model, score)

    async def outcome(workflow: Any, num_quick: int) -> tuple[str, str, str | None]:
        runner = runner_of(workflow, timeout_s=0.1, close_s=0.1, engine=Quick(num_quick), scorer=nothing)
        rollout = await runner.rollout(TASK, 0, Decoding())
        return rollout.outcome, str(rollout.error), rollout.stop_reason

    assert asyncio.run(outcome(unscored, 2))[0] == "failed"
    for workflow, num_quick in ((asks_on, 0), (stubborn, 2)):
        kind, error, reason = asyncio.run(outcome(workflow, num_quick))
        assert (kind, reason) == ("timeout", None) and "rollout_timeout_s = 0.1 s" in error
