"""The algorithms by name, and `build_algorithm`, which makes one from its configuration section.

A third party's algorithm is named by `./file.py:Class`, a dotted path, or an entry point of group `rftdata.algorithm`.
What a new file needs is written at the top of `base.py`. Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from rftdata.plugins import Registry

if TYPE_CHECKING:
    from rftcore.algorithms.base import Rule  # imports torch

ALGORITHMS = Registry["type[Rule]"]("algorithm", {
    "dpo": "rftcore.algorithms.dpo:DPO",
    "grpo": "rftcore.algorithms.grpo:GRPO",
    "sft": "rftcore.algorithms.sft:SFT",
})  # fmt: skip


class AlgorithmChoice(Protocol):
    """The part of the configuration's `algorithm` section that this package reads."""

    @property
    def name(self) -> str: ...
    @property
    def group_size(self) -> int: ...
    @property
    def args(self) -> Mapping[str, Any]: ...


def build_algorithm(config: AlgorithmChoice, base_dir: Path | None = None) -> Rule:
    """Load the named class and validate its own keys.

    Raises:
        PluginError: no such algorithm, or it does not load.
        ConfigError: an unknown or wrong key, or groups smaller than the algorithm can learn from.
    """
    algorithm_class = ALGORITHMS.load(config.name, base_dir)
    algorithm_config = parse_section(algorithm_class.Config, config.args, config.name, within="algorithm")
    if config.group_size < algorithm_class.min_group_size:
        raise ConfigError(
            f"algorithm.group_size is too small for {config.name}, which compares rollouts of one group",
            value=config.group_size,
            allowed=f"{algorithm_class.min_group_size} or more",
        )
    return algorithm_class(algorithm_config)
