"""Where a grouping on tasks ends: there rows end, and the task made of each group goes on without the grouping's columns."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pyarrow as pa

from operators.base import Operator
from operators.chain.stage import Stage, at, identify
from operators.data_juicer.aggregating import AggregatorStage
from operators.data_juicer.grouping import GrouperStage, ReverseGrouperStage
from rftdata.errors import ConfigError, RftError


def close_groupings(stages: Sequence[Stage], schema: pa.Schema) -> list[Stage]:
    """Tell the aggregator that ends a grouping on tasks so, and the others of it whose tasks pass them no more.

    Args:
        stages: validated against what the stages before them return.
        schema: the columns of the chain's batches.

    Returns:
        The stages; those behind such an end are validated against what the tasks made there have.

    Raises:
        ConfigError: a stage that those tasks pass reads a column of the grouping.
    """
    open_: dict[str, list[Stage]] = {}
    for stage in stages:
        operator = stage.operator
        if isinstance(operator, ReverseGrouperStage):
            open_.pop(operator.prefix, None)
        elif isinstance(operator, GrouperStage):
            _close(open_.pop(operator.prefix, []))
            open_[operator.prefix] = [stage]
        elif isinstance(operator, AggregatorStage):
            open_[operator.prefix].append(stage)
    for grouping in open_.values():
        _close(grouping)
    return _without_closed(stages, schema)


def _close(grouping: Sequence[Stage]) -> None:
    """The last aggregator that finds something out ends it."""
    last: Stage | None = None
    for stage in grouping:
        if isinstance(stage.operator, AggregatorStage) and stage.operator.may_make and stage.operator.is_on_tasks:
            last = stage
    if last is None:
        return
    assert isinstance(last.operator, AggregatorStage)
    last.operator.ends = True
    for stage in grouping:
        stage.operator.part_of = last.name


def _without_closed(stages: Sequence[Stage], given: pa.Schema) -> list[Stage]:
    """The stages as the tasks that reach them pass them: one made at an end passes no stage of its grouping."""
    done: list[Stage] = []
    closed: set[str] = set()
    end, schema = None, given
    for stage in stages:
        if end is not None and stage.operator.part_of not in closed:
            schema = _validated(stage, stage.operator, schema, end)
            stage = identify(stage.index, stage.written, stage.operator, stage.options, done)
        done.append(stage)
        if isinstance(stage.operator, AggregatorStage) and stage.operator.ends:
            closed.add(stage.name)
            end, schema = stage, given
            for before in done:
                if before.operator.part_of not in closed:
                    # Rows that end there pass it, too: it stays as it was validated for them.
                    schema = _validated(before, copy.copy(before.operator), schema, end)
    return done


def _validated(stage: Stage, operator: Operator, schema: pa.Schema, end: Stage) -> pa.Schema:
    assert isinstance(end.operator, AggregatorStage)
    try:
        return operator.validate_schema(schema)
    except RftError as error:
        there = ", ".join(f"metadata.{name}" for name in end.operator.names_of_made)
        behind = ConfigError(
            f"{error.what}; rows end at stage {end.index} ({end.name}), and the tasks made there pass this stage "
            "without the columns of the grouping",
            value=error.value, allowed=error.allowed,
            todo=f"read what those tasks have instead: {there}; or keep the rows with naive_reverse_grouper",
        )  # fmt: skip
        raise at(stage.index, stage.name, behind) from error
