"""Algorithms: presets by name, the parts by kind, and `build_algorithm`, which composes one.

A third party's part is named by `./file.py:Class`, a dotted path, or an entry point of group `rftdata.advantage`, `rftdata.loss`,
`rftdata.mask`, `rftdata.kl`, `rftdata.aggregation` or `rftdata.correction`. A user's preset is a YAML file. `base.py` describes parts.
Importing this package does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rftcore.algorithms.choice import PartChoice
from rftcore.algorithms.config import AlgorithmConfig
from rftcore.algorithms.presets import load_preset
from rftdata.config import merged
from rftdata.config_errors import parse_section
from rftdata.errors import ConfigError
from rftdata.plugins import Registry

if TYPE_CHECKING:
    from rftcore.algorithms.aggregation import Aggregation
    from rftcore.algorithms.algorithm import Algorithm
    from rftcore.algorithms.base import Advantage, Part, Term, TokenMask
    from rftcore.algorithms.correction import Correction
    from rftcore.algorithms.kl import KLEstimator

PartT = TypeVar("PartT", bound="Part")

ADVANTAGES: Registry[type[Advantage]] = Registry(
    "advantage",
    {
        "best": "rftcore.algorithms.advantages.best:Best",
        "discounted": "rftcore.algorithms.advantages.discounted:Discounted",
        "gae": "rftcore.algorithms.advantages.gae:GAE",
        "gdpo": "rftcore.algorithms.advantages.gdpo:GDPO",
        "gigpo": "rftcore.algorithms.advantages.gigpo:GiGPO",
        "group": "rftcore.algorithms.advantages.group:Group",
        "jsd": "rftcore.algorithms.advantages.jsd:SampledJSD",
        "otb": "rftcore.algorithms.advantages.otb:OTB",
        "pass_at_k": "rftcore.algorithms.advantages.pass_at_k:PassAtK",
        "rae": "rftcore.algorithms.advantages.rae:RAE",
        "remax": "rftcore.algorithms.advantages.remax:ReMax",
        "returns": "rftcore.algorithms.advantages.returns:Returns",
        "teacher": "rftcore.algorithms.advantages.teacher:Teacher",
        "turn_rank": "rftcore.algorithms.advantages.turn_rank:TurnRank",
        "turns": "rftcore.algorithms.advantages.turns:Turns",
    },
)
LOSSES: Registry[type[Term]] = Registry(
    "loss",
    {
        "bradley_terry": "rftcore.algorithms.losses.bradley_terry:BradleyTerry",
        "cispo": "rftcore.algorithms.losses.cispo:CISPO",
        "cpo": "rftcore.algorithms.losses.cpo:CPO",
        "dpo": "rftcore.algorithms.losses.dpo:DPO",
        "dppo": "rftcore.algorithms.losses.dppo:DPPO",
        "gmpo": "rftcore.algorithms.losses.gmpo:GMPO",
        "jsd": "rftcore.algorithms.losses.jsd:JSD",
        "kl_cov": "rftcore.algorithms.losses.kl_cov:KLCov",
        "kto": "rftcore.algorithms.losses.kto:KTO",
        "opmd": "rftcore.algorithms.losses.opmd:OPMD",
        "orpo": "rftcore.algorithms.losses.orpo:ORPO",
        "ppo": "rftcore.algorithms.losses.ppo:PPO",
        "rec": "rftcore.algorithms.losses.rec:REC",
        "reinforce": "rftcore.algorithms.losses.reinforce:Reinforce",
        "sapo": "rftcore.algorithms.losses.sapo:SAPO",
        "sft": "rftcore.algorithms.losses.sft:SFT",
        "simpo": "rftcore.algorithms.losses.simpo:SimPO",
        "smoothed_sft": "rftcore.algorithms.losses.smoothed_sft:SmoothedSFT",
        "sppo": "rftcore.algorithms.losses.sppo:SPPO",
        "topr": "rftcore.algorithms.losses.topr:TOPR",
        "value": "rftcore.algorithms.losses.value:Value",
        "vespo": "rftcore.algorithms.losses.vespo:VESPO",
    },
)
MASKS: Registry[type[TokenMask]] = Registry(
    "mask",
    {
        "clip_b": "rftcore.algorithms.masks.clip_b:ClipB",
        "clip_v": "rftcore.algorithms.masks.clip_v:ClipV",
        "cov": "rftcore.algorithms.masks.cov:Cov",
        "entropy": "rftcore.algorithms.masks.entropy:Entropy",
        "m2po": "rftcore.algorithms.masks.m2po:M2PO",
    },
)
KL_ESTIMATORS: Registry[type[KLEstimator]] = Registry(
    "kl",
    {
        "abs": "rftcore.algorithms.kl:Absolute",
        "corrected": "rftcore.algorithms.kl:Corrected",
        "k1": "rftcore.algorithms.kl:K1",
        "k2": "rftcore.algorithms.kl:K2",
        "k3": "rftcore.algorithms.kl:K3",
    },
)
AGGREGATIONS: Registry[type[Aggregation]] = Registry(
    "aggregation",
    {
        "seq-mean-token-mean": "rftcore.algorithms.aggregation:SequenceMeanTokenMean",
        "seq-mean-token-sum": "rftcore.algorithms.aggregation:SequenceMeanTokenSum",
        "seq-mean-token-sum-norm": "rftcore.algorithms.aggregation:SequenceMeanTokenSumNorm",
        "token-mean": "rftcore.algorithms.aggregation:TokenMean",
    },
)
CORRECTIONS: Registry[type[Correction]] = Registry(
    "correction",
    {
        "mask": "rftcore.algorithms.correction:Mask",
        "truncate": "rftcore.algorithms.correction:Truncate",
    },
)


def build_algorithm(
    name: str, changes: Mapping[str, Any] | None = None, *, group_size: int | None = None, base_dir: Path | None = None
) -> Algorithm:
    """Merge a preset with changes, build the parts, and check that they fit each other.

    Args:
        name: of a preset, or `./file.yaml`.
        changes: keys of the `algorithm` section that replace the preset's.
        group_size: rollouts per task; not checked when None.
        base_dir: folder that `./` is relative to; the current folder when None.

    Raises:
        PluginError: no such preset or part, or one that does not load.
        ConfigError: an unknown or wrong key, parts that do not fit each other, or groups smaller than the parts can learn from.
    """
    from rftcore.algorithms.algorithm import Algorithm
    from rftcore.algorithms.compatibility import check_parts
    from rftcore.algorithms.parts import AlgorithmParts

    config = parse_section(AlgorithmConfig, _with_presets(name, changes or {}, base_dir), name, within="algorithm")

    def build(kinds: Registry[type[PartT]], choice: PartChoice, key: str) -> PartT:
        part = kinds.load(choice.name, base_dir)
        return part(parse_section(part.Config, choice.args, name, within=f"algorithm.{key}"))

    parts = AlgorithmParts(
        loss=build(LOSSES, config.loss, "loss"),
        advantage=build(ADVANTAGES, config.advantage, "advantage") if config.advantage else None,
        mask=build(MASKS, config.mask, "mask") if config.mask else None,
        expert=build(LOSSES, config.expert.loss, "expert.loss") if config.expert else None,
        value=build(LOSSES, config.critic.loss, "critic.loss") if config.critic else None,
        aggregation=build(AGGREGATIONS, config.aggregation, "aggregation"),
        kl=build(KL_ESTIMATORS, config.kl.type, "kl.type") if config.kl.type else None,
        corrections=tuple(build(CORRECTIONS, choice, "correction") for choice in config.correction),
    )
    algorithm = Algorithm(name, config, parts)
    check_parts(algorithm, group_size)
    return algorithm


def _with_presets(name: str, changes: Mapping[str, Any], base_dir: Path | None) -> dict[str, Any]:
    """Merge a user's keys over those of a preset, which may build on another preset. Leave out sections that are null."""
    seen = [name]
    parts = merged(load_preset(name, base_dir), changes)
    while "name" in parts:
        name = str(parts.pop("name"))
        if name in seen:
            raise ConfigError(
                "presets name each other in a circle", value=" → ".join([*seen, name]), todo="remove one `name`"
            )
        seen.append(name)
        parts = merged(load_preset(name, base_dir), parts)
    return {key: value for key, value in parts.items() if value is not None}
