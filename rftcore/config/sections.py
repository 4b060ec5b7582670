"""Small sections of a run's configuration: the run itself, its model, its algorithm, its pipelines."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from rftdata.config import Section

RUN_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")


class RunSection(Section):
    name: str = Field(pattern=RUN_NAME.pattern, description="Name of the run.")
    seed: int = Field(0, ge=0, description="Seed of task order, sampling and training.")
    mode: Literal["both", "train", "eval"] = Field(
        "both",
        description="train: no explorer; groups are written through the Python interface. eval: no training; the evaluations of model.path alone"
        " (`rft eval` writes such a configuration).",
    )
    stop_grace_s: float = Field(
        60.0, gt=0, description="Seconds that `rft run` gives its processes to stop before it kills them."
    )


class ModelSection(Section):
    path: str = Field(description="Folder of a model or checkpoint, or a Hugging Face id.")


class AlgorithmSection(Section):
    model_config = ConfigDict(extra="allow", frozen=True)

    name: str = Field(description="grpo, sft, or the path of your own; further keys are settings of the algorithm.")
    group_size: int = Field(8, ge=1, description="Rollouts per task.")
    min_group_size: int | None = Field(
        None, ge=1, description="A group with fewer good rollouts is dropped; 2 by default, 1 if group_size is 1."
    )

    @model_validator(mode="after")
    def _smallest_group_fits(self) -> AlgorithmSection:
        if self.min_group_size is not None and self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size ({self.min_group_size}) is greater than group_size ({self.group_size}), so every group would be dropped"
            )
        return self

    @property
    def smallest_group(self) -> int:
        """The group size below which a group is dropped."""
        return self.min_group_size or min(self.group_size, 2)

    @property
    def args(self) -> dict[str, Any]:
        """The algorithm's further settings, which its `Config` validates."""
        return dict(self.model_extra or {})


class PipelinesSection(Section):
    task: list[Any] = Field(default_factory=list, description="Stages that new tasks pass before they can be selected.")
    experience: list[Any] = Field(default_factory=list, description="Stages between explorer and trainer, in order.")
    workers: int = Field(1, ge=1, description="Pipeline processes of `rft run`; more may join with `rft process`.")
    batch_groups: int = Field(64, ge=1, description="Number of groups that a pipeline worker decides on at a time.")
    patience_s: float = Field(
        60.0,
        ge=0,
        description="Seconds for which a worker waits for a stage that fails on everything before it ends with the stage's error.",
    )
    max_waiting_groups: int | None = Field(
        None,
        ge=1,
        description="Explorers plan no further groups while this many wait for the pipeline; no limit by default.",
    )
