"""The settings of an explorer's engine: those of the run, and those of `explorer.engine_args`."""

from __future__ import annotations

from rftcore.config.run import RunConfig
from rftcore.engines import ENGINES
from rftcore.engines.base import EngineConfig
from rftcore.engines.vllm_arguments import refuse_unknown_arguments, slot_rank
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError


def engine_config(config: RunConfig, worker_index: int, *, sends_adapters_alone: bool) -> EngineConfig:
    """Return the engine's settings, with a separate sampling stream for every explorer.

    Args:
        worker_index: number of the explorer.
        sends_adapters_alone: whether the engine gets adapters beside the model's own weights.

    Raises:
        ConfigError: a setting is unknown or wrong.
    """
    explorer, lora = config.explorer, config.trainer.lora
    elsewhere: dict[str, tuple[str, object]] = {
        "tensor_parallel_size": ("explorer.tensor_parallel_size", explorer.tensor_parallel_size),
        "kv_cache": ("sync.kv_cache", config.sync.kv_cache),
        "sleep": ("explorer.sleep", explorer.sleep),
        "adapter_rank": ("sync.adapters", lora.rank if lora is not None and sends_adapters_alone else None),
    }
    for name, (setting, value) in elsewhere.items():
        if name in explorer.engine_args:
            raise ConfigError(
                f"explorer.engine_args.{name} has a place of its own",
                value=explorer.engine_args[name],
                allowed=f"{setting}, now {value}",
                todo=f"remove it there and set {setting}",
            )
    settings = {
        "seed": config.run.seed * 1000 + worker_index,
        **{name: value for name, (_, value) in elsewhere.items()},
        **explorer.engine_args,
    }
    engine = parse_section(EngineConfig, settings, "the engine's settings", within="explorer.engine_args")
    if explorer.engine == "vllm":
        refuse_unknown_arguments(engine.vllm)
        slot_rank(engine.adapter_rank)
    elif explorer.engine in ENGINES.builtins and (engine.vllm or engine.quantization):
        name = "vllm" if engine.vllm else "quantization"
        raise ConfigError(
            f"explorer.engine_args.{name} has no effect in the engine {explorer.engine!r}",
            value=getattr(engine, name),
            todo="remove it, or set explorer.engine: vllm",
        )
    return engine
