"""A list of stages from YAML, and one pass of a batch of whole groups through it.

Invariants: every row of the input gets exactly one decision; every dropped row has a stage and a reason; rows in are
rows kept plus rows dropped for every stage; the input table is never changed; the same chain on the same table decides
the same.

Two rules belong to the chain rather than to a stage. A group left with fewer than `min_group_size` rollouts is dropped
whole, on the account of the stage that left it so (under the name `min_group_size` if it came in too small). A row
whose reward is null, NaN or infinite at the end is dropped under the name `reward`: it would turn every weight into NaN.

A stage that raises ends the pass with a `StageError`: nothing is decided for the batch, and the caller may try again
with smaller batches to find the row that does it.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import BATCH_SCHEMA, IDENTITY_COLUMNS, Operator, StageOutcome
from operators.resolve import resolve_stage
from operators.rules import short_groups, spoilt_rewards, without_reward
from rftdata.errors import ConfigError, OperatorError, PluginError, RftError
from rftdata.writer import NO_PIPELINE

MIN_GROUP_SIZE = "min_group_size"
"""Stage name of the group rule where no stage of the chain is to blame."""
REWARD = "reward"
"""Stage name of the rule that a kept row has a finite reward."""
DEFAULT_PRIORITY = 0.0

DECISION_SCHEMA = pa.schema(
    [
        pa.field("experience_id", pa.int64(), nullable=False),
        pa.field("kept", pa.bool_(), nullable=False),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("reward", pa.float64()),
        pa.field("priority", pa.float64(), nullable=False),
    ]
)


@dataclass(frozen=True)
class StageRun:
    """One stage over one batch: a row of `operator_run`. Stages count from 1; 0 and n+1 are the chain's own rules."""

    stage: str
    index: int
    rows_in: int
    rows_kept: int
    rows_dropped: int
    seconds: float
    rows_created: int = 0
    error: str | None = None


@dataclass(frozen=True)
class ChainResult:
    """What a chain decided.

    Attributes:
        decisions: one row per input row, in input order, with `DECISION_SCHEMA`. `reward` is what the stages made of
            it, null where none changed it and for dropped rows.
        stages: one entry per stage that ran, in order.
    """

    decisions: pa.Table
    stages: list[StageRun]


class StageError(OperatorError):
    """A stage raised; `run` is the row for `operator_run`, `stages` those that ran before it."""

    def __init__(
        self,
        what: str,
        *,
        value: object = None,
        allowed: str | None = None,
        todo: str | None = None,
        run: StageRun | None = None,
        stages: Sequence[StageRun] = (),
    ) -> None:
        super().__init__(what, value=value, allowed=allowed, todo=todo)
        self.run = run
        self.stages = list(stages)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_stage_error, (self.what, self.value, self.allowed, self.todo, self.run, self.stages)


def _rebuild_stage_error(
    what: str, value: object, allowed: str | None, todo: str | None, run: StageRun | None, stages: list[StageRun]
) -> StageError:
    return StageError(what, value=value, allowed=allowed, todo=todo, run=run, stages=stages)


@dataclass
class _Pass:
    """A batch on its way through: `table` holds the rows still alive, `position` where each stood in the input."""

    table: pa.Table
    position: np.ndarray
    stage: np.ndarray  # object, per input row
    reason: np.ndarray  # object, per input row

    def drop(self, reasons: pa.Array, stage: str) -> int:
        """Take out the rows that have a reason; return how many."""
        dropped = np.asarray(pc.is_valid(reasons).to_numpy(zero_copy_only=False))
        count = int(dropped.sum())
        if count:
            where = self.position[dropped]
            self.stage[where] = stage
            self.reason[where] = reasons.drop_null().to_pylist()
            self.position = self.position[~dropped]
            self.table = self.table.filter(pa.array(~dropped))
        return count


@dataclass(frozen=True)
class Stage:
    """One entry of a chain: its place (from 1), the name written in YAML, and the operator."""

    index: int
    name: str
    operator: Operator


