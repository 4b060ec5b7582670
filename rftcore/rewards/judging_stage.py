"""Base of rewards by a model that judges: each calls the stage of the same purpose, with its prompts, its parser, its retries and its budget.

The stage waits for the server in threads of its own, so that the event loop of the workflows goes on. The threads are daemons: a server that does not
answer delays no end of a process.
"""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, ClassVar

import pyarrow as pa

from operators.base import Place, StageConfig, StageContext
from operators.llm.judge import Judge, JudgeConfig
from operators.llm.templates import question_of
from rftcore.workflows.task import Task, Turn
from rftdata.errors import ConfigError, RftError
from rftdata.pipeline.budget import MemoryUsage, UsageLedger

_CLOSE_S = 5.0
Row = dict[str, Any]


class JudgingReward:
    """A reward that is the score of a judging stage.

    Attributes:
        stage: the class of the stage.
        Config: that of its arguments.

    Args:
        config: the arguments of the stage.

    Raises:
        ConfigError: the stage refuses them, or they mean nothing in a reward.
    """

    stage: ClassVar[Any]
    Config: ClassVar[type[StageConfig]]

    def __init__(self, config: JudgeConfig) -> None:
        if config.endpoint == "policy":
            raise ConfigError(
                "endpoint: policy is for stages of pipelines.experience",
                value="policy",
                allowed="{url: …, model: …}",
                todo="name a server, or use the stage llm_judge",
            )
        if "column" in config.model_fields_set:
            raise ConfigError("a reward writes no column", value=config.column, todo="name its part with `as`")
        if config.suggests is not None:
            raise ConfigError(
                "a reward suggests no labels",
                value=config.suggests,
                todo="use the stage of the same name in pipelines.experience",
            )
        self._stage: Judge = self.stage(config)
        self._usage: UsageLedger = MemoryUsage()
        self._is_open = False
        self._lock = threading.Lock()
        self._threads = _Threads(config.endpoint.concurrency)

    def count_usage(self, key: str, usage: UsageLedger) -> None:
        """Count what the judge spends, and compare it with its budget.

        Args:
            key: of the reward, under which it is counted.
        """
        self._stage.join_chain(Place(name="reward"))
        self._stage.counted_as = key
        self._usage = usage

    async def scored(self, rows: list[Row]) -> list[float | None]:
        """Return the score of each row; None for a row that cannot be compared.

        Raises:
            RftError: the judge gave no score, even after the retries.
            ConfigError, PluginError: the endpoint cannot be opened.
        """
        return await asyncio.wrap_future(self._threads.start(lambda: self._score(rows)))

    def close(self) -> None:
        """Close the connections. The next call opens them again."""
        if not self._threads.wait_until_idle(_CLOSE_S):
            return  # a thread that waits for the server still uses them
        with self._lock:
            if self._is_open:
                self._stage.close()
                self._is_open = False

    def _score(self, rows: list[Row]) -> list[float | None]:
        with self._lock:
            if not self._is_open:
                self._stage.prepare(StageContext(usage=self._usage))
                self._is_open = True
        columns = self._stage.apply(pa.Table.from_pylist(rows)).columns
        name_of_score = next(iter(self._stage.scores))
        assert self._stage.error_column is not None
        for error in columns[self._stage.error_column].to_pylist():
            if error is not None:
                raise RftError(f"the judge gave no score: {error}")
        found: list[float | None] = columns[name_of_score].to_pylist()
        return found


class _Threads:
    """Daemon threads that call functions, started as needed.

    Args:
        most: maximum number of them.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._functions: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        self._num_threads = self._num_calls = 0
        self._lock = threading.Lock()

    def start(self, function: Callable[[], Any]) -> Future[Any]:
        """Call a function as soon as a thread is free."""
        future: Future[Any] = Future()
        with self._lock:
            self._num_calls += 1
            if self._num_threads < min(self._num_calls, self._most):
                self._num_threads += 1
                threading.Thread(target=self._work, name="judge", daemon=True).start()
        self._functions.put((future, function))
        return future

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait for the end of all calls; return whether it came in time."""
        until = time.monotonic() + timeout_s
        while self._num_calls and time.monotonic() < until:
            time.sleep(0.01)
        return not self._num_calls

    def _work(self) -> None:
        while True:
            future, function = self._functions.get()
            try:
                if future.set_running_or_notify_cancel():
                    future.set_result(function())
            except BaseException as error:  # noqa: BLE001 - the future passes it on
                future.set_exception(error)
            finally:
                with self._lock:
                    self._num_calls -= 1
            del future, function


def row_of(turn: Turn, task: Task, index: int = 0, *, with_chat: bool = True) -> Row:
    """Return an answer as the row of a stage.

    Args:
        with_chat: whether the judge sees the chat before the answer; else the task's prompt.
    """
    prompt = task.prompt if isinstance(task.prompt, str) else question_of(task.prompt)
    chat = [*turn.messages, {"role": "assistant", "content": turn.response}]
    return {
        "group_id": 0,
        "rollout_index": index,
        "prompt": prompt,
        "messages": json.dumps(chat, default=str) if with_chat else None,
        "response": turn.response,
        "answer": task.answer,
        "metadata": json.dumps(task.metadata, default=str),
    }
