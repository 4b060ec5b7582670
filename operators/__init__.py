"""Pipeline stages, which decide what goes from rollouts to training. One operator per file.

`operators.chain.build.build_chain` turns the YAML list into a `Chain`; `Chain.run` decides on a batch of whole groups. A
stage's name is a built-in of `OPERATORS`, a Data-Juicer operator's own name, an entry point of group `rftdata.operator`,
`./file.py:attr`, or a dotted path to an `Operator` subclass or to a plain function of one row.
"""

from __future__ import annotations

from rftdata.plugins import Registry

# Operator classes and functions of one row; `resolve_stage` distinguishes them.
OPERATORS = Registry[object](
    "operator",
    {
        "balance_groups": "operators.experience.balance_groups:BalanceGroups",
        "clip_reward": "operators.experience.clip_reward:ClipReward",
        "decontaminate": "operators.experience.decontaminate:Decontaminate",
        "dedup_exact": "operators.experience.dedup_exact:DedupExact",
        "dedup_near": "operators.experience.dedup_near:DedupNear",
        "difficulty_score": "operators.task.difficulty_score:DifficultyScore",
        "diversity_score": "operators.task.diversity_score:DiversityScore",
        "drop_stale": "operators.experience.drop_stale:DropStale",
        "drop_truncated": "operators.experience.drop_truncated:DropTruncated",
        "drop_zero_variance_groups": "operators.experience.drop_zero_variance_groups:DropZeroVarianceGroups",
        "human_review": "operators.experience.human_review:HumanReview",
        "language_filter": "operators.experience.language_filter:LanguageFilter",
        "language_score": "operators.experience.language_score:LanguageScore",
        "length_penalty": "operators.experience.length_penalty:LengthPenalty",
        "llm_judge": "operators.experience.llm_judge:LlmJudge",
        "mix": "operators.experience.mix:Mix",
        "normalize_reward": "operators.experience.normalize_reward:NormalizeReward",
        "pair_builder": "operators.experience.pair_builder:PairBuilder",
        "pairwise_judge": "operators.experience.pairwise_judge:PairwiseJudge",
        "pass_rate": "operators.experience.pass_rate:PassRate",
        "priority": "operators.experience.priority:Priority",
        "quality_score": "operators.task.quality_score:QualityScore",
        "repetition_score": "operators.experience.repetition_score:RepetitionScore",
        "reward_shaping": "operators.experience.reward_shaping:RewardShaping",
        "reward_threshold": "operators.experience.reward_threshold:RewardThreshold",
        "rubric": "operators.experience.rubric:Rubric",
        "ruler": "operators.experience.ruler:Ruler",
        "sample": "operators.experience.sample:Sample",
        "sql": "operators.sql.stage:Sql",
        "synthesize": "operators.experience.synthesize:Synthesize",
        "tag": "operators.experience.tag:Tag",
        "task_priority": "operators.task.task_priority:TaskPriority",
        "threshold": "operators.experience.threshold:Threshold",
        "usage_frequency": "operators.task.usage_frequency:UsageFrequency",
    },
)
