"""Arguments and abilities of the installed vLLM, read from its files: importing vLLM takes 15 seconds, and a configuration is checked without it."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from rftdata.config_errors import did_you_mean
from rftdata.errors import ConfigError

_SET_BY_RUN = {
    "model": "model.path",
    "tokenizer": "model.path",
    "dtype": "explorer.engine_args.dtype",
    "seed": "run.seed",
    "max_model_len": "explorer.engine_args.context_length",
    "max_num_seqs": "explorer.engine_args.max_num_seqs",
    "quantization": "explorer.engine_args.quantization",
    "enforce_eager": "explorer.engine_args.enforce_eager",
    "async_scheduling": "explorer.engine_args.async_scheduling",
    "gpu_memory_utilization": "explorer.engine_args.gpu_memory_utilization",
    "kv_cache_memory_bytes": "explorer.engine_args.kv_cache_gib",
    "tensor_parallel_size": "explorer.tensor_parallel_size",
    "data_parallel_size": "explorer.num_explorers",
    "enable_sleep_mode": "explorer.sleep",
    "enable_lora": "sync.adapters",
    "max_loras": "sync.adapters",
    "max_lora_rank": "trainer.lora.rank",
}
"""Arguments that follow from settings of the run."""
_FIXED = {
    "enable_prefix_caching": True,
    "logprobs_mode": "processed_logprobs",
    "worker_extension_cls": "rftcore.sync.vllm.worker.WeightsExtension",
    "scheduler_cls": "rftcore.engines.vllm_scheduler",
    "distributed_executor_backend": "rftcore.engines.vllm_core",
}
"""Arguments on which log-probabilities, weights and the end of the engine's processes depend."""
SLOT_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks of adapters for which vLLM has kernels; others use the next."""
_OWN_GRAPHS = 512
_SMALLEST_LARGE_GRAPH = 1024
_LARGEST_GRAPH = 2048
_GRAPH_SETTINGS = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")


@lru_cache(maxsize=1)
def vllm_arguments() -> frozenset[str]:
    """Return the arguments that the installed vLLM takes; empty without one."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    source = Path(spec.origin).with_name("engine") / "arg_utils.py"
    for node in ast.parse(source.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "EngineArgs":
            fields = (line.target for line in node.body if isinstance(line, ast.AnnAssign))
            return frozenset(target.id for target in fields if isinstance(target, ast.Name))
    return frozenset()


def can_free_memory() -> bool:
    """Return whether the installed vLLM has the library with which it frees a GPU's memory; true without vLLM, which other checks miss."""
    spec = importlib.util.find_spec("vllm")
    return spec is None or spec.origin is None or any(Path(spec.origin).parent.glob("cumem_allocator*.so"))


def refuse_unknown_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments for vLLM that it does not have, or that the run sets.

    Args:
        arguments: `explorer.engine_args.vllm`.

    Raises:
        ConfigError: it names the argument, and the one that was probably meant.
    """
    of_vllm = vllm_arguments()
    for name, value in arguments.items():
        key = f"explorer.engine_args.vllm.{name}"
        if name in _SET_BY_RUN:
            raise ConfigError(
                f"{key} has a place of its own", value=value, todo=f"remove it there and set {_SET_BY_RUN[name]}"
            )
        if name in _FIXED:
            raise ConfigError(f"{key} cannot be changed", value=value, allowed=repr(_FIXED[name]), todo="remove it")
        if of_vllm and name not in of_vllm:
            raise ConfigError(
                f"vLLM has no argument {name!r} ({key})", todo=did_you_mean(name, of_vllm, "remove it or correct it")
            )


def graph_sizes(max_num_seqs: int, arguments: Mapping[str, Any]) -> list[int] | None:
    """Return the batch sizes for which vLLM captures CUDA graphs; None leaves the choice to vLLM, which captures up to 512 tokens.

    Without a graph a step of 1,024 tokens takes a quarter longer with a small model. Each size takes 0.1 s or more at the start, so above 128 tokens sizes
    are up to 1/16 apart, and the largest is 2,048. It is 1,024 at least, as vLLM chooses on the largest GPUs, because steps with prompts have more
    tokens than sequences.

    Args:
        arguments: `explorer.engine_args.vllm`. Sizes that it names are vLLM's to check; for speculative decoding vLLM chooses them by the number of drafts.
    """
    compilation = arguments.get("compilation_config")
    named = {*arguments, *(compilation if isinstance(compilation, Mapping) else ())}
    if max_num_seqs <= _OWN_GRAPHS or "speculative_config" in arguments or not named.isdisjoint(_GRAPH_SETTINGS):
        return None
    largest = min(max(max_num_seqs, _SMALLEST_LARGE_GRAPH), _LARGEST_GRAPH)
    sizes = {1, 2, 4, largest}
    for first, end, spacing in ((8, 256, 8), (256, 512, 16), (512, 1024, 32), (1024, 2048, 64)):
        sizes.update(range(first, min(end, largest), spacing))
    return sorted(sizes)


def slot_rank(rank: int | None) -> int | None:
    """Return the smallest of `SLOT_RANKS` that is enough for adapters of this rank; None for None.

    Raises:
        ConfigError: none is enough.
    """
    if rank is None:
        return None
    enough = [size for size in SLOT_RANKS if size >= rank]
    if not enough:
        raise ConfigError(
            "vLLM takes no adapters of this rank beside the model (trainer.lora.rank)",
            value=rank,
            allowed=f"up to {SLOT_RANKS[-1]}",
            todo="set sync.adapters: merged, or a smaller rank",
        )
    return enough[0]
