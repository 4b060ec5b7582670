"""vLLM's engine core in a process of its own, so that it computes while the explorer's process runs workflows, rewards and the database.

vLLM divides itself in two: the engine core (scheduler, model) and the client, which adds requests and collects tokens. Both can share a process, or
exchange messages. This module is for the second: it starts the core's process so that it ends with the explorer and with nothing else, and it pauses the core
wherever an engine in the explorer's process would be between two steps.

Importing this module imports vLLM.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import InvalidStateError
from multiprocessing import connection, current_process
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.engine import EngineCoreOutputs, utils
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

from rftcore.engines.core_fork import ForkContext
from rftcore.parent_process import end_with_parent
from rftdata.errors import EngineStoppedError

if TYPE_CHECKING:
    from vllm import LLM
    from vllm.v1.engine.core_client import SyncMPClient

_WATCH_S = 0.1
_EXPLORER = "RFT_EXPLORER_PID"


def start_here() -> None:
    """Let cores that this process starts from now on end with it."""
    os.environ[_EXPLORER] = str(os.getpid())


def _end_with_starter() -> None:
    """End a process of vLLM's with the one that started it: the core with the explorer, and workers with the core.

    They import this module with their arguments, before anything else. A core whose explorer has ended would wait for its greeting for minutes.
    """
    name = current_process().name  # as vLLM names them
    if name.startswith("EngineCore"):
        end_with_parent(int(os.environ[_EXPLORER]))
    elif name.startswith("VllmWorker"):
        end_with_parent(os.getppid())


_end_with_starter()


@contextlib.contextmanager
def core_from_fork() -> Iterator[None]:
    """Let the core that vLLM starts begin in the fork of this process that waits for it. Without such a fork it is spawned.

    vLLM takes the context of multiprocessing by the name of a start method, and knows spawn and fork.
    """
    before = utils.get_mp_context
    utils.get_mp_context = ForkContext
    try:
        yield
    finally:
        utils.get_mp_context = before


def allow_matrix_unit() -> None:
    """Ask the system for the processor's matrix unit (AMX), which vLLM's attention uses without asking, so that the process would be ended."""
    torch.cpu._init_amx()


def _begin() -> None:
    """Prepare the core's process. Signals to the explorer's group, such as Ctrl-C in a terminal, do not reach it."""
    if os.getsid(0) != os.getpid():  # a fork of the explorer has its own session already
        os.setsid()
    allow_matrix_unit()


class OneWorkerExecutor(UniProcExecutor):  # type: ignore[misc]  # without type hints
    """Computes in the core's process."""

    def _init_executor(self) -> None:
        _begin()
        super()._init_executor()


class SeveralWorkersExecutor(MultiprocExecutor):  # type: ignore[misc]
    """Computes in further processes, which end with the core's."""

    def _init_executor(self) -> None:
        _begin()
        super()._init_executor()


class CoreProcess:
    """The process of an engine core, as its client uses it."""

    def __init__(self, llm: LLM) -> None:
        self._client: SyncMPClient = llm.llm_engine.engine_core
        self._is_closed = False
        self._manager: Any = self._client.resources.engine_manager
        threading.Thread(
            target=self._watch, args=(self._manager.sentinels(),), name="engine core watch", daemon=True
        ).start()

    def interrupt(self) -> None:
        """Let a wait for the next tokens return without any; called in any thread."""
        if self._client.outputs_queue.empty():
            self._client.outputs_queue.put_nowait(EngineCoreOutputs())

    def pause(self) -> None:
        """Return once the present step is done; none begins before `resume`.

        Raises:
            EngineStoppedError: the process has ended.
        """
        self._call("pause_scheduler", "keep", False)

    def resume(self) -> None:
        """Let the core compute again."""
        self._call("resume_scheduler")

    def end(self) -> None:
        """End the process at once: nothing in it is needed any more, and vLLM would wait for seconds before it does the same."""
        self._is_closed = True
        for process in self._manager.processes:
            process.kill()

    def _call(self, method: str, *arguments: object) -> None:
        try:
            self._client.call_utility(method, *arguments)
        except EngineDeadError as error:
            raise EngineStoppedError("the process of vLLM's engine core has ended") from error

    def _watch(self, sentinels: list[int]) -> None:
        """Fail what waits for a process that has ended, tokens and answers of calls: vLLM lets both wait forever."""
        connection.wait(sentinels)
        self._client.outputs_queue.put_nowait(EngineDeadError())
        while not self._is_closed:
            for answer in list(self._client.utility_results.values()):
                with contextlib.suppress(InvalidStateError):  # it has been answered
                    answer.set_exception(EngineDeadError())
            time.sleep(_WATCH_S)
