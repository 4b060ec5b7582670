"""Settings of the explorer that follow from the device and the model where the configuration leaves them out.

A small CPU and a GPU differ in how many answers an engine samples at once, and in how long an answer may reasonably be. The chosen values become
part of the run's configuration: they are printed, stored with the run, and the same for all its roles and after `--resume`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from rftcore.config.run import RunConfig
from rftcore.resolved import ResolvedRun
from rftcore.run.gpus import local_gpus
from rftcore.run.placement import asked_gpus

ASSUMED_TOKENS_PER_S = 10.0
"""Tokens per second of one answer under full load; most engines sample more."""
ROLLOUTS_PER_SEQUENCE = 2
"""Requests in the engine per sequence that it processes, so that it is never idle between two of them."""
MAX_ROLLOUTS_PER_SEQUENCE = 8
"""Rollouts at a time per sequence of the engine, those included that wait for environments, tools and rewards."""


@dataclass(frozen=True)
class _Device:
    name: str
    max_num_seqs: int
    max_tokens: int


_CPU = _Device("a CPU", 64, 256)
_GPU = _Device("a GPU", 256, 2048)


def with_defaults(config: RunConfig) -> tuple[RunConfig, str | None]:
    """Return the configuration with values for settings that its file leaves out, and a sentence about them (None without any).

    Raises:
        ConfigError: a setting of the engine is unknown or wrong.

    With RAY_ADDRESS the cluster is not asked: engines are assumed to have GPUs if the configuration asks for some, or if this machine has one.
    """
    if not config.has_explorer or config.explorer.engine == "none":
        return config, None
    device = _GPU if asked_gpus(config) or local_gpus() else _CPU
    explorer = config.explorer
    set_fields, engine = explorer.model_fields_set, dict(explorer.engine_args)
    chosen: dict[str, Any] = {}
    num_seqs = engine.get("max_num_seqs")
    if num_seqs is None:
        num_seqs = engine["max_num_seqs"] = device.max_num_seqs
    if "max_tokens" not in set_fields:
        context = ResolvedRun(config).stored_context_length
        chosen["max_tokens"] = device.max_tokens if context is None else max(1, min(device.max_tokens, context - 1))
    max_tokens = chosen.get("max_tokens", explorer.max_tokens)
    if "claim_groups" not in set_fields and isinstance(num_seqs, int):
        chosen["claim_groups"] = _claim_groups(config, num_seqs)
    if "rollout_timeout_s" not in set_fields:
        chosen["rollout_timeout_s"] = max(explorer.rollout_timeout_s, math.ceil(max_tokens / ASSUMED_TOKENS_PER_S))
    shown = {f"explorer.{name}": value for name, value in chosen.items()}
    if engine != explorer.engine_args:
        shown = {"explorer.engine_args.max_num_seqs": num_seqs, **shown}
    if not shown:
        return config, None
    settings = ", ".join(f"{name} {value:g}" for name, value in shown.items())
    changed = explorer.model_copy(update={**chosen, "engine_args": engine})
    # A chosen max_tokens is not a user's: where the context turns out to be shorter, it ends answers instead of being refused.
    changed.model_fields_set.intersection_update(set_fields | chosen.keys() - {"max_tokens"} | {"engine_args"})
    new = config.model_copy(update={"explorer": changed})
    new._base_dir = config.base_dir
    return new, f"chosen for {device.name}: {settings}"


def _claim_groups(config: RunConfig, num_seqs: int) -> int:
    """Return how many groups fill the engine; several explorers share those of a batch."""
    groups = math.ceil(ROLLOUTS_PER_SEQUENCE * num_seqs / config.algorithm.group_size)
    num_explorers = config.explorer.num_explorers
    share = math.ceil(config.trainer.batch_groups / num_explorers) if num_explorers > 1 else groups
    return max(1, min(groups, share))


def slow_limit(config: RunConfig) -> str | None:
    """Return a sentence if the limit of a rollout would end long answers of an engine that is not fast; None if it would not."""
    explorer = config.explorer
    needed = explorer.max_tokens / explorer.rollout_timeout_s
    if not config.has_explorer or explorer.engine == "none" or needed <= ASSUMED_TOKENS_PER_S:
        return None
    return (
        f"explorer.rollout_timeout_s ({explorer.rollout_timeout_s:g} s) ends answers of explorer.max_tokens ({explorer.max_tokens}) that are sampled "
        f"with fewer than {needed:.3g} tokens per second; {math.ceil(explorer.max_tokens / ASSUMED_TOKENS_PER_S)} s allow for "
        f"{ASSUMED_TOKENS_PER_S:g}"
    )
