"""The start of vLLM: from the engine's settings to its own arguments.

Importing this module imports vLLM's schedulers; the environment must be set before.
"""

from __future__ import annotations

import os
from typing import Any

import torch
from vllm import LLM
from vllm.exceptions import VLLMClientError

from rftcore.engines.base import EngineConfig
from rftcore.engines.core_fork import take_fork
from rftcore.engines.vllm_arguments import graph_sizes, slot_rank
from rftcore.engines.vllm_core import (
    CoreProcess,
    OneWorkerExecutor,
    SeveralWorkersExecutor,
    allow_matrix_unit,
    core_from_fork,
    start_here,
)
from rftcore.engines.vllm_scheduler import AheadScheduler, StepScheduler
from rftdata.errors import RftError

_WORKER_EXTENSION = "rftcore.sync.vllm.worker.WeightsExtension"
# Only whole blocks of a prompt are computed once for the responses that share it. vLLM's own 128 tokens on a CPU are longer than many prompts; its
# kernels need a multiple of 32.
_CPU_BLOCK_TOKENS = 32


def start_vllm(model_path: str, config: EngineConfig) -> tuple[LLM, CoreProcess | None]:
    """Load the model; return vLLM, and the process of its engine core if that is another one.

    Raises:
        RftError: vLLM does not start with these settings.
    """
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        _refuse_too_few_gpus(config.tensor_parallel_size, torch.cuda.device_count())
    elif config.async_scheduling:
        raise RftError(
            "explorer.engine_args.async_scheduling needs a GPU, and this explorer has none",
            value=True,
            todo="remove it, or give the explorer a GPU (CUDA_VISIBLE_DEVICES)",
        )
    own_process = config.own_process if config.own_process is not None else on_gpu
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = str(int(own_process))
    start_here()
    if not own_process and (fork := take_fork()) is not None:
        fork.end()
    try:
        with core_from_fork():
            llm = LLM(
                model=model_path,
                dtype=config.dtype,
                seed=config.seed,
                max_model_len=config.context_length,
                max_num_seqs=config.max_num_seqs,
                tensor_parallel_size=config.tensor_parallel_size,
                quantization=config.quantization,  # type: ignore[arg-type]  # vLLM refuses other names, and lists its own
                enforce_eager=config.enforce_eager if config.enforce_eager is not None else not on_gpu,
                enable_prefix_caching=True,
                logprobs_mode="processed_logprobs",
                worker_extension_cls=_WORKER_EXTENSION,
                use_tqdm_on_load=False,
                **_scheduling(config, ahead=own_process and on_gpu),
                **(_processes(config) if own_process else {}),
                **_adapters(config),
                **_memory(config, on_gpu) | _graphs(config, on_gpu) | config.vllm,
            )
    except (ValueError, VLLMClientError) as error:
        raise RftError(
            f"vLLM does not start on {model_path}: {error}",
            todo="check context_length, kv_cache_gib, gpu_memory_utilization and the model's config.json; with speculative decoding, set "
            "explorer.engine_args.async_scheduling: false",
        ) from error
    except RuntimeError as error:
        if not own_process:
            raise
        raise RftError(
            f"vLLM's engine core does not start on {model_path}: {error}",
            todo="read its own error above, in the explorer's log; check context_length, gpu_memory_utilization and the model's config.json",
        ) from error
    return llm, CoreProcess(llm) if own_process else None


def _scheduling(config: EngineConfig, *, ahead: bool) -> dict[str, Any]:
    # A core that shares the explorer's process has no step in flight when weights change, and a CPU computes nothing beside its scheduler.
    ahead = ahead and config.async_scheduling is not False
    return {"async_scheduling": ahead, "scheduler_cls": AheadScheduler if ahead else StepScheduler}


def _processes(config: EngineConfig) -> dict[str, Any]:
    several = config.tensor_parallel_size * int(config.vllm.get("pipeline_parallel_size", 1)) > 1
    return {"distributed_executor_backend": SeveralWorkersExecutor if several else OneWorkerExecutor}


def _adapters(config: EngineConfig) -> dict[str, Any]:
    if config.adapter_rank is None:
        return {}
    return {"enable_lora": True, "max_loras": 1, "max_lora_rank": slot_rank(config.adapter_rank)}


def _memory(config: EngineConfig, on_gpu: bool) -> dict[str, Any]:
    if on_gpu:
        return {"gpu_memory_utilization": config.gpu_memory_utilization, "enable_sleep_mode": config.sleep}
    # OMP_NUM_THREADS has no effect if torch was already imported; vLLM later forbids this call.
    torch.set_num_threads(config.resolve_num_threads())
    allow_matrix_unit()
    return {"kv_cache_memory_bytes": int(config.kv_cache_gib * 2**30), "block_size": _CPU_BLOCK_TOKENS}


def _graphs(config: EngineConfig, on_gpu: bool) -> dict[str, Any]:
    sizes = graph_sizes(config.max_num_seqs, config.vllm) if on_gpu and not config.enforce_eager else None
    return {} if sizes is None else {"cudagraph_capture_sizes": sizes}


def _refuse_too_few_gpus(needed: int, num_gpus: int) -> None:
    if num_gpus < needed:
        raise RftError(
            "explorer.tensor_parallel_size is more than the GPUs that this explorer sees",
            value=needed,
            allowed=f"up to {num_gpus}",
            todo="lower it, or give the explorer more GPUs (CUDA_VISIBLE_DEVICES)",
        )
