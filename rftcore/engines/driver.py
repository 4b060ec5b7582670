"""Run a model in one thread that alone uses it, and takes commands from an inbox between its steps.

This gives continuous batching (a request joins at the next step), weight updates between two steps without any lock on
the model, and an async interface without a second process. Without open requests the thread blocks on its inbox and
uses no CPU. The model is also *built* in that thread, because OpenMP thread counts belong to the calling thread.

If a step or a weight load fails half-way, the model's state is unknown. The engine then stops, and every open and later
request raises the reason. A transfer of weights that fails half-way is the exception: the engine computes no token until whole
weights have replaced the mixed ones.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import queue
import sys
import threading
import time
import traceback
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation, PromptTooLongError
from rftcore.engines.commands import (
    AwaitedCommand,
    Cancel,
    Compare,
    Load,
    Nudge,
    Receive,
    Request,
    Result,
    Sleep,
    Unfinished,
    WakeUp,
)
from rftcore.engines.driven_model import DrivenModel
from rftcore.engines.request_work import RequestWork
from rftcore.engines.token_reports import token_report
from rftcore.engines.weights_fit import WeightsFit
from rftcore.sync.files.weights_file import hold, open_weights, read_shapes_of_model
from rftcore.sync.tensors import AdaptersConfig, TensorShapes
from rftcore.sync.transfer.plan import TransferError, TransferPlan
from rftdata.errors import EngineStoppedError, RftError

# Longest wait for the present step, or change of weights: an engine that hangs must not keep its explorer from stopping.
_UNFINISHED_S = 10.0
# Interval of the reports on which requests the engine works on; time limits of rollouts need no finer one.
_REPORT_S = 0.1
# Interval of the reports of new tokens, for streams.
_TOKENS_S = 0.05

ABORTED = Generation(token_ids=[], logprobs=[], text="", finish_reason="abort", version_spans=[])


class DrivenEngine(DrivenModel, Engine):
    """An engine whose subclass implements the work of the driving thread, `DrivenModel`."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.model_path = str(model_path)
        self.config = config or EngineConfig()
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        self._fit = WeightsFit(read_shapes_of_model(Path(self.model_path)), self.config.adapter_rank)
        self._request_numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Request | AwaitedCommand[Any] | Cancel | Nudge] = queue.SimpleQueue()
        self._open_requests: dict[str, Request] = {}
        self._worked_on: frozenset[str] = frozenset()  # ids of requests, as reported
        self._reported_at = -math.inf  # monotonic
        self._tokens_reported_at = -math.inf  # monotonic
        self._gate = threading.Lock()  # orders `_put` against the thread's last read of the inbox
        self._closing = False
        self._has_mixed_weights = False
        self._is_asleep = False
        self._reads_weights = False
        self._work_began: float | None = None  # monotonic; None without work
        self._stopped: EngineStoppedError | None = None
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._drive, args=(ready,), name="engine", daemon=True)
        self._thread.start()
        ready.result()

    # The interface, called in any thread.

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        return await self.generate_named("", prompt_token_ids, decoding)

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        work = RequestWork()
        number, tokens = str(next(self._request_numbers)), token_report(decoding)
        request = Request(number, list(prompt_token_ids), decoding, work, name, tokens)
        try:
            self._put(request)
            return await asyncio.wrap_future(request.result)
        except asyncio.CancelledError:
            self._inbox.put(Cancel(request.request_id))
            self._interrupt()
            raise
        finally:
            work.close()

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        try:
            return self._call(Unfinished(first_tokens), _UNFINISHED_S)
        except TimeoutError:
            return {}

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        started = time.perf_counter()
        path = open_weights(uri, checksum)
        with hold(path) as held:
            self._fit.refuse_file(held)
            self._call(Load(held, policy_version_id))
        return time.perf_counter() - started

    def refuse_unfit(self, tensors: TensorShapes, adapters: AdaptersConfig | None = None) -> None:
        self._fit.refuse(dict(tensors), adapters, "what the trainer sends")

    def receive_weights(self, plan: TransferPlan, policy_version_id: int) -> str:
        reception = self.reception
        assert reception is not None
        plan.refuse_other_type(reception.dtype, reception.in_float32)
        self.refuse_unfit(plan.shapes, plan.adapters)
        return self._call(Receive(plan, policy_version_id))

    def differing_weights(self, uri: str, checksum: str | None = None) -> list[str]:
        with hold(open_weights(uri, checksum)) as held:
            return self._call(Compare(held))

    def sleep(self) -> float:
        started = time.perf_counter()
        self._call(Sleep())
        return time.perf_counter() - started

    def wake(self, weights_only: bool = False) -> bool:
        return self._call(WakeUp(weights_only))

    def set_policy_version(self, policy_version_id: int) -> None:
        self._call(Load(None, policy_version_id))

    def stuck_s(self) -> float:
        began = self._work_began
        return 0.0 if began is None else time.monotonic() - began

    @property
    def reads_weights(self) -> bool:
        return self._reads_weights

    def stack(self) -> str:
        frame = sys._current_frames().get(self._thread.ident or 0)
        return "" if frame is None else "".join(traceback.format_stack(frame))

    def close(self) -> None:
        self._closing = True
        self._inbox.put(Nudge())
        self._interrupt()
        self._thread.join()

    def _call(self, command: AwaitedCommand[Result], timeout_s: float | None = None) -> Result:
        """Give the driving thread a command; wait for its result."""
        self._put(command)
        return command.result.result(timeout_s)

    def _put(self, command: Request | AwaitedCommand[Any]) -> None:
        with self._gate:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.put(command)
        self._interrupt()

    # The driving thread.

    def _drive(self, ready: Future[None]) -> None:
        try:
            self._open_model()
        except BaseException as error:  # noqa: BLE001 - the constructor raises it
            ready.set_exception(error)
            return
        ready.set_result(None)
        failure: EngineStoppedError | None = None
        try:
            while not self._closing:
                self._take_commands()
                if self._may_step():
                    self._work_began = time.monotonic()
                    for request_id, generation in self._step():
                        self._finish(request_id, generation)
                    if self._work_began - self._reported_at >= _REPORT_S:
                        self._report_work(self._works_on())
                    if self._work_began - self._tokens_reported_at >= _TOKENS_S:
                        self._report_tokens()
                    self._work_began = None
        except Exception as error:  # noqa: BLE001 - all waiting callers get it
            failure = EngineStoppedError(
                f"the engine for {self.model_path} stopped: {type(error).__name__}: {error}",
                todo="start a new engine; its state is unknown after this error",
            )
            failure.__cause__ = error
        self._end(failure)

    def _may_step(self) -> bool:
        return bool(self._open_requests) and not self._closing and not self._has_mixed_weights and not self._is_asleep

    def _take_commands(self) -> None:
        """Empty the inbox; wait for a command only if there is no other work."""
        wait = not self._open_requests or self._has_mixed_weights or self._is_asleep
        while True:
            try:
                command = self._inbox.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._work_began = time.monotonic()
            match command:
                case Request():
                    self._admit(command)
                case Cancel():
                    if self._open_requests.pop(command.request_id, None) is not None:
                        self._abort(command.request_id)
                case Unfinished():
                    self._report_unfinished(command)
                case Nudge():
                    pass
                case _:
                    self._work_paused(command)
            self._work_began = None

    def _work_paused(self, command: AwaitedCommand[Any]) -> None:
        """Carry out a command between two steps."""
        self._report_work(())  # until the next step
        with _stopping(command, "the engine stopped before a command"):
            self._pause()
        match command:
            case Load():
                self._load(command)
            case Receive():
                self._receive(command)
            case Compare():
                self._compare(command)
            case Sleep():
                self._sleep(command)
            case WakeUp():
                self._wake(command)
        if not self._has_mixed_weights and not self._is_asleep:
            self._resume()

    def _admit(self, request: Request) -> None:
        # From here on the future cannot be cancelled, so setting its result is safe.
        if not request.result.set_running_or_notify_cancel():
            return
        try:
            _refuse_invalid(request, self._context_length)
            self._add(request)
        except RftError as error:
            request.result.set_exception(error)
        except Exception as error:
            request.result.set_exception(EngineStoppedError(f"the engine stopped before a request: {error}"))
            raise
        else:
            self._open_requests[request.request_id] = request

    def _report_work(self, request_ids: Collection[str]) -> None:
        self._reported_at = time.monotonic()
        worked_on = frozenset(request_ids)
        for request_id in worked_on ^ self._worked_on:
            request = self._open_requests.get(request_id)
            if request is not None:
                request.work.set_worked_on(request_id in worked_on)
        self._worked_on = worked_on

    def _report_tokens(self) -> None:
        """Report what open requests have sampled since the last report, if their callers listen."""
        self._tokens_reported_at = time.monotonic()
        for request in self._open_requests.values():
            if request.tokens is None:
                continue
            sampled = self._unfinished(request.request_id, request.tokens.num_reported)
            if sampled is not None and sampled.token_ids:
                request.tokens.add(sampled.token_ids)

    def _load(self, load: Load) -> None:
        with _stopping(load, f"loading {load.path} into the engine failed half-way"):
            if load.path is not None:
                self._reads_weights = True
                self._replace_weights(load.path)
                self._reads_weights = False
            self._name_version(load.policy_version_id)
        if load.path is not None:
            self._has_mixed_weights = False
        self.policy_version_id = load.policy_version_id
        load.result.set_result(None)

    def _receive(self, command: Receive) -> None:
        try:
            checksum = self._receive_weights(command.plan)
            self._name_version(command.policy_version_id)
        except RftError as error:
            self._has_mixed_weights |= isinstance(error, TransferError) and error.is_half_applied
            command.result.set_exception(error)
            return
        except Exception as error:
            command.result.set_exception(EngineStoppedError(f"receiving weights failed half-way: {error}"))
            raise
        self._has_mixed_weights = False
        self.policy_version_id = command.policy_version_id
        command.result.set_result(checksum)

    def _sleep(self, command: Sleep) -> None:
        # Before the call: even if it fails, no token is computed with weights that are gone.
        self._has_mixed_weights |= self._loses_weights_asleep()
        self._is_asleep = True
        with _stopping(command, "the engine did not fall asleep"):
            self._fall_asleep()
        command.result.set_result(None)

    def _wake(self, command: WakeUp) -> None:
        with _stopping(command, "the engine did not wake up"):
            self._wake_up(command.weights_only)
        self._is_asleep = self._is_asleep and command.weights_only
        command.result.set_result(not self._has_mixed_weights)

    def _compare(self, command: Compare) -> None:
        try:
            command.result.set_result(self._differing_weights(command.path))
        except Exception as error:  # noqa: BLE001 - the engine's own weights are as they were; the caller gets the error
            command.result.set_exception(error)

    def _report_unfinished(self, command: Unfinished) -> None:
        sampled = {
            request.name: self._unfinished(request.request_id, command.first_tokens[request.name])
            for request in self._open_requests.values()
            if request.name in command.first_tokens
        }
        command.result.set_result({name: generation for name, generation in sampled.items() if generation is not None})

    def _finish(self, request_id: str, generation: Generation) -> None:
        request = self._open_requests.pop(request_id, None)
        if request is not None:
            self.num_generated_tokens += len(generation.token_ids)
            request.result.set_result(generation)

    def _end(self, failure: EngineStoppedError | None) -> None:
        """Answer all waiting requests and commands, then free the model."""
        reason = failure or EngineStoppedError("the engine is closed", todo="start a new one")
        with self._gate:
            self._stopped = reason
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Request) and command.result.set_running_or_notify_cancel():
                self._open_requests[command.request_id] = command
            elif isinstance(command, AwaitedCommand):
                command.result.set_exception(reason)
        for request in self._open_requests.values():
            if failure is None:
                request.result.set_result(ABORTED)
            else:
                request.result.set_exception(failure)
        self._open_requests.clear()
        self._close_model()


@contextmanager
def _stopping(command: AwaitedCommand[Any], what: str) -> Iterator[None]:
    """Give the caller of a command the error of its work, and pass that on, which stops the engine.

    Args:
        what: what has failed, for the message.
    """
    try:
        yield
    except Exception as error:
        command.result.set_exception(EngineStoppedError(f"{what}: {error}"))
        raise


def _refuse_invalid(request: Request, context_length: int) -> None:
    seed = request.decoding.seed
    if seed is not None and not -(2**63) <= seed < 2**63:
        raise RftError("the seed of a request has more than 64 bits", value=seed, allowed="-2**63 to 2**63 - 1")
    if not 0 < len(request.prompt_token_ids) < context_length:
        raise PromptTooLongError(
            f"a prompt of {len(request.prompt_token_ids)} tokens does not fit the engine's context",
            allowed=f"1 to {context_length - 1}",
            todo="shorten it, drop long tasks (text_length_filter), or raise explorer.engine_args.context_length if the model allows more",
        )
