"""A list of stages from YAML, and one pass of a batch of whole groups through it.

Invariants: every row of the input gets exactly one decision; every dropped row has a stage and a reason; rows in are
rows kept plus rows dropped for every stage; the input table is never changed; the same chain on the same table decides
the same.

Two rules belong to the chain rather than to a stage. A group left with fewer than `min_group_size` rollouts is dropped
whole, on the account of the stage that left it so (under the name `min_group_size` if it came in too small). A row
whose reward is null, NaN or infinite at the end is dropped under the name `reward`: it would turn every weight into NaN.

A stage that raises ends the pass with a `StageError`: nothing is decided for the batch, and the caller may try again
with smaller batches to find the row that does it. A group with a row that waits for a person is left out of the decisions.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import BATCH_SCHEMA, IDENTITY_COLUMNS, CreatedGroup, CreatedTask, StageContext, StageOutcome
from operators.rules import short_groups, spoilt_rewards, without_reward
from operators.stage import Applied, Findings, Known, Stage, StageRun, StageScores, WaitingRow, apply_stage, at, failed
from rftdata.errors import OperatorError, PluginError, RftError
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

Watch = Callable[[Stage, pa.Table, pa.Table, StageOutcome], None]
"""Called after every stage with the table before it, the table after it (dropped rows still in), and what it decided."""


@dataclass(frozen=True)
class ChainResult:
    """What a chain decided.

    Attributes:
        decisions: one row per input row, in input order, with `DECISION_SCHEMA`; rows of groups that wait for a person are not
            among them. `reward` is what the stages made of it, null where none changed it and for dropped rows.
        stages: one entry per stage that ran, in order.
        scores: what scoring stages computed, to be stored.
        waiting: what people are asked.
        created: new tasks and experiences, to be stored.
    """

    decisions: pa.Table
    stages: list[StageRun]
    scores: list[StageScores] = field(default_factory=list)
    waiting: list[WaitingRow] = field(default_factory=list)
    created: list[CreatedTask | CreatedGroup] = field(default_factory=list)


@dataclass
class _Pass:
    """A batch on its way through: `table` holds the rows still alive, `position` where each stood in the input."""

    table: pa.Table
    position: np.ndarray
    stage: np.ndarray  # object, per input row
    reason: np.ndarray  # object, per input row
    found: Findings = field(default_factory=Findings)

    def drop(self, reasons: pa.Array, stage: str) -> int:
        """Take out the rows that have a reason; return how many."""
        dropped = np.asarray(pc.is_valid(reasons).to_numpy(zero_copy_only=False))
        count = int(dropped.sum())
        if count:
            where = self.position[dropped]
            self.stage[where] = stage
            self.reason[where] = reasons.drop_null().to_pylist()
            self._keep(~dropped)
        return count

    def set_aside(self, outcome: StageOutcome, stage: str) -> None:
        """Take out the groups that a person is asked about: they are decided on later, from the first stage on."""
        if not outcome.waiting:
            return
        ids, groups = (self.table[name].to_pylist() for name in ("experience_id", "group_id"))
        self.found.waiting += [
            WaitingRow(ids[row], groups[row], stage, review) for row, review in sorted(outcome.waiting.items())
        ]
        self._keep(~np.isin(groups, [groups[row] for row in outcome.waiting]))

    def _keep(self, mask: np.ndarray) -> None:
        self.position = self.position[mask]
        self.table = self.table.filter(pa.array(mask))


@dataclass
class Chain:
    """Stages in order. Build with `operators.build.build_chain`; not safe for several threads at once.

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

    @property
    def score_keys(self) -> list[str]:
        """Keys under which stored scores are looked up before a run."""
        return [stage.score_key for stage in self.stages if stage.keeps_scores]

    def prepare(self, context: StageContext | None = None) -> None:
        """Open what stages need (imports, models). A missing package is found here, before the first batch.

        Raises:
            PluginError: a stage's package is missing; names the stage and what to install.
        """
        for stage in self.stages if not self._prepared else ():
            try:
                stage.operator.prepare(context or StageContext())
            except RftError as error:
                raise at(stage.index, stage.name, error) from error
        self._prepared = True

    def close(self) -> None:
        """Close what `prepare` opened."""
        for stage in self.stages if self._prepared else ():
            stage.operator.close()
        self._prepared = False

    def run(
        self, table: pa.Table, min_group_size: int | None = None, *, known: Known | None = None, watch: Watch | None = None
    ) -> ChainResult:  # fmt: skip
        """Decide on every row of a batch of whole groups.

        Args:
            table: one row per experience with at least the columns in `columns`; other columns are allowed.
            min_group_size: overrides the chain's own.
            known: scores that are stored already.
            watch: is shown what every stage does.

        Raises:
            StageError: a stage raised; names it. Nothing is decided for the batch.
            OperatorError: the table itself is wrong.
        """
        self.prepare()
        table = self._checked(table)
        group_size = self.min_group_size if min_group_size is None else min_group_size
        going = _Pass(table, np.arange(table.num_rows), *(np.full(table.num_rows, None, object) for _ in range(2)))
        _own_rule(going, MIN_GROUP_SIZE, 0, short_groups(going.table, group_size, "came in"))
        for stage in self.stages:
            self._run_stage(stage, going, group_size, known or {}, watch)
        if self.require_reward:
            index = len(self.stages) + 1
            _own_rule(going, REWARD, index, without_reward(going.table, "the reward is "))
            _own_rule(going, MIN_GROUP_SIZE, index, short_groups(going.table, group_size, "left with a reward"))
        found = going.found
        return ChainResult(_decisions(table, going), found.runs, found.scores, found.waiting, found.created)

    def _checked(self, table: pa.Table) -> pa.Table:
        # A stage that reads whatever there is does not insist on any column.
        read = IDENTITY_COLUMNS.union({REWARD}, *(stage.operator.reads or () for stage in self.stages))
        missing = sorted((read & self.columns) - set(table.column_names))
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

    def _run_stage(self, stage: Stage, going: _Pass, group_size: int, known: Known, watch: Watch | None) -> None:
        started = time.perf_counter()
        before, found = going.table, going.found
        try:
            applied = apply_stage(stage, before, known) if before.num_rows else Applied(StageOutcome.keep_all(0))
            outcome, changed = applied.outcome, _with_columns(before, applied.outcome)
        except PluginError as error:
            # A missing package fails the same way for every row: no smaller batch would help.
            raise at(stage.index, stage.name, error) from error
        except Exception as error:
            raise failed(stage, error, before.num_rows, time.perf_counter() - started, found.runs) from error
        if watch is not None:
            watch(stage, before, changed, outcome)
        going.table = changed
        reasons = outcome.reasons
        spoilt = spoilt_rewards(before, changed, outcome)
        if spoilt is not None:
            reasons = pc.coalesce(reasons, spoilt)
        waits = len(found.waiting)
        going.set_aside(outcome, stage.name)
        if len(found.waiting) > waits:
            reasons = reasons.filter(
                pc.is_in(before["experience_id"].combine_chunks(), going.table["experience_id"].combine_chunks())
            )
        came = going.table.num_rows
        dropped = going.drop(reasons, stage.name)
        if dropped:
            dropped += going.drop(short_groups(going.table, group_size, f"left after {stage.name}"), stage.name)
        found.created += outcome.created
        # The same operator twice, with other bounds, computes the same scores: they are reported once.
        if applied.scores is not None and applied.scores.score_key not in {one.score_key for one in found.scores}:
            found.scores.append(applied.scores)
        seconds = time.perf_counter() - started
        found.runs.append(
            StageRun(stage.name, stage.index, came, came - dropped, dropped, seconds, len(outcome.created))
        )


