"""Whether an engine can schedule a step while the last one runs, as `explorer.engine_args.async_scheduling` asks, or as it would by itself on a GPU."""

from __future__ import annotations

import os

from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus
from rftcore.run.placement import asked_gpus
from rftdata.errors import ConfigError

_STEP_BY_STEP = ("custom_class", "medusa", "mlp_speculator", "ngram", "suffix")
"""Methods of speculative decoding whose drafts vLLM 0.32 takes from the finished step."""


def check_drafts(resolved: ResolvedRun) -> None:
    """Refuse speculative decoding by a method that cannot be scheduled ahead in an engine that would be.

    Raises:
        ConfigError: the engine would not start.
    """
    config = resolved.config
    if not config.has_explorer or config.explorer.engine != "vllm" or not (asked_gpus(config) or local_gpus()):
        return
    engine = resolved.engine(worker_index=0)
    drafts = engine.vllm.get("speculative_config")
    if engine.own_process is False or engine.async_scheduling is False or not isinstance(drafts, dict):
        return
    if drafts.get("method") in _STEP_BY_STEP or drafts.get("disable_padded_drafter_batch"):
        raise ConfigError(
            "vLLM cannot schedule a step ahead with this kind of speculative decoding",
            value=f"explorer.engine_args.vllm.speculative_config: {drafts}",
            todo="set explorer.engine_args.async_scheduling: false",
        )


def check_device(resolved: ResolvedRun) -> None:
    """Refuse explorer.engine_args.async_scheduling on a machine without a GPU, unless a cluster runs the engines.

    Raises:
        ConfigError: the setting would have no effect.
    """
    has_gpu = os.environ.get("RAY_ADDRESS") or local_gpus()
    if resolved.config.has_explorer and not has_gpu and resolved.engine(worker_index=0).async_scheduling:
        raise needs_gpu()


def needs_gpu() -> ConfigError:
    """Return the error of a step that is to be scheduled ahead on a CPU."""
    return ConfigError(
        "explorer.engine_args.async_scheduling needs a GPU, but this machine has no working GPU",
        value=True,
        todo="remove it, or run on a machine with an NVIDIA GPU and driver",
    )