@dataclass
class Chain:
    """Stages in order. Build with `build_chain`; not safe for several threads at once.

    Attributes:
        stages: the stages.
        min_group_size: a group with fewer kept rollouts is dropped; 1 switches the rule off.
        require_reward: whether a kept row needs a finite reward.
    """

    stages: list[Stage]
    min_group_size: int = 1
    require_reward: bool = True
    _prepared: bool = field(default=False, repr=False)

    @property
    def version(self) -> str:
        """Digest of everything that determines decisions: names, resolved arguments, the chain's own rules.

        Without stages it is `NO_PIPELINE`: complete groups then go to the trainer as they are written.
        """
        if not self.stages:
            return NO_PIPELINE
        spec = [[stage.name, stage.operator.spec()] for stage in self.stages]
        text = json.dumps([spec, self.min_group_size, self.require_reward], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that `run` needs; all of `BATCH_SCHEMA` (but `priority`) if some stage may read any of them."""
        needed = set(IDENTITY_COLUMNS) | {"reward"}
        for stage in self.stages:
            needed |= set(BATCH_SCHEMA.names) if stage.operator.reads is None else stage.operator.reads
        return frozenset(needed & set(BATCH_SCHEMA.names)) - {"priority"}

    def prepare(self) -> None:
        """Open what stages need (imports, models). A missing package is found here, before the first batch.

        Raises:
            PluginError: a stage's package is missing; names the stage and what to install.
        """
        for stage in self.stages if not self._prepared else ():
            try:
                stage.operator.prepare()
            except RftError as error:
                raise _at(stage.index, stage.name, error) from error
        self._prepared = True

    def run(self, table: pa.Table, min_group_size: int | None = None) -> ChainResult:
        """Decide on every row of a batch of whole groups.

        Args:
            table: one row per experience with at least the columns in `columns`; other columns are allowed.
            min_group_size: overrides the chain's own.

        Raises:
            StageError: a stage raised; names it. Nothing is decided for the batch.
            OperatorError: the table itself is wrong.
        """
        self.prepare()
        table = self._checked(table)
        group_size = self.min_group_size if min_group_size is None else min_group_size
        going = _Pass(table, np.arange(table.num_rows), *(np.full(table.num_rows, None, object) for _ in range(2)))
        runs: list[StageRun] = []
        _own_rule(runs, going, MIN_GROUP_SIZE, 0, short_groups(going.table, group_size, "came in"))
        for stage in self.stages:
            runs.append(self._run_stage(stage, going, group_size, runs))
        if self.require_reward:
            index = len(self.stages) + 1
            _own_rule(runs, going, REWARD, index, without_reward(going.table, "the reward is "))
            _own_rule(
                runs,
                going,
                MIN_GROUP_SIZE,
                index,
                short_groups(going.table, group_size, "left with a reward"),
            )
        return ChainResult(_decisions(table, going), runs)

    def _checked(self, table: pa.Table) -> pa.Table:
        missing = sorted(self.columns - set(table.column_names))
        if missing:
            raise OperatorError(
                f"the batch lacks the column {missing[0]!r}, which the chain reads",
                value=", ".join(table.column_names),
                allowed=", ".join(sorted(self.columns)),
            )
        if pc.count_distinct(table["experience_id"]).as_py() != table.num_rows or table["experience_id"].null_count:
            raise OperatorError("the batch has an experience_id twice, or none in some row", value=table.num_rows)
        if table.schema.field("reward").type != pa.float64():
            table = table.set_column(table.column_names.index("reward"), "reward", table["reward"].cast(pa.float64()))
        if "priority" not in table.column_names:
            table = table.append_column("priority", pa.array(np.full(table.num_rows, DEFAULT_PRIORITY)))
        return table.combine_chunks()

    def _run_stage(self, stage: Stage, going: _Pass, group_size: int, done: list[StageRun]) -> StageRun:
        started = time.perf_counter()
        before = going.table
        try:
            outcome = stage.operator.apply(before) if before.num_rows else StageOutcome.keep_all(0)
            changed = _with_columns(before, outcome)
        except Exception as error:
            run = StageRun(
                stage.name,
                stage.index,
                before.num_rows,
                0,
                0,
                time.perf_counter() - started,
                error=f"{type(error).__name__}: {error}",
            )
            raise _stage_error(stage, error, run, done) from error
        going.table = changed
        dropped = going.drop(outcome.reasons, stage.name)
        spoilt = spoilt_rewards(before, changed, outcome)
        if spoilt is not None:
            dropped += going.drop(spoilt, stage.name)
        if dropped:
            dropped += going.drop(short_groups(going.table, group_size, f"left after {stage.name}"), stage.name)
        return StageRun(
            stage.name, stage.index, before.num_rows, going.table.num_rows, dropped, time.perf_counter() - started
        )


def build_chain(
    spec: Sequence[Mapping[str, object]] | None,
    base_dir: Path | None = None,
    *,
    min_group_size: int = 1,
    require_reward: bool = True,
    schema: pa.Schema = BATCH_SCHEMA,
) -> Chain:
    """Turn the YAML list of stages into a chain, checking everything that can be checked without data.

    Args:
        spec: single-key mappings {stage name: arguments}; None or [] is the chain that keeps everything.
        base_dir: folder that `./file.py:attr` is relative to; the configuration file's.
        min_group_size: see `Chain`.
        require_reward: see `Chain`.
        schema: the columns that batches will have.

    Raises:
        PluginError: a stage name that nobody knows or that does not load.
        ConfigError: wrong arguments or a column that does not exist; names the stage's place (from 1) and name.
    """
    stages: list[Stage] = []
    for index, entry in enumerate(_entries(spec), start=1):
        name, args = _name_and_args(index, entry)
        try:
            operator = resolve_stage(name, args, base_dir)
            schema = operator.validate_schema(schema)
        except RftError as error:
            raise _at(index, name, error) from error
        stages.append(Stage(index, name, operator))
    return Chain(stages, min_group_size, require_reward)


def _entries(spec: object) -> Sequence[object]:
    if spec is None:
        return []
    if isinstance(spec, str | Mapping) or not isinstance(spec, Sequence):
        raise ConfigError(
            "a pipeline is not a list of stages",
            value=spec,
            allowed="a list of {stage name: arguments}",
            todo="put '- ' before each stage",
        )
    return spec


def _name_and_args(index: int, entry: object) -> tuple[str, object]:
    if isinstance(entry, str):
        return entry, None
    if not isinstance(entry, Mapping) or len(entry) != 1:
        raise ConfigError(
            f"stage {index} of the pipeline is not one stage name with its arguments",
            value=entry,
            allowed="one {stage name: arguments} per list entry",
            todo="start each stage with its own '- ' and indent its arguments below its name",
        )
    name, args = next(iter(entry.items()))
    return str(name), args


def _at(index: int, name: str, error: RftError) -> RftError:
    """The same error, saying which stage it is about."""
    kind = type(error) if isinstance(error, ConfigError) else OperatorError
    return kind(
        f"stage {index} of the pipeline ({name}): {error.what}",
        value=error.value,
        allowed=error.allowed,
        todo=error.todo,
    )


def _stage_error(stage: Stage, error: Exception, run: StageRun, done: list[StageRun]) -> RftError:
    if isinstance(error, PluginError):
        # A missing package fails the same way for every row: no smaller batch would help.
        return _at(stage.index, stage.name, error)
    what = f"stage {stage.index} of the pipeline ({stage.name}) failed on a batch of {run.rows_in} rows: "
    if isinstance(error, RftError):
        return StageError(
            what + error.what, value=error.value, allowed=error.allowed, todo=error.todo, run=run, stages=done
        )
    return StageError(
        f"{what}{type(error).__name__}: {error}",
        run=run,
        stages=done,
        todo="run smaller batches to find the row that does it, or mend the stage",
    )


def _with_columns(table: pa.Table, outcome: StageOutcome) -> pa.Table:
    """The table with the outcome's columns in place; refuses what no stage may do."""
    if len(outcome.reasons) != table.num_rows:
        raise OperatorError(f"decided on {len(outcome.reasons)} rows of {table.num_rows}")
    for name, values in outcome.columns.items():
        if name in IDENTITY_COLUMNS:
            raise OperatorError(f"changes {name}, which says where a row belongs and is fixed")
        if len(values) != table.num_rows:
            raise OperatorError(f"returned {len(values)} values of {name} for {table.num_rows} rows")
        if name in (REWARD, "priority"):
            values = pc.cast(values, pa.float64())
        position = table.schema.get_field_index(name)
        table = table.append_column(name, values) if position < 0 else table.set_column(position, name, values)
    return table


def _own_rule(runs: list[StageRun], going: _Pass, name: str, index: int, reasons: pa.Array) -> None:
    rows_in = going.table.num_rows
    dropped = going.drop(reasons, name)
    if dropped:
        runs.append(StageRun(name, index, rows_in, rows_in - dropped, dropped, 0.0))


def _decisions(table: pa.Table, going: _Pass) -> pa.Table:
    num_rows = table.num_rows
    kept = np.zeros(num_rows, bool)
    kept[going.position] = True
    before = table[REWARD].combine_chunks().take(pa.array(going.position))
    after = going.table[REWARD].combine_chunks()
    # Null-safe comparison: a reward that a stage filled in counts as changed, NaN that stayed NaN does not.
    same = pc.fill_null(pc.equal(before, after), False)
    same = pc.or_(same, pc.and_(pc.is_null(before, nan_is_null=True), pc.is_null(after, nan_is_null=True)))
    shaped = np.full(num_rows, None, object)
    shaped[going.position] = pc.if_else(same, pa.scalar(None, pa.float64()), after).to_pylist()
    priority = table["priority"].combine_chunks().to_numpy(zero_copy_only=False).astype(float)
    priority[going.position] = going.table["priority"].combine_chunks().to_numpy(zero_copy_only=False)
    return pa.table(
        [
            table["experience_id"].cast(pa.int64()),
            pa.array(kept),
            pa.array(going.stage, pa.string()),
            pa.array(going.reason, pa.string()),
            pa.array(shaped, pa.float64()),
            pa.array(np.nan_to_num(priority, nan=DEFAULT_PRIORITY, posinf=None, neginf=None)),
        ],
        schema=DECISION_SCHEMA,
    )
