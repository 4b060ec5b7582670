"""A list of stages from YAML, and the run of a batch of whole groups through it.

Invariants: every input row gets exactly one decision; every dropped row has a stage and a reason; for every stage, rows in equal
rows kept plus rows dropped; the input table is never changed; the same chain decides the same on the same table.

Two rules belong to the chain rather than to a stage. A group left with fewer than `min_group_size` rollouts is dropped
whole, attributed to the stage that left it so (or to `min_group_size` if it arrived too small). A row whose reward is null, NaN or
infinite at the end is dropped under the name `reward`, because it would turn every weight into NaN.

A stage that raises ends the run with a `StageError`. Nothing is decided for the batch; the caller may try smaller batches to
find the failing row. A group with a row that waits for a person is left out of the decisions.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from operators.base import (
    BATCH_SCHEMA,
    IDENTITY_COLUMNS,
    CreatedGroup,
    CreatedTask,
    StageContext,
    StageOutcome,
)
from operators.chain.apply import Applied, apply_stage
from operators.chain.chain_batch import DEFAULT_PRIORITY, REWARD, ChainBatch
from operators.chain.drop_rules import short_groups, turned_non_finite, without_reward
from operators.chain.groupings import passed_by
from operators.chain.stage import Stage, error_at_stage, failed
from rftdata.errors import OperatorError, PluginError, RftError, TimeLimitError
from rftdata.pipeline.label_columns import label_column
from rftdata.pipeline.records import StageRun, Verdicts
from rftdata.pipeline.scores import StoredScores
from rftdata.run import NO_PIPELINE
from rftdata.user_code.time_limits import call

MIN_GROUP_SIZE = "min_group_size"
"""Stage name of the group rule for groups that no stage made too small."""
REVIEWS = "reviews"

Watch = Callable[[Stage, pa.Table, pa.Table, StageOutcome], None]
"""Called after every stage with the table before it, the table after it (dropped rows included), and its outcome."""


@dataclass
class Chain:
    """Stages in order. Build it with `operators.chain.build.build_chain`; not thread-safe.

    Attributes:
        stages: the stages.
        min_group_size: a group with fewer kept rollouts is dropped; 1 switches the rule off.
        require_reward: whether a kept row needs a finite reward.
        label_kinds: kinds of labels that stages read as columns.
    """

    stages: list[Stage]
    min_group_size: int = 1
    require_reward: bool = True
    label_kinds: Sequence[str] = ()
    _prepared: bool = field(default=False, repr=False)

    @cached_property
    def version(self) -> str:
        """Digest of everything that determines decisions: stage names, resolved arguments, the chain's own rules.

        Without stages it is `NO_PIPELINE`: complete groups then go to the trainer as they were written.
        """
        if not self.stages:
            return NO_PIPELINE
        spec = [[stage.written, stage.operator.spec()] for stage in self.stages]
        text = json.dumps([spec, self.min_group_size, self.require_reward], sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    @property
    def columns(self) -> frozenset[str]:
        """The columns that `run` needs: all of `BATCH_SCHEMA` (except `priority`) if some stage may read any of them, and label columns."""
        needed = set(IDENTITY_COLUMNS) | {"reward"}
        for stage in self.stages:
            needed |= set(BATCH_SCHEMA.names) if stage.operator.reads is None else stage.operator.reads
            needed |= {REVIEWS} if stage.operator.may_ask else set()
        return frozenset(needed & set(BATCH_SCHEMA.names)) - {"priority"} | set(map(label_column, self.label_kinds))

    @property
    def reads(self) -> frozenset[str] | None:
        """The columns that stages read; None if a stage may read any column."""
        reads = [stage.operator.reads for stage in self.stages]
        return None if None in reads else frozenset[str]().union(*(columns for columns in reads if columns is not None))

    @property
    def rowwise(self) -> bool:
        """Whether every stage decides on each row alone."""
        return all(stage.operator.rowwise for stage in self.stages)

    @property
    def score_keys(self) -> list[str]:
        """Keys under which stored scores are looked up before a run."""
        return list(dict.fromkeys(stage.score_key for stage in self.stages if stage.score_key))

    def passed_by(self, creators: Collection[str]) -> Chain:
        """Return the chain for tasks created by stages of these names: without those stages and their groupings."""
        stages = passed_by(self.stages, creators)
        return self if len(stages) == len(self.stages) else replace(self, stages=stages)

    def prepare(self, context: StageContext | None = None) -> None:
        """Open what stages need (imports, models), so that a missing package is found before the first batch.

        Raises:
            PluginError: a stage's package is missing; names the stage and what to install.
        """
        context = context or StageContext()
        for stage in self.stages if not self._prepared else ():
            try:
                _prepare(stage, context)
            except TimeLimitError:
                raise  # it names the stage itself
            except RftError as error:
                raise error_at_stage(stage.index, stage.name, error) from error
        self._prepared = True

    def close(self) -> None:
        """Close what `prepare` opened."""
        for stage in self.stages if self._prepared else ():
            stage.operator.close()
        self._prepared = False

    def run(
        self,
        table: pa.Table,
        min_group_size: int | None = None,
        *,
        stored_scores: StoredScores | None = None,
        watch: Watch | None = None,
    ) -> Verdicts:
        """Decide on every row of a batch of whole groups.

        Args:
            table: one row per experience with at least the columns in `columns`; other columns are allowed.
            min_group_size: overrides the chain's value.
            stored_scores: computed in earlier calls, and not computed again.
            watch: called after every stage.

        Raises:
            StageError: a stage raised; the error names it. Nothing is decided for the batch.
            OperatorError: the table itself is wrong.
        """
        self.prepare()
        table = self.checked(table)
        group_size = self.min_group_size if min_group_size is None else min_group_size
        batch = ChainBatch(table)
        self._drop_short(batch, group_size, 0, "came in")
        for stage in self.stages:
            self._run_stage(stage, batch, group_size, stored_scores or {}, watch)
        if self.require_reward:
            index = len(self.stages) + 1
            _own_rule(batch, REWARD, index, without_reward(batch.column(REWARD), "the reward is "))
            self._drop_short(batch, group_size, index, "left with a reward")
        batch.verdicts.decisions = batch.decisions()
        return batch.verdicts

    @staticmethod
    def _drop_short(batch: ChainBatch, group_size: int, index: int, left: str) -> None:
        if group_size > 1:
            _own_rule(batch, MIN_GROUP_SIZE, index, short_groups(batch.groups, batch.position, group_size, left))

    def checked(self, table: pa.Table) -> pa.Table:
        """Return a batch with the types and defaults that stages expect.

        Raises:
            OperatorError: the batch lacks a column, or has an experience twice.
        """
        # A stage that reads all columns requires none of them.
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

    def _run_stage(
        self, stage: Stage, batch: ChainBatch, group_size: int, stored_scores: StoredScores, watch: Watch | None
    ) -> None:
        started = time.perf_counter()
        verdicts, operator = batch.verdicts, stage.operator
        before = batch.table() if watch is not None else None
        try:
            declared = batch.table(None if operator.reads is None else operator.reads | IDENTITY_COLUMNS)
            applied = (
                apply_stage(stage, declared, stored_scores) if batch.num_rows else Applied(StageOutcome.keep_all(0))
            )
            outcome = _without_answered(applied.outcome, batch)
            non_finite = _put_in_place(batch, outcome)
        except PluginError as error:
            # A missing package fails the same way for every row, so a smaller batch would not help.
            raise error_at_stage(stage.index, stage.name, error) from error
        except Exception as error:
            raise failed(stage, error, batch.num_rows, time.perf_counter() - started, verdicts) from error
        if watch is not None and before is not None:
            watch(stage, before, batch.table(), outcome)
        reasons = outcome.reasons if non_finite is None else pc.coalesce(outcome.reasons, non_finite)
        stays = batch.set_aside(outcome, stage.name)
        if stays is not None:
            reasons = reasons.filter(pa.array(stays))
        came = batch.num_rows
        dropped = batch.drop(reasons, stage.name)
        if dropped and group_size > 1:
            left = f"left after {stage.name}"
            dropped += batch.drop(short_groups(batch.groups, batch.position, group_size, left), stage.name)
        verdicts.created += [_signed(made, stage.name) for made in outcome.created]
        # The same operator twice, with other bounds, computes the same scores. They are reported once.
        if applied.scores is not None and applied.scores.score_key not in {one.score_key for one in verdicts.scores}:
            verdicts.scores.append(applied.scores)
        seconds = time.perf_counter() - started
        verdicts.stages.append(
            StageRun(stage.name, stage.index, came, came - dropped, dropped, seconds, len(outcome.created))
        )


def _prepare(stage: Stage, context: StageContext) -> None:
    """Call a stage's `prepare` within its time limit."""
    prepare, limit_s = functools.partial(stage.operator.prepare, context), stage.operator.prepare_timeout_s
    if limit_s is None:
        prepare()
        return
    timeout_s = max(limit_s, stage.options.timeout_s or 0.0)
    call(prepare, timeout_s, f"`prepare` of stage {stage.index} of the pipeline ({stage.name})", cap=False)


