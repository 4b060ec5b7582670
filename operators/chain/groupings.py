"""Which stages the tasks pass that a stage creates in place of its rows, and whether these stages can do without what the tasks lack.

A created task passes the chain from its first stage on, but neither the stage that created it nor the grouping of that stage: those with
the same `group_column`, from the stage that writes it to the next that does. It has no column that the grouping adds.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Sequence

import pyarrow as pa

from operators.base import Operator
from operators.chain.stage import Stage, at, identify
from rftdata.errors import ConfigError, RftError


def passed_by(stages: Sequence[Stage], creators: Collection[str]) -> list[Stage]:
    """The stages that tasks pass which stages of these names created."""
    skipped = {place for stage in stages if stage.name in creators for place in _grouping(stages, stage)}
    return [stage for stage in stages if stage.index not in skipped]


def _grouping(stages: Sequence[Stage], creator: Stage) -> set[int]:
    """Places of the stages that tasks of a creator do not pass."""
    column = creator.operator.group_column
    members = [stage for stage in stages if stage.operator.group_column == column]
    starts = [stage.index for stage in members if column in (stage.operator.writes or ())]
    start = max((place for place in starts if place <= creator.index), default=creator.index)
    end = min((place for place in starts if place > creator.index), default=len(stages) + 1)
    grouping = {stage.index for stage in members if start <= stage.index < end} if starts else set()
    return grouping | {creator.index}


def fitted_to_created(stages: Sequence[Stage], given: pa.Schema) -> list[Stage]:
    """The stages of a chain, those behind one that replaces all rows checked against the columns of the tasks that it creates.

    Args:
        stages: validated against what the stages before them return.
        given: the columns of the chain's batches.

    Raises:
        ConfigError: a stage that those tasks pass reads a column that they do not have.
    """
    done: list[Stage] = []
    creators: list[Stage] = []
    schema = given
    for stage in stages:
        if creators and stage in passed_by(stages, [creator.name for creator in creators]):
            schema = _validated(stage, stage.operator, schema, creators[-1])
            stage = identify(stage.index, stage.written, stage.operator, stage.options, done)
        done.append(stage)
        if stage.operator.replaces_with:
            creators.append(stage)
            schema = given
            for before in passed_by(done, [creator.name for creator in creators]):
                # Rows that end here pass it, too: the stage itself stays as it was validated for them.
                schema = _validated(before, copy.copy(before.operator), schema, stage)
    return done


def _validated(stage: Stage, operator: Operator, schema: pa.Schema, creator: Stage) -> pa.Schema:
    try:
        return operator.validate_schema(schema)
    except RftError as error:
        behind = ConfigError(
            f"{error.what}; rows end at stage {creator.index} ({creator.name}), and the tasks made there pass this stage "
            "without the columns of the grouping",
            value=error.value, allowed=error.allowed,
            todo=f"read what those tasks have instead: {', '.join(creator.operator.replaces_with)}; or keep the rows of the group",
        )  # fmt: skip
        raise at(stage.index, stage.name, behind) from error
