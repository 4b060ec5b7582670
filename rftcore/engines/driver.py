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
import queue
import sys
import threading
import time
import traceback
from abc import abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from pathlib import Path

from rftcore.engines.base import Decoding, Engine, EngineConfig, Generation
from rftcore.engines.commands import Cancel, Command, Compare, Load, Nudge, Receive, Request, Sleep, Unfinished, WakeUp
from rftcore.engines.request_work import RequestWork
from rftcore.engines.weights_fit import WeightsFit
from rftcore.sync.files.weights_file import hold, open_weights, read_shapes_of_model
from rftcore.sync.transfer.plan import AdaptersConfig, TensorShapes, TransferError, TransferPlan
from rftdata.errors import EngineStoppedError, RftError

# A step, or a change of weights, may take this long; an engine that hangs must not keep its explorer from stopping.
_TELL_S = 10.0

ABORTED = Generation(token_ids=[], logprobs=[], text="", finish_reason="abort", version_spans=[])


class DrivenEngine(Engine):
    """An engine whose subclass implements the work of the driving thread."""

    _context_length: int
    """Maximum tokens of prompt and response; set by `_open_model`."""

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        from transformers import AutoTokenizer

        self.model_path = str(model_path)
        self.config = config or EngineConfig()
        self.policy_version_id = policy_version_id
        self.num_generated_tokens = 0
        self.tokenizer = AutoTokenizer.from_pretrained(self.model_path)
        self._fit = WeightsFit(read_shapes_of_model(Path(self.model_path)), self.config.adapter_rank)
        self._request_numbers = itertools.count()
        self._inbox: queue.SimpleQueue[Command | Cancel | Nudge] = queue.SimpleQueue()
        self._open_requests: dict[str, Request] = {}
        self._worked_on: frozenset[str] = frozenset()  # ids of requests, as reported
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

    # Hooks, called in the driving thread only.

    @abstractmethod
    def _open_model(self) -> None:
        """Load the model, and set its context length."""

    @abstractmethod
    def _add(self, request: Request) -> None:
        """Accept a request; raise RftError if it cannot be served."""

    @abstractmethod
    def _abort(self, request_id: str) -> None:
        """Remove a request."""

    @abstractmethod
    def _step(self) -> list[tuple[str, Generation]]:
        """Do a bounded piece of work; return the finished generations."""

    def _works_on(self) -> Collection[str]:
        """Return the ids of the requests that the last step computed and that the next one will, without those that wait."""
        return self._open_requests.keys()

    def _unfinished(self, request_id: str, first_token: int) -> Generation | None:
        """Return what an open request has sampled from a token on; None if nothing is known of it yet."""
        return None

    @abstractmethod
    def _replace_weights(self, path: Path) -> None:
        """Load a complete weights file, or one of adapters; nothing computed with the old weights may be used afterwards."""

    def _receive_weights(self, plan: TransferPlan) -> str:
        """Take part in a transfer, as `_replace_weights`; return the checksum of what arrived.

        Raises:
            TransferError: it failed.
        """
        raise RftError(f"{type(self).__name__} takes no weights from a trainer", todo="set sync.method: memory")

    def _differing_weights(self, path: Path) -> list[str]:
        """Load a second model from a complete weights file; return the names of the tensors in which the engine differs from it."""
        raise RftError(f"{type(self).__name__} cannot compare its weights", todo="set sync.check_weights: false")

    def _fall_asleep(self) -> None:
        """Free the device's memory; requests stay."""
        raise RftError(f"{type(self).__name__} does not sleep", todo="set explorer.sleep: false")

    def _loses_weights_asleep(self) -> bool:
        """Return whether weights must be loaded after `_wake_up`."""
        return True

    def _wake_up(self, weights_only: bool) -> None:
        """Take the device's memory again, or only that for weights."""

    def _name_version(self, policy_version_id: int) -> None:
        """Assign this version to the tokens from the next one on."""

    @abstractmethod
    def _close_model(self) -> None:
        """Free the model."""

    # The interface, called in any thread.

    async def generate(self, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        return await self.generate_named("", prompt_token_ids, decoding)

    async def generate_named(self, name: str, prompt_token_ids: list[int], decoding: Decoding) -> Generation:
        work = RequestWork()
        request = Request(str(next(self._request_numbers)), list(prompt_token_ids), decoding, work, name)
        try:
            self._put(request)
            return await asyncio.wrap_future(request.result)
        except asyncio.CancelledError:
            self._inbox.put(Cancel(request.request_id))
            raise
        finally:
            work.close()

    def unfinished(self, first_tokens: Mapping[str, int]) -> dict[str, Generation]:
        command = Unfinished(first_tokens)
        self._put(command)
        try:
            return command.result.result(timeout=_TELL_S)
        except TimeoutError:
            return {}

    def load_weights(self, uri: str, policy_version_id: int, checksum: str | None = None) -> float:
        started = time.perf_counter()
        path = open_weights(uri, checksum)
        with hold(path) as held:
            self._fit.refuse_file(held)
            self._load_and_wait(Load(held, policy_version_id))
        return time.perf_counter() - started

    def refuse_unfit(self, tensors: TensorShapes, adapters: AdaptersConfig | None = None) -> None:
        self._fit.refuse(dict(tensors), adapters, "what the trainer sends")

    def receive_weights(self, plan: TransferPlan, policy_version_id: int) -> str:
        reception = self.reception
        assert reception is not None
        plan.refuse_other_type(reception.dtype, reception.in_float32)
        self.refuse_unfit(plan.shapes, plan.adapters)
        command = Receive(plan, policy_version_id)
        self._put(command)
        return command.result.result()

    def differing_weights(self, uri: str, checksum: str | None = None) -> list[str]:
        with hold(open_weights(uri, checksum)) as held:
            command = Compare(held)
            self._put(command)
            return command.result.result()

    def sleep(self) -> float:
        started = time.perf_counter()
        command = Sleep()
        self._put(command)
        command.result.result()
        return time.perf_counter() - started

    def wake(self, weights_only: bool = False) -> bool:
        command = WakeUp(weights_only)
        self._put(command)
        return command.result.result()

    def set_policy_version(self, policy_version_id: int) -> None:
        self._load_and_wait(Load(None, policy_version_id))

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
        self._thread.join()

    def _load_and_wait(self, load: Load) -> None:
        self._put(load)
        load.result.result()

    def _put(self, command: Command) -> None:
        with self._gate:
            if self._stopped is not None:
                raise self._stopped
            self._inbox.put(command)

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
                    self._report_work(self._works_on())
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
            if not isinstance(command, Request | Cancel | Unfinished | Nudge):
                self._report_work(())  # until the next step
            match command:
                case Request():
                    self._admit(command)
                case Cancel():
                    if self._open_requests.pop(command.request_id, None) is not None:
                        self._abort(command.request_id)
                case Load():
                    self._load(command)
                case Receive():
                    self._receive(command)
                case Compare():
                    self._compare(command)
                case Unfinished():
                    self._tell_unfinished(command)
                case Sleep():
                    self._sleep(command)
                case WakeUp():
                    self._wake(command)
            self._work_began = None

    def _admit(self, request: Request) -> None:
        # From here on the future cannot be cancelled, so setting its result is safe.
        if not request.result.set_running_or_notify_cancel():
            return
        try:
            self._check_length(request)
            self._add(request)
        except RftError as error:
            request.result.set_exception(error)
        else:
            self._open_requests[request.request_id] = request

    def _check_length(self, request: Request) -> None:
        if not 0 < len(request.prompt_token_ids) < self._context_length:
            raise RftError(
                f"a prompt of {len(request.prompt_token_ids)} tokens does not fit the engine's context",
                allowed=f"1 to {self._context_length - 1}",
                todo="shorten it, drop long tasks (text_length_filter), or raise explorer.engine_args.context_length if the model allows more",
            )

    def _report_work(self, request_ids: Collection[str]) -> None:
        worked_on = frozenset(request_ids)
        for request_id in worked_on ^ self._worked_on:
            request = self._open_requests.get(request_id)
            if request is not None:
                request.work.set_worked_on(request_id in worked_on)
        self._worked_on = worked_on

    def _load(self, load: Load) -> None:
        try:
            if load.path is not None:
                self._reads_weights = True
                self._replace_weights(load.path)
                self._reads_weights = False
            self._name_version(load.policy_version_id)
        except Exception as error:
            load.result.set_exception(
                EngineStoppedError(f"loading {load.path} into the engine failed half-way: {error}")
            )
            raise
        if load.path is not None:
            self._has_mixed_weights = False
        self.policy_version_id = load.policy_version_id
        load.result.set_result(None)

    def _receive(self, command: Receive) -> None:
        try:
            checksum = self._receive_weights(command.plan)
        except RftError as error:
            self._has_mixed_weights |= isinstance(error, TransferError) and error.is_half_applied
            command.result.set_exception(error)
            return
        except Exception as error:
            command.result.set_exception(EngineStoppedError(f"receiving weights failed half-way: {error}"))
            raise
        self._has_mixed_weights = False
        self._name_version(command.policy_version_id)
        self.policy_version_id = command.policy_version_id
        command.result.set_result(checksum)

    def _sleep(self, command: Sleep) -> None:
        # Before the call: whatever becomes of it, no token is computed with weights that are gone.
        self._has_mixed_weights |= self._loses_weights_asleep()
        self._is_asleep = True
        try:
            self._fall_asleep()
        except Exception as error:
            command.result.set_exception(EngineStoppedError(f"the engine did not fall asleep: {error}"))
            raise
        command.result.set_result(None)

    def _wake(self, command: WakeUp) -> None:
        try:
            self._wake_up(command.weights_only)
        except Exception as error:
            command.result.set_exception(EngineStoppedError(f"the engine did not wake up: {error}"))
            raise
        self._is_asleep = self._is_asleep and command.weights_only
        command.result.set_result(not self._has_mixed_weights)

    def _compare(self, command: Compare) -> None:
        try:
            command.result.set_result(self._differing_weights(command.path))
        except Exception as error:  # noqa: BLE001 - the engine's own weights are as they were; the caller gets the error
            command.result.set_exception(error)

    def _tell_unfinished(self, command: Unfinished) -> None:
        asked = {
            request.name: self._unfinished(request.request_id, command.first_tokens[request.name])
            for request in self._open_requests.values()
            if request.name in command.first_tokens
        }
        command.result.set_result({name: generation for name, generation in asked.items() if generation is not None})

    def _finish(self, request_id: str, generation: Generation) -> None:
        request = self._open_requests.pop(request_id, None)
        if request is not None:
            self.num_generated_tokens += len(generation.token_ids)
            request.result.set_result(generation)

    def _end(self, failure: EngineStoppedError | None) -> None:
        """Settle all waiting requests and loads, then free the model."""
        reason = failure or EngineStoppedError("the engine is closed", todo="start a new one")
        with self._gate:
            self._stopped = reason
        while not self._inbox.empty():
            command = self._inbox.get()
            if isinstance(command, Request) and command.result.set_running_or_notify_cancel():
                self._open_requests[command.request_id] = command
            elif isinstance(command, Load | Receive | Compare | Unfinished | Sleep | WakeUp):
                command.result.set_exception(reason)
        for request in self._open_requests.values():
            if failure is None:
                request.result.set_result(ABORTED)
            else:
                request.result.set_exception(failure)
        self._open_requests.clear()
        self._close_model()