def _without_answered(outcome: StageOutcome, batch: ChainBatch) -> StageOutcome:
    """Apply answers that exist already: the row passes or is dropped, and its question is not asked again."""
    reviews = batch.table([REVIEWS]) if outcome.waiting else pa.table({})
    if not reviews.column_names:
        return outcome
    answers = reviews[REVIEWS].to_pylist()
    reasons, waiting = outcome.reasons.to_pylist(), {}
    for row, review in outcome.waiting.items():
        answer = json.loads(answers[row]).get(review.name) if answers[row] else None
        if answer == "drop":
            reasons[row] = reasons[row] or f"review {review.name!r}: drop"
        elif answer != "pass":
            waiting[row] = review
    return replace(outcome, reasons=pa.array(reasons, pa.string()), waiting=waiting)


def _signed(made: CreatedTask | CreatedGroup, stage: str) -> CreatedTask | CreatedGroup:
    return replace(made, stage=stage) if isinstance(made, CreatedTask) else made


def _put_in_place(batch: ChainBatch, outcome: StageOutcome) -> pa.Array | None:
    """Set the outcome's columns in the batch; return reasons for rows whose finite reward became non-finite."""
    non_finite = None
    for name, values in outcome.columns.items():
        if name in (REWARD, "priority"):
            values = pc.cast(values, pa.float64())
        before = batch.column(REWARD) if name == REWARD else None
        batch.set(name, values)
        if before is not None:
            non_finite = turned_non_finite(before, batch.column(REWARD))
    return non_finite


def _own_rule(batch: ChainBatch, name: str, index: int, reasons: pa.Array | None) -> None:
    rows_in = batch.num_rows
    dropped = batch.drop(reasons, name)
    if dropped:
        batch.verdicts.stages.append(StageRun(name, index, rows_in, rows_in - dropped, dropped, 0.0))
