"""The stages that created tasks run through, and whether those stages can do without the columns that the tasks lack.

A task created in place of rows starts at the chain's first stage. It skips the stage that created it and the grouping of that stage:
the stages with the same `group_column`, from the one that writes the column to the next one that does. It lacks the grouping's columns.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import pyarrow as pa

from operators.base import Operator
from operators.chain.stage import Stage, error_at_stage, identify
from rftdata.errors import ConfigError, RftError


def passed_by(stages: Sequence[Stage], creators: Collection[str]) -> list[Stage]:
    """Return the stages for tasks created by stages of these names."""
    skipped = {place for stage in stages if stage.name in creators for place in _grouping(stages, stage)}
    return [stage for stage in stages if stage.index not in skipped]


def _grouping(stages: Sequence[Stage], creator: Stage) -> set[int]:
    """Return the positions of the stages that the tasks of `creator` skip."""
    column = creator.operator.group_column
    members = [stage for stage in stages if stage.operator.group_column == column]
    starts = [stage.index for stage in members if column in (stage.operator.writes or ())]
    start = max((place for place in starts if place <= creator.index), default=creator.index)
    end = min((place for place in starts if place > creator.index), default=len(stages) + 1)
    grouping = {stage.index for stage in members if start <= stage.index < end} if starts else set()
    return grouping | {creator.index}


def fitted_to_created(stages: Sequence[Stage], batch_schema: pa.Schema) -> list[Stage]:
    """Return the stages, those that created tasks run through checked against the columns of these tasks.

    Args:
        stages: validated against what the stages before them return.
        batch_schema: the columns of the chain's batches.

    Raises:
        ConfigError: a stage that runs on created tasks reads a column that they do not have.
    """
    done: list[Stage] = []
    creators: list[Stage] = []
    schema = batch_schema
    for stage in stages:
        if creators and stage in passed_by(stages, [creator.name for creator in creators]):
            schema = _validated(stage, stage.operator, schema, creators[-1])
            stage = identify(stage.index, stage.written, stage.operator, stage.options, done)
        done.append(stage)
        if stage.operator.replaces_with:
            creators.append(stage)
            schema = batch_schema
            for before in passed_by(done, [creator.name for creator in creators]):
                # The stage still sees rows that end here, so its validated schema is unchanged; a copy is validated.
                schema = _validated(before, copy.copy(before.operator), schema, stage)
    return done


def _validated(stage: Stage, operator: Operator, schema: pa.Schema, creator: Stage) -> pa.Schema:
    try:
        return operator.validate_schema(schema)
    except RftError as error:
        behind = ConfigError(
            f"{error.what}; rows end at stage {creator.index} ({creator.name}), and the tasks created there reach this stage "
            "without the columns of the grouping",
            value=error.value,
            allowed=error.allowed,
            todo=f"read what those tasks have instead: {', '.join(creator.operator.replaces_with)}; or keep the rows of the group",
        )
        raise error_at_stage(stage.index, stage.name, behind) from error
