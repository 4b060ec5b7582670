"""Tasksets of a run, which may have a workflow, rewards, sampling and limits of their own."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator

from rftcore.config.reward import Combination, RewardConfig, listed_rewards
from rftdata.config import EvalConfig, TasksetConfig


class RunTasksetConfig(TasksetConfig):
    """A taskset of a run. What `explorer` also has replaces it for these tasks."""

    workflow: str | None = Field(
        None, description="Workflow of these tasks, with its own workflow_args; explorer.workflow by default."
    )
    workflow_args: dict[str, Any] | None = Field(
        None,
        description="Settings of the workflow; explorer.workflow_args by default, unless the taskset has a workflow.",
    )
    reward: list[RewardConfig] | None = Field(
        None, description="Rewards of these tasks instead of explorer.reward; [] for none."
    )
    reward_combination: Combination | None = Field(None, description="As explorer.reward_combination.")
    temperature: float | None = Field(None, description="As explorer.temperature.")
    top_p: float | None = Field(None, description="As explorer.top_p.")
    top_k: int | None = Field(None, description="As explorer.top_k.")
    max_tokens: int | None = Field(None, description="As explorer.max_tokens.")
    stop: list[str] | None = Field(None, description="As explorer.stop.")
    max_turns: int | None = Field(None, description="As explorer.max_turns.")
    max_rollout_tokens: int | None = Field(None, description="As explorer.max_rollout_tokens.")
    rollout_timeout_s: float | None = Field(None, description="As explorer.rollout_timeout_s.")
    close_timeout_s: float | None = Field(None, description="As explorer.close_timeout_s.")
    step_timeout_s: float | None = Field(None, description="As explorer.step_timeout_s.")
    reset_timeout_s: float | None = Field(None, description="As explorer.reset_timeout_s.")

    @field_validator("reward", mode="before")
    @classmethod
    def _one_or_many(cls, value: Any) -> Any:
        return listed_rewards(value)

    @property
    def of_explorer(self) -> dict[str, Any]:
        """The settings that replace those of `explorer`."""
        names = set(RunTasksetConfig.model_fields) - set(TasksetConfig.model_fields)
        found = {name: getattr(self, name) for name in sorted(names) if getattr(self, name) is not None}
        if "workflow" in found:
            found.setdefault("workflow_args", {})
        return found


class RunEvalConfig(EvalConfig):
    tasks: list[RunTasksetConfig] = Field(  # type: ignore[assignment]  # more than the buffer reads
        default_factory=list, description="Validation tasksets, which select the best checkpoint."
    )
    test: list[RunTasksetConfig] = Field(  # type: ignore[assignment]  # as above
        default_factory=list,
        description="Test tasksets, answered once after training by the first and the best policy.",
    )
