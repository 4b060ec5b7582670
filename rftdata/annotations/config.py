"""The section `labels` of a configuration: the kinds of labels that a run's people and stages use."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from rftdata.annotations.kinds import LabelKind, LabelLevel, LabelTarget, LabelType
from rftdata.config import Section


class LabelKindConfig(Section):
    kind: str = Field(
        pattern=r"^[a-z][a-z0-9_]{0,62}$", description="Name of the kind: small letters, digits and underscores."
    )
    type: LabelType = Field(
        description="bool, number, choice, tags, rubric, text, edit, ranking, spans or turns (`rft docs label`)."
    )
    target: LabelTarget = Field(
        "experience", description="What it is about: an experience, a rollout, a group or a task."
    )
    spec: dict[str, Any] = Field(
        default_factory=dict,
        description="Limits of its values, for example {choices: [good, bad]} or {min: 0, max: 1}; see `rft docs label`.",
    )
    level: LabelLevel | None = Field(
        None,
        description="How values are compared: nominal, ordinal or interval; by default interval for number, ordinal for rubric, ranking and turns,"
        " else nominal.",
    )
    blind: bool = Field(False, description="People see the labels of others only after their own.")
    reopens: bool = Field(
        False, description="A label returns its group to the pipeline, if a stage of its run reads the kind."
    )
    instruction: str = Field("", description="What people are told.")

    @property
    def definition(self) -> LabelKind:
        return LabelKind(**self.model_dump())


class LabelsConfig(Section):
    kinds: list[LabelKindConfig] = Field(
        default_factory=list,
        description="Kinds of labels. A run defines them when it starts; one that differs from what is stored becomes a new version.",
    )

    @model_validator(mode="after")
    def _kinds_differ(self) -> LabelsConfig:
        names = [kind.kind for kind in self.kinds]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"the kind {twice[0]} is defined twice")
        return self
