"""Pipeline stages: what stands between rollouts and training, one operator per file.

`operators.build.build_chain` turns the YAML list into a `Chain`; `Chain.run` decides on a batch of whole groups. A
stage's name is one of `BUILTINS`, any Data-Juicer operator's own name, an entry point of group `rftdata.operator`,
`./file.py:attr` or a dotted path to an `Operator` subclass or to a plain function of one row.
"""

from __future__ import annotations

BUILTINS: dict[str, str] = {
    "difficulty_score": "operators.task.difficulty_score:DifficultyScore",
    "diversity_score": "operators.task.diversity_score:DiversityScore",
    "drop_truncated": "operators.experience.drop_truncated:DropTruncated",
    "drop_zero_variance_groups": "operators.experience.drop_zero_variance_groups:DropZeroVarianceGroups",
    "length_penalty": "operators.experience.length_penalty:LengthPenalty",
    "pair_builder": "operators.experience.pair_builder:PairBuilder",
    "quality_score": "operators.task.quality_score:QualityScore",
    "reward_threshold": "operators.experience.reward_threshold:RewardThreshold",
    "sql": "operators.sql:Sql",
    "task_priority": "operators.task.task_priority:TaskPriority",
    "usage_frequency": "operators.task.usage_frequency:UsageFrequency",
}