def _with_columns(table: pa.Table, outcome: StageOutcome) -> pa.Table:
    """The table with the outcome's columns in place."""
    for name, values in outcome.columns.items():
        if name in (REWARD, "priority"):
            values = pc.cast(values, pa.float64())
        position = table.schema.get_field_index(name)
        table = table.append_column(name, values) if position < 0 else table.set_column(position, name, values)
    return table


def _own_rule(going: _Pass, name: str, index: int, reasons: pa.Array) -> None:
    rows_in = going.table.num_rows
    dropped = going.drop(reasons, name)
    if dropped:
        going.found.runs.append(StageRun(name, index, rows_in, rows_in - dropped, dropped, 0.0))


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
    if not pc.all(same, min_count=0).as_py():
        shaped[going.position] = pc.if_else(same, pa.scalar(None, pa.float64()), after).to_pylist()
    priority = table["priority"].combine_chunks().to_numpy(zero_copy_only=False).astype(float)
    priority[going.position] = going.table["priority"].combine_chunks().to_numpy(zero_copy_only=False)
    decisions = pa.table(
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
    waiting = pa.array(sorted({row.group_id for row in going.found.waiting}), pa.int64())
    return decisions.filter(pc.invert(pc.is_in(table["group_id"], waiting))) if len(waiting) else decisions
